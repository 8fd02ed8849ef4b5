"""Checks an installed Penstock: its kernel decodes, and with a libjpeg of its own.

Run by scripts/wheel in an environment that has the wheel and simplejpeg.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import simplejpeg

import penstock
from penstock import native
from penstock.image import kernel

OWN = Path(penstock.__file__).resolve().parents[1] / "penstock.libs"


def libraries() -> set[Path]:
    """The libjpegs that this process has loaded, whatever each is called."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return {path for path in paths if "jpeg" in path.name and ".so" in path.name}


def check() -> str:
    """What is wrong, or nothing."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
    data = simplejpeg.encode_jpeg(pixels, 90, "RGB", "420")
    others = libraries()
    if not native.kernel_available():
        return native.why_no_kernel()

    decoded = np.zeros_like(pixels)
    kernel.region(data, (0, 0, 48, 64), decoded)
    used = libraries() - others
    if not used or any(path.parent != OWN for path in used):
        named = ", ".join(map(str, sorted(used))) or "a libjpeg that was there before"
        return f"the kernel uses {named}, and not one in {OWN}"

    # Two versions of libjpeg-turbo may round differently.
    expected = simplejpeg.decode_jpeg(data, "RGB")
    apart = int(np.abs(decoded.astype(int) - expected).max())
    if apart > 2:
        return f"the kernel's pixels are up to {apart} grey levels from simplejpeg's"
    print(f"    decodes with {', '.join(path.name for path in used)}")
    return ""


if __name__ == "__main__":
    sys.exit(check() or 0)
