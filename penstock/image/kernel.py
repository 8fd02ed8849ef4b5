"""The compiled kernel: the part of a JPEG that a crop needs, decoded and resized in one pass.

It is optional. What it does not know (``Unsupported``) the pure road does: decode, crop, resize.
The weights are those of PIL's and torchvision's antialiased bilinear; on photographs the mean
difference to PIL is 0.2 grey levels, and 0.7 where a shrink by 4 or more begins within libjpeg.
What ``augment`` does has the bits of ``lazy``, but for turns, where it takes torchvision's pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PipelineError, SourceError

LONGEST_SIDE = 65_535
"""The longest side of an image that it resizes."""


class Unsupported(Exception):
    """A file, or a request, for the pure road: no JPEG, or a kind that the kernel leaves out."""


def size(data: Any) -> tuple[int, int, int]:
    """Height, width and components, read from the header of a JPEG in about a microsecond."""
    kernel = _kernel()
    try:
        found: tuple[int, int, int] = kernel.size(data)
    except kernel.Unsupported as error:
        raise Unsupported(str(error)) from None
    except kernel.Damaged as error:
        raise _damaged(data, error) from None
    return found


class RegionRequest(NamedTuple):
    """A part of a picture, and the array that it is to become.

    ``box`` is (top, left, height, width). Where ``full`` is given, the box is resized to that
    (height, width), and ``out`` is the part of it that begins at ``corner`` (top, left); else the
    box becomes ``out``. ``out`` is uint8 (height, width, 3); with a ``table`` (3, 256) of what each
    level becomes in each channel it is float32 (3, height, width). ``flip`` mirrors left to right.
    """

    data: Any
    box: tuple[int, int, int, int]
    out: NDArray[Any]
    flip: bool = False
    table: NDArray[np.float32] | None = None
    full: tuple[int, int] | None = None
    corner: tuple[int, int] = (0, 0)

    def arguments(self, *more: Any) -> tuple[Any, ...]:
        """As the compiled module takes them."""
        full = self.full or (0, 0)
        return self.data, *self.box, self.out, self.flip, self.table, *full, *self.corner, *more


def regions(
    requests: Sequence[RegionRequest], marks: Sequence[bytes | None] | None = None
) -> list[bytes | Exception | None]:
    """Decode parts of JPEGs: only what each needs, all of them with the GIL given up once.

    Rows below a box are not read: damage there goes unseen, but not a missing end of the file.
    What could not be done is in the list as ``Unsupported``, or as the error to raise.

    ``marks`` are what an earlier call gave for each file, or empty, and what is returned is more
    of them; ``None`` if there are none. ``jpeg_index`` keeps them.
    """
    kernel = _kernel()
    known = marks or [None] * len(requests)
    asked = tuple([one.arguments(mark) for one, mark in zip(requests, known, strict=True)])
    try:
        found: list[bytes | Exception | None] = kernel.regions(asked)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise _misfit("decode", requests, error) from error
    for place, one in enumerate(found):
        if isinstance(one, Exception):
            found[place] = _explained(requests[place], one)
    return found


def region(
    data: Any,
    box: tuple[int, int, int, int],
    out: NDArray[Any],
    flip: bool = False,
    table: NDArray[np.float32] | None = None,
    full: tuple[int, int] | None = None,
    corner: tuple[int, int] = (0, 0),
    *,
    marks: bytes | None = None,
) -> bytes | None:
    """One part of one JPEG; the arguments are those of a ``RegionRequest``."""
    request = RegionRequest(data, box, out, flip, table, full, corner)
    found = regions([request], [marks])[0]
    if isinstance(found, Exception):
        raise found
    return found


def key(data: Any) -> bytes:
    """16 bytes that no other file has, by any likelihood; 3 us for 55 KB."""
    found: bytes = _kernel().key(data)
    return found


def resize(
    image: NDArray[np.uint8],
    box: tuple[int, int, int, int],
    out: NDArray[Any],
    flip: bool = False,
    table: NDArray[np.float32] | None = None,
    full: tuple[int, int] | None = None,
    corner: tuple[int, int] = (0, 0),
) -> None:
    """As ``region``, of an image (height, width, 3) that is decoded already."""
    request = RegionRequest(image, box, out, flip, table, full, corner)
    kernel = _kernel()
    try:
        kernel.resize(*request.arguments())
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise _misfit("resize", [request], error) from error


def look_up(image: NDArray[np.uint8], table: NDArray[np.float32], out: NDArray[Any]) -> None:
    """What a table (3, 256) makes of the levels of an image (height, width, 3), channels first.

    One pass of 0.04 ms for 224 x 224 pixels, where OpenCV takes four and 0.15 ms.
    """
    _kernel().look_up(image, table, out)


def augment(
    image: NDArray[np.uint8],
    steps: Sequence[tuple[int, float]],
    fill: tuple[int, int, int],
    out: NDArray[Any],
    *,
    table: NDArray[np.float32] | None = None,
) -> bool:
    """Changes of an image (height, width, 3) by number and magnitude, one after the other.

    The numbers are places in ``augment_table.CHANGES``. ``fill`` is what comes in from outside.
    ``out`` is as for ``region``. Tells whether ``out`` was written: not if it is uint8 and the
    steps change nothing. Two of RandAugment take 0.08 ms at 224 x 224, and as floats 0.09 ms.
    """
    try:
        written: bool = _kernel().augment(image, steps, fill, table, out)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise PipelineError(
            f"the kernel cannot apply {steps} to an array of {image.dtype} and shape "
            f"{image.shape}: {error}. Give finite magnitudes, and contiguous arrays."
        ) from error
    return written


def _kernel() -> Any:
    kernel = native.kernel()
    if kernel is None:
        raise Unsupported(native.why_no_kernel())
    return kernel


def _explained(request: RegionRequest, error: Exception) -> Exception:
    """What a user should know of an error of the kernel's."""
    kernel = _kernel()
    if isinstance(error, kernel.Unsupported):
        return Unsupported(str(error))
    if isinstance(error, kernel.Damaged):
        return _damaged(request.data, error)
    return error if isinstance(error, MemoryError) else _misfit("decode", [request], error)


def _misfit(what: str, requests: Sequence[RegionRequest], why: Exception) -> PipelineError:
    asked = ", ".join(
        f"box {tuple(one.box)} into an array of {one.out.dtype} and shape {one.out.shape}"
        for one in requests
    )
    return PipelineError(
        f"the kernel cannot {what} {asked}: {why}. Draw the box from the image's size, and give "
        "contiguous arrays."
    )


def _damaged(data: Any, why: Exception) -> SourceError:
    view = memoryview(data).cast("B")
    return SourceError(
        f"decode cannot read {view.nbytes:,} bytes that begin {bytes(view[:8])!r}: {why}. Copy the "
        'file again from its origin, leave it out, or give on_error="skip" to the loader.'
    )
