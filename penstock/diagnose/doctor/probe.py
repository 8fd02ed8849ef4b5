"""Runs in a process of its own: imports one package and says how that went."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any


def main(module: str, distributions: list[str]) -> None:
    """Write what importing a module tells as the last line of the output, and end."""
    found: dict[str, Any] = {"state": "present", "version": "", "error": ""}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            imported = importlib.import_module(module)
            found["version"] = _version(imported, distributions)
            found.update(_MORE.get(module, lambda _: {})(imported))
        except ModuleNotFoundError as error:
            found["state"] = "absent" if error.name == module else "broken"
            found["error"] = "" if error.name == module else str(error)
        except BaseException as error:
            found["state"], found["error"] = "broken", f"{type(error).__name__}: {error}"
    found["gil"] = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
    found["said"] = [str(one.message) for one in said]
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    # What a broken library does on its way out is of no interest here.
    os._exit(0)


def _version(module: Any, distributions: list[str]) -> str:
    own = getattr(module, "__version__", None)
    if isinstance(own, str):
        return own
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _opencv(cv2: Any) -> dict[str, Any]:
    framework = re.search(r"Parallel framework:\s*(.+)", cv2.getBuildInformation())
    cv2.setNumThreads(0)
    return {
        "threads": framework[1].strip() if framework else "none",
        "stays_single": cv2.getNumThreads() <= 1,
    }


def _torch(torch: Any) -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(number)
            devices.append({"kind": "cuda", "name": found.name, "memory": found.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"kind": "mps", "name": "Apple GPU", "memory": 0})
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        for number in range(xpu.device_count()):
            found = xpu.get_device_properties(number)
            devices.append({"kind": "xpu", "name": found.name, "memory": found.total_memory})
    return {
        "cuda": torch.version.cuda or "",
        "rocm": getattr(torch.version, "hip", None) or "",
        "devices": devices,
    }


_MORE: dict[str, Callable[[Any], dict[str, Any]]] = {"cv2": _opencv, "torch": _torch}
