"""How a sample is kept: as it is, or with its images made smaller.

Images are uint8 arrays (height, width, 1 or 3) and PIL images (L or RGB), alone or anywhere in
tuples, lists and dicts. Everything else is kept as it is.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError, PipelineError
from penstock.native import Image, load_cv2, load_simplejpeg, with_channels
from penstock.serialize import Packed, pack, unpack
from penstock.store.value import Buffer
from penstock.tree import is_namedtuple

NAMES = ("raw", "lossless", "jpeg")
DEFAULT = "raw"
"""A kept photograph (500 x 375) is there again in 0.1 ms. The others take 1.2 and 1.8 ms, about as
long as decoding its file (1.6 ms), and pay where memory is short and all above takes longer."""

QUALITY = 95
"""With colours at full resolution, photographs come back within 1.0 grey levels on average and 25
at worst, in a fifth of the room; with 4:2:0 it would be 2.0 and 137."""

# libjpeg makes no larger one.
_JPEG_SIDE = 65_500
# The sums that undo the prediction stay within 32 bits.
_LOSSLESS_PIXELS = (1 << 31) // 256


class Smaller(NamedTuple):
    """An image in less room: its bytes, and what makes it again of ``data`` and ``how``."""

    make: Callable[[Buffer, Any], Image]
    data: Buffer
    how: Any


@dataclass(frozen=True)
class Encoding:
    """Turns samples into bytes and back.

    ``"raw"`` keeps them as they are. ``"lossless"`` halves photographs. ``"jpeg"`` makes them a
    fifth, and is not exact: ``"jpeg:90"`` gives its quality, from 1 to 100.

    >>> encoding = Encoding("lossless")
    >>> image = np.full((4, 6, 3), 7, np.uint8)
    >>> again, label = encoding.decode(encoding.encode((image, "cat")))
    >>> bool((again == image).all()), label
    (True, 'cat')
    """

    name: str = DEFAULT

    def __post_init__(self) -> None:
        kind, _, quality = str(self.name).partition(":")
        known = self.name in NAMES or (kind == "jpeg" and quality.isdecimal())
        if not known or not 1 <= int(quality or QUALITY) <= 100:
            raise PipelineError(
                f'encode is {self.name!r}; give "raw" (as it is), "lossless" (half the room), '
                f'"jpeg" (a fifth of it, not exact), or "jpeg:90" for another quality than '
                f"{QUALITY}, from 1 to 100."
            )

    @property
    def lossy(self) -> bool:
        """Whether what comes back differs from what was kept."""
        return self.name.startswith("jpeg")

    def encode(self, sample: Any) -> bytearray:
        return self.packed(sample).tobytes()

    def packed(self, sample: Any) -> Packed:
        """The same, about to be written somewhere: till then the sample must not change."""
        if self.name != "raw":
            sample = _made_smaller(sample, self._smaller)
        return pack(sample)

    def decode(self, data: Buffer) -> Any:
        """The sample. What can be written to is taken over: its arrays may look into ``data``."""
        view = memoryview(data)
        return unpack(bytearray(view) if view.readonly else view)

    def _smaller(self, image: Image) -> Smaller | None:
        if not self.lossy:
            return _lossless(image)
        return _jpeg(image, int(self.name.partition(":")[2] or QUALITY))


class _Call:
    """Something that is pickled as the call that makes it again.

    What is called is known by its name in stores on disk, and keeps it.
    """

    __slots__ = ("_arguments", "_make")

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._make = make
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self._make, self._arguments


def _made_smaller(node: Any, smaller: Callable[[Image], Smaller | None]) -> Any:
    """The sample with its images made smaller, where that is possible and does make them so."""
    kind = type(node)
    if kind is np.ndarray:
        if node.dtype != np.uint8 or node.ndim != 3 or node.shape[2] not in (1, 3) or not node.size:
            return node
        found = smaller(np.ascontiguousarray(node))
        if found is None or memoryview(found.data).nbytes >= node.nbytes:
            return node
        # As a buffer it travels beside the pickle, and is not copied through it.
        return _Call(found.make, pickle.PickleBuffer(found.data), found.how)
    if kind is dict:
        return {key: _made_smaller(child, smaller) for key, child in node.items()}
    if kind in (list, tuple):
        return kind(_made_smaller(child, smaller) for child in node)
    if is_namedtuple(node):
        return kind._make(_made_smaller(child, smaller) for child in node)
    pil = sys.modules.get("PIL.Image")
    if pil is not None and kind is pil.Image and node.mode in ("L", "RGB"):
        pixels = _made_smaller(with_channels(np.asarray(node)), smaller)
        return _Call(to_pil, pixels, node.info) if type(pixels) is _Call else node
    return node


def to_pil(pixels: Image, info: dict[Any, Any]) -> Any:
    # Only a process that was sent an image of PIL's comes here.
    import PIL.Image

    image = PIL.Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    image.info = info
    return image


def _jpeg(image: Image, quality: int) -> Smaller | None:
    if max(image.shape) > _JPEG_SIDE:
        return None
    colours = ("RGB", "444") if image.shape[2] == 3 else ("GRAY", "Gray")
    data = load_simplejpeg().encode_jpeg(image, quality, *colours)
    return Smaller(from_jpeg, data, colours[0])


def from_jpeg(data: Buffer, colourspace: str) -> Image:
    image: Image = load_simplejpeg().decode_jpeg(data, colourspace)
    return image


def _lossless(image: Image) -> Smaller | None:
    """Each level as what it has more than green, left of it and above it, and then zstd.

    PNG takes a fifth more room, and four to five times as long (``python -m benchmarks encode``).
    """
    height, width, channels = image.shape
    if height * width > _LOSSLESS_PIXELS:
        return None
    planes = np.empty((channels, height, width), np.uint8)
    if channels == 3:
        green = image[:, :, 1]
        np.subtract(image[:, :, 0], green, out=planes[0])
        planes[1] = green
        np.subtract(image[:, :, 2], green, out=planes[2])
    else:
        planes[0] = image[:, :, 0]
    down = planes.copy()
    np.subtract(planes[:, 1:], planes[:, :-1], out=down[:, 1:])
    across = down.copy()
    np.subtract(down[:, :, 1:], down[:, :, :-1], out=across[:, :, 1:])
    return Smaller(from_lossless, _zstd().compress(across.data), image.shape)


def from_lossless(data: Buffer, shape: tuple[int, int, int]) -> Image:
    height, width, channels = shape
    found = _zstd().decompress(data, height * width * channels)
    planes = np.frombuffer(found, np.uint8).reshape(channels, height, width)
    cv2 = load_cv2()
    if channels == 1:
        return _summed(cv2, planes[0])[:, :, np.newaxis]
    red, green, blue = (_summed(cv2, plane) for plane in planes)
    image: Image = cv2.merge((red + green, green, blue + green))
    return image


def _summed(cv2: Any, plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The sum of all that stands above and left; what passes 255 begins again at 0."""
    # A quarter of the time of NumPy's accumulate.
    sums: NDArray[np.int32] = cv2.integral(plane)
    return sums[1:, 1:].astype(np.uint8)


@lru_cache(maxsize=1)
def _zstd() -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError.of('encode="lossless"', "pyarrow", "parquet") from error
    # Levels above 1 take twice as long for 3 % less.
    return pa.Codec("zstd", compression_level=1)
