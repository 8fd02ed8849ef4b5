"""Decoding of JPEGs by the device alone (``decode="device"``): torchcodec, or nvImageCodec.

Both decode with nvJPEG, whose pixels differ from those of the CPU: see ``TOLERANCE``. So this is
never chosen unless the user asks for it. ``jpeg.decode`` has the bits of the CPU instead, and needs
the CPU for the entropy-coded bits.

The lines that call the two libraries are in the classes ``TorchCodec`` and ``NvImageCodec``. They
have never run on a GPU.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from penstock.errors import MissingExtraError, SourceError
from penstock.image import kernel
from penstock.image.on_device.ragged import Ragged

TOLERANCE = 2.0
"""Most grey levels by which the pixels of a photograph may differ from the CPU's, on average.
nvJPEG has another inverse transform, and may repeat chroma where libjpeg-turbo smooths it, so
single pixels at edges between colours differ by much more."""

OLDEST_TORCHCODEC = (0, 17)
"""Earlier versions do not decode lists of JPEGs on a GPU into memory of torch's allocator."""

INSTALL = (
    'decode="device" needs a library that decodes JPEGs on the GPU. Install one of these: '
    '"pip install torchcodec" (0.17 or newer, the build for your version of CUDA), or '
    '"pip install nvidia-nvimgcodec-cu12[all]" (-cu13 for CUDA 13). Or leave decode= out: then the '
    "CPU reads the entropy-coded bits and the GPU does the rest, with the bits of the CPU"
)

Place = tuple[int, int, int, int]
"""Top, left, height and width of a box in a picture."""


class JpegLibrary(Protocol):
    """A library that decodes JPEGs on a device. ``package``: the name by which it is imported."""

    package: ClassVar[str]

    def decode(self, files: Sequence[bytes], boxes: Sequence[Place]) -> list[torch.Tensor | None]:
        """The box of each file, (height, width, 3) on the device. ``None``: it cannot."""
        ...


class TorchCodec:
    """Decodes whole pictures, and cuts the boxes out of them."""

    package: ClassVar[str] = "torchcodec"

    def __init__(self, device: torch.device) -> None:
        import torchcodec
        from torchcodec.decoders import decode_jpeg

        found = tuple(map(int, re.findall(r"\d+", torchcodec.__version__)[:2]))
        if found < OLDEST_TORCHCODEC:
            raise ImportError(f"torchcodec {torchcodec.__version__} is older than 0.17")
        self._decode: Callable[..., Any] = decode_jpeg
        self._device = device

    def decode(self, files: Sequence[bytes], boxes: Sequence[Place]) -> list[torch.Tensor | None]:
        pictures = self._pictures(list(files))
        return [
            None
            if picture is None
            else picture.permute(1, 2, 0)[top : top + height, left : left + width]
            for picture, (top, left, height, width) in zip(pictures, boxes, strict=True)
        ]

    def _pictures(self, files: list[bytes]) -> list[torch.Tensor | None]:
        try:
            return list(self._decode(files, mode="RGB", device=self._device))
        except RuntimeError:
            # A list fails as a whole. Only one that is alone shows which file was the reason.
            if len(files) == 1:
                return [None]
            return [picture for file in files for picture in self._pictures([file])]


class NvImageCodec:
    """Decodes the boxes only."""

    package: ClassVar[str] = "nvidia.nvimgcodec"

    def __init__(self, device: torch.device) -> None:
        from nvidia import nvimgcodec

        self._library = nvimgcodec
        # libjpeg-turbo smooths chroma too.
        self._decoder = nvimgcodec.Decoder(
            device_id=device.index or 0, options=":fancy_upsampling=1"
        )
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False)
        self._device = device

    def decode(self, files: Sequence[bytes], boxes: Sequence[Place]) -> list[torch.Tensor | None]:
        region, stream = self._library.Region, self._library.CodeStream
        streams = [
            stream(file).get_sub_code_stream(region=region(top, left, top + height, left + width))
            for file, (top, left, height, width) in zip(files, boxes, strict=True)
        ]
        current = torch.cuda.current_stream(self._device).cuda_stream
        images = self._decoder.decode(streams, params=self._params, cuda_stream=current)
        return [None if image is None else torch.from_dlpack(image) for image in images]


LIBRARIES: tuple[type[TorchCodec | NvImageCodec], ...] = (TorchCodec, NvImageCodec)
"""In the order in which they are tried. torchcodec allocates from torch's own allocator, so what
preparation frees the training step can use."""


def check_installed() -> None:
    """Raise MissingExtraError if no library is installed. Nothing is imported or initialised."""
    names = [one.package for one in LIBRARIES]
    if not any(map(_is_installed, names)):
        raise MissingExtraError(f"{INSTALL}. Found neither {' nor '.join(names)}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # the package that should contain it is missing
        return False


def library(device: torch.device) -> JpegLibrary:
    """The first library that is installed and works; raises MissingExtraError if there is none."""
    reasons = []
    for make in LIBRARIES:
        try:
            return make(device)
        except (ImportError, OSError, RuntimeError) as error:
            # OSError, RuntimeError: it is installed for another version of CUDA or torch.
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    raise MissingExtraError(f"{INSTALL}. Found: {'; '.join(reasons)}")


def decode(
    files: Sequence[bytes], boxes: Sequence[Place], by: JpegLibrary
) -> tuple[Ragged | None, list[int], list[Exception | None]]:
    """Decode boxes of JPEGs on the device.

    Returns the decoded pictures (``None`` if there are none), the position of each in ``files``,
    and for each file ``None`` or its error. As in ``Coefficients``, ``kernel.Unsupported`` means
    that the CPU must decode the file, which also says whether it is damaged.
    """
    errors: list[Exception | None] = [_refusal(*one) for one in zip(files, boxes, strict=True)]
    asked = [number for number, error in enumerate(errors) if error is None]
    decoded = by.decode([files[n] for n in asked], [boxes[n] for n in asked]) if asked else []
    pictures, numbers = [], []
    for number, picture in zip(asked, decoded, strict=True):
        _, _, height, width = boxes[number]
        if picture is None or picture.shape != (height, width, 3) or picture.dtype != torch.uint8:
            found = "nothing" if picture is None else f"{picture.dtype} {tuple(picture.shape)}"
            errors[number] = kernel.Unsupported(
                f"the device decodes it to {found}, not to {height} x {width} pixels of RGB"
            )
        else:
            pictures.append(picture.reshape(-1))
            numbers.append(number)
    if not pictures:
        return None, numbers, errors
    places = np.array([boxes[number] for number in numbers])
    joined = Ragged.packed(torch.cat(pictures), places[:, 2:], places[:, :2])
    return joined, numbers, errors


def _refusal(file: bytes, box: Place) -> Exception | None:
    """Why the device must not see a file; ``None`` if it may."""
    try:
        rows, columns, components = kernel.size(file)
    except (kernel.Unsupported, SourceError) as error:
        return error
    if components not in (1, 3):
        return kernel.Unsupported(f"it has {components} components, not 1 or 3")
    top, left, height, width = box
    inside = 0 <= top < top + height <= rows and 0 <= left < left + width <= columns
    if not inside:
        return kernel.Unsupported(f"box {tuple(box)} is not within {rows} x {columns} pixels")
    return None
