"""How programs that tests start can import torchvision.

Its compiled operators may not match the installed torch. The transforms need no operator, and
importing torchvision only requires that two of them exist.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

STAND_INS = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )

sys.meta_path.insert(0, Finder())
"""


@functools.cache
def load() -> tuple[Any, bool]:
    """torchvision, and whether its import needs the stand-ins.

    Raises ImportError or RuntimeError if it cannot be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        try:
            return importlib.import_module("torchvision"), False
        except RuntimeError:
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )
            return importlib.import_module("torchvision"), True


def customization() -> str | None:
    """The text of the ``sitecustomize.py`` with which programs can import torchvision.

    Empty if they need none; ``None`` if torchvision cannot be imported.
    """
    try:
        _, stand_ins = load()
    except (ImportError, RuntimeError):
        return None
    return STAND_INS if stand_ins else ""
