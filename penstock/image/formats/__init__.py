"""The formats of image files: how to recognise each, read its size, and check that it is whole.

Decoders disagree about damage. OpenCV paints what it cannot read grey, and some of its libraries
print to stderr. So a file is checked here before a decoder sees it, and a file that PIL refuses is
refused. Each format has a module with two functions:

- ``size(data)`` returns height and width from the header, in a few microseconds.
- ``checked(data)`` returns the bytes to give to the decoder: the first picture of the file, without
  parts that do not change its pixels.

Both raise ``Damaged``. Sizes are limited before anything of that size is allocated.
"""

from __future__ import annotations

from types import ModuleType

from penstock.image.formats import bmp, gif, jpeg, opencv, png, tiff, webp
from penstock.image.formats.damaged import Damaged

NAMES = "JPEG, PNG, WebP, BMP, GIF and TIFF"


def identify(data: memoryview) -> ModuleType:
    """The module of the format that a file begins like."""
    begin = bytes(data[:12])
    if begin.startswith(b"\xff\xd8\xff"):
        return jpeg
    if begin.startswith(b"\x89PNG\r\n\x1a\n"):
        return png
    if begin[:4] == b"RIFF" and begin[8:] == b"WEBP":
        return webp
    if begin.startswith((b"GIF87a", b"GIF89a")):
        return gif
    if begin.startswith(b"BM"):
        return bmp
    if begin.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return tiff
    raise Damaged(f"it does not begin like an image; decode reads {NAMES} files")


__all__ = ["Damaged", "identify", "jpeg", "opencv", "png"]
