"""Imports one package in a separate process and reports the result."""

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
    """Import a module, write the result as JSON to the last line of the output, and exit."""
    result: dict[str, Any] = {"state": "present", "version": "", "error": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            imported = importlib.import_module(module)
            result["version"] = _version(imported, distributions)
            result.update(_DETAILS.get(module, lambda _: {})(imported))
        except ModuleNotFoundError as error:
            result["state"] = "absent" if error.name == module else "broken"
            result["error"] = "" if error.name == module else str(error)
        except BaseException as error:
            result["state"], result["error"] = "broken", f"{type(error).__name__}: {error}"
    result["gil"] = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
    result["said"] = [str(warning.message) for warning in caught]
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    # Skip the exit handlers: those of a broken library may crash.
    os._exit(0)


def _version(module: Any, distributions: list[str]) -> str:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
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


def details_of_torch(torch: Any) -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            devices.append({"kind": "cuda", "name": gpu.name, "memory": gpu.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"kind": "mps", "name": "Apple GPU", "memory": 0})
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        for number in range(xpu.device_count()):
            gpu = xpu.get_device_properties(number)
            devices.append({"kind": "xpu", "name": gpu.name, "memory": gpu.total_memory})
    return {
        "cuda": torch.version.cuda or "",
        "rocm": getattr(torch.version, "hip", None) or "",
        "devices": devices,
    }


_DETAILS: dict[str, Callable[[Any], dict[str, Any]]] = {"cv2": _opencv, "torch": details_of_torch}
