"""Checks an installed wheel: its kernel decodes, and uses the libjpeg bundled in the wheel.

scripts/wheel runs it in an environment with the wheel and simplejpeg.
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
    """The libjpeg libraries that this process has loaded, under any file name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return {path for path in paths if "jpeg" in path.name and ".so" in path.name}


def check() -> str:
    """An error message, or an empty string if everything is fine."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
    data = simplejpeg.encode_jpeg(pixels, 90, "RGB", "420")
    before = libraries()
    if not native.kernel_available():
        return native.why_no_kernel()

    decoded = np.zeros_like(pixels)
    kernel.region(data, (0, 0, 48, 64), decoded)
    used = libraries() - before
    if not used or any(path.parent != OWN for path in used):
        named = ", ".join(map(str, sorted(used))) or "a libjpeg that was loaded before"
        return f"the kernel uses {named} instead of one in {OWN}"

    # simplejpeg has another version of libjpeg-turbo, which may round differently.
    expected = simplejpeg.decode_jpeg(data, "RGB")
    difference = int(np.abs(decoded.astype(int) - expected).max())
    if difference > 2:
        return f"the kernel's pixels differ from simplejpeg's by up to {difference} grey levels"
    print(f"    decodes with {', '.join(path.name for path in used)}")
    return ""


if __name__ == "__main__":
    sys.exit(check() or 0)
