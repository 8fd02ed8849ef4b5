"""Decoding: from the bytes of a file to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock import config
from penstock.errors import PipelineError, SourceError
from penstock.image import arguments, formats, kernel
from penstock.image.pixels import UINT8
from penstock.image.program import ImageWork
from penstock.native import Image, with_channels
from penstock.operation import ArraySpec, BytesSpec, Operation, Spec, file_bytes


@dataclass(frozen=True, slots=True)
class Decode(Operation):
    """Decode a JPEG, PNG, WebP, BMP, GIF or TIFF file to uint8 (height, width, channels).

    ``mode`` is ``"rgb"`` or ``"gray"`` (1 channel). ``"rgb"`` always gives 3 channels: grey is
    repeated, transparency dropped, CMYK converted, 16 bits cut to 8. Of an animation the first
    frame is decoded. The EXIF orientation is not applied: pixels come as they are stored, as in PIL
    and torchvision.

    A file that is cut short or damaged raises SourceError, and so does any file that PIL refuses;
    it never gives a half-grey picture. Stray bytes in the header and at the end of a JPEG are
    ignored, as in PIL. A picture of more than ``max_pixels`` is refused before memory is allocated
    for it. ``None``: the limit of ``PENSTOCK_MAX_PIXELS``, by default 178,956,970, at which PIL
    refuses too.

    >>> import cv2, numpy as np
    >>> _, png = cv2.imencode(".png", np.zeros((4, 6, 3), np.uint8))
    >>> Decode().apply(png.tobytes(), None).shape
    (4, 6, 3)
    """

    mode: str = "rgb"
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        arguments.choice("decode", "mode", self.mode, ("rgb", "gray"))
        if self.max_pixels is not None:
            arguments.integer("decode", "max_pixels", self.max_pixels, least=1)

    def __fingerprint__(self) -> str:
        # The limit changes no sample: caches and checkpoints outlive a change of it.
        return self.mode

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
        try:
            found = formats.identify(data)
            self.check_size(*found.size(data))
            if found is formats.png and self.mode == "rgb":
                pixels = kernel.decode_png(data)
                if pixels is not None:
                    return pixels
            whole = found.checked(data)
            decoder = formats.jpeg if found is formats.jpeg else formats.opencv
            return with_channels(decoder.decode(whole, "RGB" if self.mode == "rgb" else "GRAY"))
        except formats.Damaged as error:
            raise unreadable(data, str(error)) from None

    def kernel_work(self, key: bytes) -> ImageWork | None:
        if self.mode != "rgb":
            return None
        return ImageWork(decodes=True, most_pixels=self.most_pixels)

    @property
    def most_pixels(self) -> int:
        """The limit on the size of a picture."""
        return config.max_pixels() if self.max_pixels is None else self.max_pixels

    def check_size(self, height: int, width: int) -> None:
        """Raise SourceError if a picture of this size is above the limit."""
        most = self.most_pixels
        if height * width > most:
            raise SourceError(
                f"decode found a picture of {width:,} x {height:,} = {height * width:,} pixels; "
                f"the limit is {most:,}. If the file is right, raise the limit with "
                "decode(max_pixels=...) or the environment variable PENSTOCK_MAX_PIXELS; "
                "otherwise leave it out."
            )


def unreadable(data: memoryview, why: str) -> SourceError:
    return SourceError(
        f"decode cannot read {data.nbytes:,} bytes that begin {bytes(data[:8])!r}: {why}. Copy the "
        "file again from its origin, or leave it out."
    )
