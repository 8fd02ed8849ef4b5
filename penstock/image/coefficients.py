"""Coefficients of JPEGs, packed: the CPU reads the entropy-coded bits, a device does the rest.

Entropy-coded bits can only be read one after the other. Everything after that (dequantization,
inverse transform, upsampling of chroma, conversion to RGB) is the same work for every block and
pixel, which a device does in parallel: ``image/on_device/jpeg.py``. Only the blocks that a crop
needs are packed. ``native/jpeg/packed.h`` has the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.image import jpeg_index, kernel

PICTURE = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("pixel", "height", "width", "top", "left", "block", "blocks", "across", "down"),
            *("finer_across", "finer_down", "components", "unit_top", "unit_left"),
            *("full_height", "full_width"),
        )
    ]
)
"""A picture in the table: ``PackedPicture`` in ``native/jpeg/packed.h``.

It begins as a row of ``Ragged`` does."""

STEPS = 3 * 64
"""Quantization steps of a picture: 64 for each component, int16, row by row."""


@dataclass(frozen=True)
class Coefficients:
    """Packed coefficients of a tiny-batch, on the host.

    - ``packed``: uint8, the one buffer that is copied to the device. It has the table of pictures,
      their quantization steps (``STEPS`` each), a record of four bytes for each block, and data.
    - ``pictures``: the table again, for the host: with it the result is allocated on the device
      without waiting for the device.
    - ``numbers``: for each packed picture, its position in the list of files.
    - ``errors``: for each file, ``None`` if it is packed. Otherwise ``kernel.Unsupported`` (decode
      it on the CPU, which also says whether it is damaged), or the error of decoding it there.
    """

    packed: NDArray[np.uint8]
    pictures: NDArray[Any]
    numbers: list[int]
    errors: list[Exception | None]

    @cached_property
    def blocks(self) -> int:
        """Blocks of all pictures. Their samples take 64 bytes each before conversion to RGB."""
        return int(self.pictures["blocks"].sum())

    @cached_property
    def pixel_bytes(self) -> int:
        """Bytes of the RGB pixels of all boxes."""
        return int((self.pictures["height"] * self.pictures["width"]).sum()) * 3

    @property
    def parts(self) -> tuple[slice, slice, slice, slice]:
        """Where ``packed`` has the table, the steps, the records and the data."""
        count = len(self.pictures)
        table = count * PICTURE.itemsize
        steps = table + count * STEPS * 2
        records = steps + self.blocks * 4
        return (
            slice(0, table),
            slice(table, steps),
            slice(steps, records),
            slice(records, len(self.packed)),
        )


def read_coefficients(
    files: Sequence[bytes | memoryview | str | PathLike[str]],
    boxes: Sequence[tuple[int, int, int, int]],
    full: Sequence[tuple[int, int]] | None = None,
    parts: Sequence[tuple[int, int, int, int]] | None = None,
) -> Coefficients:
    """Read the entropy-coded bits of a box of each JPEG. Releases the GIL once for all files.

    - ``files``: contents, or paths.
    - ``boxes``: (top, left, height, width) in pixels of the whole picture.
    - ``full``: if the boxes are resized afterwards, to which (height, width). The CPU path lets
      libjpeg begin a shrink by four or more; such a picture is ``kernel.Unsupported`` here.
    - ``parts``: the part of the resized box that is needed. A packed picture then has only the
      pixels for it: its ``top``, ``left``, ``height`` and ``width`` say which.

    These are ``box``, ``full`` and ``part`` of ``geometry.Frame``. The JPEG index of the process is
    used and extended, as by the CPU path.

    >>> import cv2, numpy as np
    >>> _, file = cv2.imencode(".jpg", np.full((32, 48, 3), 90, np.uint8))
    >>> got = read_coefficients([file.tobytes(), b"no JPEG"], [(8, 8, 16, 16), (0, 0, 8, 8)])
    >>> got.numbers, got.blocks, [error is None for error in got.errors]
    ([0], 24, [True, False])
    """
    compiled = kernel.compiled()
    contents, errors = _contents(compiled, files)
    full = full or [box[2:] for box in boxes]
    parts = parts or [(0, 0, *size) for size in full]
    numbers = [number for number, error in enumerate(errors) if error is None]
    requests = tuple(
        [(contents[i], *boxes[i], *full[i], *parts[i]) for i in numbers],
    )
    index = jpeg_index.process_index()
    try:
        buffer, outcomes = compiled.coefficients(requests, index.held if index.budget else None)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise _misfit(boxes, error) from error
    for i, outcome in zip(numbers, outcomes, strict=True):
        if isinstance(outcome, (compiled.Unsupported, compiled.Damaged, MemoryError)):
            errors[i] = kernel.user_error(contents[i], outcome)
        elif outcome is not None:
            errors[i] = _misfit([boxes[i]], outcome)
    numbers = [number for number, error in enumerate(errors) if error is None]
    packed = np.frombuffer(buffer, np.uint8)
    pictures = packed[: len(numbers) * PICTURE.itemsize].view(PICTURE).copy()
    return Coefficients(packed, pictures, numbers, errors)


def _contents(compiled: Any, files: Sequence[Any]) -> tuple[list[Any], list[Exception | None]]:
    """The bytes of all files; those that are paths are read in one call."""
    contents = list(files)
    errors: list[Exception | None] = [None] * len(contents)
    paths = [i for i, file in enumerate(contents) if isinstance(file, (str, PathLike))]
    if paths:
        read = compiled.read_files(tuple([contents[i] for i in paths]))
        for i, content in zip(paths, read, strict=True):
            if isinstance(content, Exception):
                errors[i] = content
            contents[i] = content
    return contents, errors


def _misfit(boxes: Sequence[tuple[int, int, int, int]], why: Exception) -> PipelineError:
    shown = ", ".join(map(str, boxes))
    return PipelineError(
        f"the kernel cannot read the coefficients of boxes {shown}: {why}. Give boxes (top, left, "
        "height, width) within the pictures."
    )
