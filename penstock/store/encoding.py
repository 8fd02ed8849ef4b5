"""Encodings of stored samples: unchanged, or with compressed images.

Images are uint8 arrays (height, width, 1 or 3) and PIL images (L or RGB), alone or anywhere in
tuples, lists and dicts. Everything else is stored unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError, PipelineError
from penstock.native import Image, load_cv2, load_simplejpeg, with_channels
from penstock.serialize import Packed
from penstock.store.plain import Raw, Restored, Restorers, pack_sample, unpack_sample
from penstock.store.value import Buffer
from penstock.tree import is_namedtuple

NAMES = ("raw", "lossless", "jpeg")
DEFAULT = "raw"
"""Reading a stored photograph (500 x 375) takes 0.1 ms. With the other encodings it takes 1.2 and
1.8 ms, about as long as decoding its file (1.6 ms): they pay if memory is short and the stages
above take longer."""

QUALITY = 95
"""With colours at full resolution (4:4:4), decoded photographs differ by 1.0 grey levels on average
and 25 at most, in a fifth of the bytes; with 4:2:0 it would be 2.0 and 137."""

# The largest side that libjpeg encodes.
_JPEG_SIDE = 65_500
# Largest image: the sums that undo the prediction stay within 32 bits.
_LOSSLESS_PIXELS = (1 << 31) // 256


class CompressedImage(NamedTuple):
    """A compressed image: ``decode(data, parameters)`` restores it. ``name``: see ``Restored``."""

    name: str
    decode: Callable[[Buffer, Any], Image]
    data: Buffer
    parameters: Any


@dataclass(frozen=True)
class Encoding:
    """Encodes samples as bytes and decodes them.

    ``"raw"`` stores samples unchanged. ``"lossless"`` halves photographs. ``"jpeg"`` makes them a
    fifth of their size, and is not exact; ``"jpeg:90"`` sets its quality, from 1 to 100.

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
                f'encode is {self.name!r}; give "raw" (unchanged), "lossless" (half the bytes), '
                f'"jpeg" (a fifth of the bytes, not exact), or "jpeg:90" for another quality than '
                f"{QUALITY}, from 1 to 100."
            )

    @property
    def lossy(self) -> bool:
        """Whether decoded samples may differ from the encoded ones."""
        return self.name.startswith("jpeg")

    def encode(self, sample: Any) -> bytearray:
        return self.packed(sample).tobytes()

    def packed(self, sample: Any) -> Packed:
        """The encoded sample, not yet written: until then the sample must not be changed."""
        if self.name != "raw":
            sample = _compress_images(sample, self._compress)
        return pack_sample(sample)

    def decode(self, data: Buffer, pickles: Callable[[], bool] = lambda: True) -> Any:
        """The sample. If ``data`` is writable, the arrays of the sample may be views of it.

        ``pickles``: returns whether a pickle may be read. Raises ValueError.
        """
        view = memoryview(data)
        return unpack_sample(bytearray(view) if view.readonly else view, pickles, _RESTORERS)

    def _compress(self, image: Image) -> CompressedImage | None:
        if not self.lossy:
            return _lossless(image)
        return _jpeg(image, int(self.name.partition(":")[2] or QUALITY))


def _compress_images(node: Any, compress: Callable[[Image], CompressedImage | None]) -> Any:
    """The sample with its images compressed, except those that do not become smaller."""
    kind = type(node)
    if kind is np.ndarray:
        if node.dtype != np.uint8 or node.ndim != 3 or node.shape[2] not in (1, 3) or not node.size:
            return node
        small = compress(np.ascontiguousarray(node))
        if small is None or memoryview(small.data).nbytes >= node.nbytes:
            return node
        return Restored(small.name, small.decode, Raw(small.data), small.parameters)
    if kind is dict:
        return {key: _compress_images(child, compress) for key, child in node.items()}
    if kind in (list, tuple):
        return kind(_compress_images(child, compress) for child in node)
    if is_namedtuple(node):
        return kind._make(_compress_images(child, compress) for child in node)
    pil = sys.modules.get("PIL.Image")
    if pil is not None and kind is pil.Image and node.mode in ("L", "RGB"):
        pixels = _compress_images(with_channels(np.asarray(node)), compress)
        restored = Restored("pil", to_pil, pixels, node.info)
        return restored if type(pixels) is Restored else node
    return node


def to_pil(pixels: Image, info: dict[Any, Any]) -> Any:
    # Only a process that reads a stored PIL image needs the library.
    import PIL.Image

    image = PIL.Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    image.info = info
    return image


def _jpeg(image: Image, quality: int) -> CompressedImage | None:
    if max(image.shape) > _JPEG_SIDE:
        return None
    colours = ("RGB", "444") if image.shape[2] == 3 else ("GRAY", "Gray")
    data = load_simplejpeg().encode_jpeg(image, quality, *colours)
    return CompressedImage("jpeg", from_jpeg, data, colours[0])


def from_jpeg(data: Buffer, colourspace: str) -> Image:
    image: Image = load_simplejpeg().decode_jpeg(data, colourspace)
    return image


def _lossless(image: Image) -> CompressedImage | None:
    """zstd over differences: red and blue minus green, then between rows, then between columns.

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
    return CompressedImage("lossless", from_lossless, _zstd().compress(across.data), image.shape)


def from_lossless(data: Buffer, shape: tuple[int, int, int]) -> Image:
    height, width, channels = shape
    if min(shape) < 1 or channels not in (1, 3) or height * width > _LOSSLESS_PIXELS:
        raise ValueError(f"an image cannot have the shape {shape}")
    differences = _zstd().decompress(data, height * width * channels)
    planes = np.frombuffer(differences, np.uint8).reshape(channels, height, width)
    cv2 = load_cv2()
    if channels == 1:
        return _summed(cv2, planes[0])[:, :, np.newaxis]
    red, green, blue = (_summed(cv2, plane) for plane in planes)
    image: Image = cv2.merge((red + green, green, blue + green))
    return image


def _summed(cv2: Any, plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """For each pixel the sum of all pixels above and to the left, modulo 256."""
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


_RESTORERS: Restorers = {"jpeg": from_jpeg, "lossless": from_lossless, "pil": to_pil}
