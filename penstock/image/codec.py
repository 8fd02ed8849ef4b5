"""Decoding: from the bytes of a file to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import PipelineError, SourceError
from penstock.image import arguments
from penstock.image.pixels import UINT8
from penstock.native import Image, load_cv2, load_simplejpeg, with_channels
from penstock.operation import ArraySpec, BytesSpec, Operation, Spec, file_bytes

_JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True, slots=True)
class Decode(Operation):
    """Decode a JPEG, PNG, WebP, BMP, GIF or TIFF file to uint8 (height, width, channels).

    ``mode`` is ``"rgb"`` or ``"gray"`` (1 channel). ``"rgb"`` always gives 3 channels: grey is
    repeated, transparency dropped, CMYK converted, 16 bits cut to 8. The EXIF orientation is not
    applied: pixels come as they are stored, as in PIL and torchvision. A truncated or damaged file
    raises SourceError; it never gives a half-grey picture. Stray bytes between the segments of a
    JPEG are ignored, as in PIL.

    >>> import cv2, numpy as np
    >>> _, png = cv2.imencode(".png", np.zeros((4, 6, 3), np.uint8))
    >>> Decode().apply(png.tobytes(), None).shape
    (4, 6, 3)
    """

    mode: str = "rgb"

    def __post_init__(self) -> None:
        arguments.choice("decode", "mode", self.mode, ("rgb", "gray"))

    def output(self, spec: Spec) -> Spec:
        encoded = (
            spec is None
            or isinstance(spec, BytesSpec)
            or (len(spec.shape) == 1 and spec.dtype == UINT8)
        )
        if not encoded:
            raise PipelineError(
                f"decode got an array ({spec}); it needs the bytes of an image file. "
                "If the images are decoded already, leave it out."
            )
        return ArraySpec((None, None, 3 if self.mode == "rgb" else 1), UINT8)

    def apply(self, value: Any, params: Any) -> Image:
        data = file_bytes(value, "image")
        if data[:3] == _JPEG:
            image = self._jpeg(data)
            if image is not None:
                return image
        return self._any(data)

    def _jpeg(self, data: memoryview) -> Image | None:
        """The decoded image, or ``None`` for a kind of JPEG that simplejpeg does not support."""
        decode_jpeg = load_simplejpeg().decode_jpeg
        colorspace = "RGB" if self.mode == "rgb" else "GRAY"
        try:
            return with_channels(decode_jpeg(data, colorspace))
        except ValueError as error:
            why = str(error)
            if "extraneous bytes" in why:
                return with_channels(decode_jpeg(data, colorspace, strict=False))
            if "premature" in why.lower() or "Corrupt JPEG" in why:
                raise _unreadable(data, why) from error
            return None

    def _any(self, data: memoryview) -> Image:
        cv2 = load_cv2()
        flags = cv2.IMREAD_COLOR if self.mode == "rgb" else cv2.IMREAD_GRAYSCALE
        try:
            image = cv2.imdecode(
                np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION
            )
        except cv2.error as error:
            raise _unreadable(data, "OpenCV rejects it") from error
        if image is None:
            raise _unreadable(data, "it is damaged, cut short, or not an image")
        if self.mode == "rgb":
            cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
        return with_channels(image)


def _unreadable(data: memoryview, why: str) -> SourceError:
    return SourceError(
        f"decode cannot read {data.nbytes:,} bytes that begin {bytes(data[:8])!r}: {why}. Copy the "
        "file again from its origin, or leave it out."
    )
