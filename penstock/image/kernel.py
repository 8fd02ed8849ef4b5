"""The compiled kernel: the part of a JPEG that a crop needs, decoded and resized in one pass.

The kernel is optional. For files and requests that it does not support (``Unsupported``), callers
run the single operations: decode, crop, resize. Its resizing weights are those of PIL's and
torchvision's antialiased bilinear. On photographs the mean difference to PIL is 0.2 grey levels,
and 0.7 for a shrink by 4 or more, which libjpeg begins. ``augment`` has the bits of ``LazyImage``,
except for rotations, where it takes torchvision's source pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PipelineError, SourceError
from penstock.native import Image

LONGEST_SIDE = 65_535
"""The longest side, in pixels, of images that the kernel resizes or augments."""


class Unsupported(Exception):
    """The kernel cannot do this: not a JPEG, or an unsupported kind. Run the single operations."""


def size(data: Any) -> tuple[int, int, int]:
    """Height, width and components, read from the header of a JPEG in about a microsecond.

    A PNG that the kernel decodes has 0 components.
    """
    kernel = compiled()
    try:
        height_width_components: tuple[int, int, int] = kernel.size(data)
    except kernel.Unsupported as error:
        raise Unsupported(str(error)) from None
    except kernel.Damaged as error:
        raise _damaged(data, error) from None
    return height_width_components


class RegionRequest(NamedTuple):
    """Decode a part of a picture into an array.

    ``box`` is (top, left, height, width). If ``full`` is given, the box is resized to ``full``
    (height, width), and the part of it that begins at ``corner`` (top, left) is written to ``out``.
    Otherwise the whole box is resized to ``out``. ``out`` is uint8 (height, width, 3). With
    ``table`` (3, 256), which maps the levels of each channel, it is float32 (3, height, width).
    ``flip`` mirrors left to right.
    """

    data: Any
    box: tuple[int, int, int, int]
    out: NDArray[Any]
    flip: bool = False
    table: NDArray[np.float32] | None = None
    full: tuple[int, int] | None = None
    corner: tuple[int, int] = (0, 0)

    def arguments(self, *more: Any) -> tuple[Any, ...]:
        """The arguments in the order of the compiled module."""
        full = self.full or (0, 0)
        return self.data, *self.box, self.out, self.flip, self.table, *full, *self.corner, *more


def regions(
    requests: Sequence[RegionRequest], entries: Sequence[bytes | None] | None = None
) -> list[bytes | Exception | None]:
    """Decode parts of JPEGs and PNGs, reading only what each needs. Releases the GIL once for all.

    Rows below a box are not read, so damage there is not noticed. A missing end of the file is.
    The result of a request that failed is ``Unsupported`` or the error to raise.

    ``entries``: the JPEG index entries of each file from earlier calls, empty at first, ``None`` to
    collect none. The result of a request that succeeded is the longer entries, or ``None`` if there
    are no new ones. ``jpeg_index`` stores them.
    """
    kernel = compiled()
    known = entries or [None] * len(requests)
    arguments = tuple(
        [request.arguments(some) for request, some in zip(requests, known, strict=True)]
    )
    try:
        outcomes: list[bytes | Exception | None] = kernel.regions(arguments)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise _misfit("decode", requests, error) from error
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, Exception):
            outcomes[number] = _request_error(requests[number], outcome)
    return outcomes


def region(
    data: Any,
    box: tuple[int, int, int, int],
    out: NDArray[Any],
    flip: bool = False,
    table: NDArray[np.float32] | None = None,
    full: tuple[int, int] | None = None,
    corner: tuple[int, int] = (0, 0),
    *,
    entries: bytes | None = None,
) -> bytes | None:
    """Decode one part of one JPEG; the arguments are those of ``RegionRequest``."""
    request = RegionRequest(data, box, out, flip, table, full, corner)
    outcome = regions([request], [entries])[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def decode_png(data: Any) -> Image | None:
    """The pixels of a PNG; ``None`` if the kernel does not decode it: an unusual or damaged one."""
    if not native.kernel_available():
        return None
    try:
        height, width, _ = size(data)
        out: Image = np.empty((height, width, 3), np.uint8)
        region(data, (0, 0, height, width), out)
    except Unsupported:
        return None
    return out


def key(data: Any) -> bytes:
    """A 128-bit hash of the data as 16 bytes; 3 us for 55 KB. Not cryptographic."""
    digest: bytes = compiled().key(data)
    return digest


def index(budget: int) -> Any:
    """A JPEG index of the compiled module; see ``JpegIndex``."""
    return compiled().Index(budget)


def resize(
    image: NDArray[np.uint8],
    box: tuple[int, int, int, int],
    out: NDArray[Any],
    flip: bool = False,
    table: NDArray[np.float32] | None = None,
    full: tuple[int, int] | None = None,
    corner: tuple[int, int] = (0, 0),
) -> None:
    """Like ``region``, for an image (height, width, 3) that is decoded already."""
    request = RegionRequest(image, box, out, flip, table, full, corner)
    kernel = compiled()
    try:
        kernel.resize(*request.arguments())
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise _misfit("resize", [request], error) from error


def look_up(image: NDArray[np.uint8], table: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Map the levels of an image (height, width, 3) by a table (3, 256), channels first.

    One pass of 0.04 ms for 224 x 224 pixels; OpenCV needs four passes and 0.15 ms.
    """
    compiled().look_up(image, table, out)


def augment(
    image: NDArray[np.uint8],
    steps: Sequence[tuple[int, float]],
    fill: tuple[int, ...],
    out: NDArray[Any],
    *,
    table: NDArray[np.float32] | None = None,
) -> bool:
    """Apply changes, each a number and a magnitude, to an image (height, width, 3) in order.

    The numbers are positions in ``augment.CHANGES``. ``fill``: the levels of pixels from outside
    the image. ``out`` is as for ``region``. Returns whether ``out`` was written: it is not if it is
    uint8 and the steps change nothing. Two changes of RandAugment take 0.08 ms at 224 x 224 pixels,
    and 0.09 ms with floats as output.
    """
    try:
        written: bool = compiled().augment(image, steps, fill, table, out)
    except (BufferError, OverflowError, TypeError, ValueError) as error:
        raise PipelineError(
            f"the kernel cannot apply {steps} to an array of {image.dtype} and shape "
            f"{image.shape}: {error}. Give finite magnitudes, and contiguous arrays."
        ) from error
    return written


def compiled() -> Any:
    """The compiled module; raises ``Unsupported`` with the reason if there is none."""
    kernel = native.kernel()
    if kernel is None:
        raise Unsupported(native.why_no_kernel())
    return kernel


def user_error(data: Any, error: Exception) -> Exception:
    """The error to report where the compiled module cannot decode ``data``."""
    kernel = compiled()
    if isinstance(error, kernel.Unsupported):
        return Unsupported(str(error))
    return _damaged(data, error) if isinstance(error, kernel.Damaged) else error


def _request_error(request: RegionRequest, error: Exception) -> Exception:
    kernel = compiled()
    if isinstance(error, (kernel.Unsupported, kernel.Damaged, MemoryError)):
        return user_error(request.data, error)
    return _misfit("decode", [request], error)


def _misfit(verb: str, requests: Sequence[RegionRequest], why: Exception) -> PipelineError:
    boxes = ", ".join(
        f"box {tuple(request.box)} into an array of {request.out.dtype} and shape "
        f"{request.out.shape}"
        for request in requests
    )
    return PipelineError(
        f"the kernel cannot {verb} {boxes}: {why}. Give a box within the image, and contiguous "
        "arrays."
    )


def _damaged(data: Any, why: Exception) -> SourceError:
    view = memoryview(data).cast("B")
    return SourceError(
        f"decode cannot read {view.nbytes:,} bytes that begin {bytes(view[:8])!r}: {why}. Copy the "
        "file again from its origin, or leave it out."
    )
