"""How programs that tests start can import torchvision.

Its compiled operators may not match the installed torch. The transforms need no operator, and
importing torchvision only requires that two of them exist.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
def customization() -> str | None:
    """The text of the ``sitecustomize.py`` with which programs can import torchvision.

    Empty if they need none; ``None`` if torchvision cannot be imported. Tried once for all tests of
    a process: an import takes 3 s of CPU time.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    for text in (STAND_INS, ""):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sitecustomize.py").write_text(text)
            done = subprocess.run(
                [sys.executable, "-c", "import torchvision"],
                env={**os.environ, "PYTHONPATH": folder},
                capture_output=True,
                check=False,
            )
        if done.returncode == 0:
            return text
    return None
