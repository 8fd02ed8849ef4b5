"""Image pipelines as work of a device: all operations from decode on, with the bits of the CPU.

For JPEGs the CPU reads the entropy-coded bits only. For pictures that are decoded already, such as
those that refurbish keeps, it sends the pixels that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.device.work import Allocate, DeviceWork, PackedPart
from penstock.errors import SourceError
from penstock.image import kernel
from penstock.image.codec import Decode
from penstock.image.coefficients import Coefficients, read_coefficients
from penstock.image.on_device import whole_jpeg
from penstock.image.on_device.jpeg import decode
from penstock.image.on_device.parameters import DeviceParameters
from penstock.image.on_device.program import DeviceProgram, NotOnDevice, device_program
from penstock.image.on_device.ragged import Ragged
from penstock.keyed import Keys
from penstock.source.listing import Listing
from penstock.stops.road import Road
from penstock.stops.stop import Stop

ALIGN = 64

SAMPLED = 16
"""Files whose sizes say how large the buffers are to be."""

PER_BYTE = 3
"""Bytes of packed coefficients for a byte of a file, rarely exceeded. On photographs of 110 KB
they are about twice the file."""

PARAMETERS = 64 << 10
"""Bytes of the parameters of a sample: mostly the taps of a resize."""

DECODED = 1 << 20
"""Bytes that are expected of a decoded picture."""


class _About(NamedTuple):
    """What the host knows of a packed tiny-batch.

    ``start``: where the coefficients or pixels begin in the buffer. ``coefficients``: ``None`` for
    pixels, whose regions are ``regions`` (top, left, height, width).
    """

    parameters: DeviceParameters
    start: int
    coefficients: Coefficients | None
    regions: NDArray[np.int32]


class ImageOnDevice:
    """The last stops of a road, from ``above`` on, as a ``DeviceProgram``. See ``DeviceWork``."""

    field = "image"

    def __init__(
        self, program: DeviceProgram, above: int, on: str | int | None, listing: Listing | None
    ) -> None:
        self.program = program
        self.above = above
        self.on = on
        self._listing = listing
        self._known: NDArray[np.int64] | None = None

    exact = True
    tolerance = ""

    @property
    def name(self) -> str:
        if self.program.decodes:
            return "all after the entropy-coded bits of JPEGs, with the bits of the CPU"
        return "all after decoding, with the bits of the CPU"

    def sizes(self, indices: Sequence[int] | NDArray[np.int64]) -> Sequence[int]:
        listing = self._listing
        if listing is None:
            return [1] * len(indices)
        if self._known is None:
            self._known = np.full(len(listing), -1, np.int64)
        known, sizes = self._known, []
        for index in map(int, indices):
            if known[index] < 0:
                # A missing file is reported when it is read.
                known[index] = max(0, int(listing.stats(index, index + 1)[0, 0]))
            sizes.append(int(known[index]))
        return sizes

    def usual_bytes(self) -> int:
        listing = self._listing
        if not self.program.decodes:
            return DECODED + PARAMETERS
        if listing is None or not len(listing):
            return DECODED // 4 + PARAMETERS
        step = max(1, len(listing) // SAMPLED)
        sizes = self.sizes(range(0, len(listing), step)[:SAMPLED])
        return PER_BYTE * max(sizes) + PARAMETERS

    def pack(self, keys: Keys, values: Sequence[Any], allocate: Allocate) -> PackedPart | None:
        try:
            sizes = [self._size(value) for value in values]
        except kernel.Unsupported:
            return None
        parameters = self.program.draw(keys, sizes)
        if parameters.left:
            return None
        start = -(-parameters.buffer.nbytes // ALIGN) * ALIGN
        regions = parameters.regions
        if not self.program.decodes:
            parts = [
                value[top : top + height, left : left + width].reshape(-1)
                for value, (top, left, height, width) in zip(values, regions.tolist(), strict=True)
            ]
            buffer = allocate(start + sum(part.nbytes for part in parts))
            np.concatenate(parts, out=buffer[start:])
            coefficients = None
        else:
            boxes: list[tuple[int, int, int, int]] = []
            full: list[tuple[int, int]] = []
            for (*box, rows, columns), region in zip(
                parameters.frames.tolist(), regions.tolist(), strict=True
            ):
                # Where nothing is resized, only the region is needed, a part of the box perhaps.
                kept = box[2:] == [rows, columns]
                top, left, height, width = region if kept else box
                boxes.append((top, left, height, width))
                full.append((height, width) if kept else (rows, columns))
            coefficients = read_coefficients(list(values), boxes, full)
            if any(error is not None for error in coefficients.errors):
                return None  # the CPU decodes them, and reports the damaged one
            buffer = allocate(start + coefficients.packed.nbytes)
            buffer[start:] = coefficients.packed
        buffer[: parameters.buffer.nbytes] = parameters.buffer
        return PackedPart(buffer, _About(parameters, start, coefficients, regions))

    def _size(self, value: Any) -> tuple[int, int]:
        """Height and width of a picture. Raises ``kernel.Unsupported``, and what the CPU raises."""
        if self.program.decodes:
            height, width, components = kernel.size(value)
            if components not in (1, 3):
                raise kernel.Unsupported(f"{components} components")
            return height, width
        if (
            type(value) is not np.ndarray
            or value.dtype != np.uint8
            or value.ndim != 3
            or value.shape[2] != 3
        ):
            raise kernel.Unsupported("not an RGB picture")
        return value.shape[0], value.shape[1]

    def rehearsal(
        self, samples: int, allocate: Allocate
    ) -> tuple[PackedPart, tuple[int, ...], torch.dtype] | None:
        picture: Any = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
        if self.program.decodes:
            picture = _jpeg(picture)
        packed = self.pack(Keys(0, list(range(samples))), [picture] * samples, allocate)
        if packed is None:
            return None
        dtype = torch.from_numpy(np.empty(0, self.program.dtype)).dtype
        return packed, (samples, *self.program.shape), dtype

    def failed(self, about: Any) -> bool:
        return False

    def run(self, buffer: torch.Tensor, about: Any, rows: torch.Tensor) -> None:
        parameters, start, coefficients, regions = about
        packed = buffer[start:]
        if coefficients is not None:
            pictures = decode(packed, coefficients)
        else:
            pictures = Ragged.packed(packed, regions[:, 2:], regions[:, :2])
        self.program.run(pictures, parameters, rows, buffer[: parameters.buffer.nbytes])


@dataclass(eq=False)
class _Files:
    """What the host knows of a tiny-batch that the device decodes.

    ``files``: ``None`` for pictures that the CPU has decoded; their pixels begin at ``start`` in
    the buffer. ``damaged``: indices of samples that nobody can decode, found on the device.
    """

    keys: Keys
    parameters: DeviceParameters
    files: list[bytes | None]
    start: int
    damaged: list[int] = dataclass_field(default_factory=list)


class ImageDecodedOnDevice(ImageOnDevice):
    """A road from ``decode`` on, all of it on the device: ``decode="device"``.

    Each sample takes a way that depends on its file alone. The CPU decodes what no library of the
    device can, such as PNG, and the device does the rest for it too.
    """

    exact = False
    tolerance = (
        "the CPU decodes other pixels than the device: they differ by up to "
        f"{whole_jpeg.TOLERANCE:g} grey levels on average"
    )

    def __init__(
        self, program: DeviceProgram, above: int, on: str | int | None, listing: Listing | None
    ) -> None:
        super().__init__(program, above, on, listing)
        self._library: whole_jpeg.JpegLibrary | None = None
        self._damaged: set[int] = set()

    @property
    def name(self) -> str:
        return f"decode included; {self.tolerance}"

    def usual_bytes(self) -> int:
        return PARAMETERS

    def pack(self, keys: Keys, values: Sequence[Any], allocate: Allocate) -> PackedPart | None:
        if not self._damaged.isdisjoint(keys.indices):
            return None  # the CPU reports it
        sizes: list[tuple[int, int]] = []
        files: list[bytes | None] = []
        pictures: dict[int, NDArray[np.uint8]] = {}
        for place, value in enumerate(values):
            try:
                sizes.append(self._size(value))
                files.append(bytes(value))
            except kernel.Unsupported:
                try:
                    pictures[place] = self._decoded(value)
                except SourceError:
                    return None
                sizes.append(pictures[place].shape[:2])
                files.append(None)
        parameters = self.program.draw(keys, sizes)
        if parameters.left:
            return None
        start = -(-parameters.buffer.nbytes // ALIGN) * ALIGN
        parts = [
            pictures[place][top : top + height, left : left + width].reshape(-1)
            for place, (top, left, height, width) in enumerate(parameters.regions.tolist())
            if place in pictures
        ]
        buffer = allocate(start + sum(part.nbytes for part in parts))
        if parts:
            np.concatenate(parts, out=buffer[start:])
        buffer[: parameters.buffer.nbytes] = parameters.buffer
        return PackedPart(buffer, _Files(keys, parameters, files, start))

    def run(self, buffer: torch.Tensor, about: Any, rows: torch.Tensor) -> None:
        if self._library is None:
            self._library = whole_jpeg.library(buffer.device)
        parameters: DeviceParameters = about.parameters
        boxes = [tuple(box) for box in parameters.regions.tolist()]
        mine = [place for place, file in enumerate(about.files) if file is not None]
        decoded, numbers, _ = whole_jpeg.decode(
            [about.files[place] for place in mine], [boxes[place] for place in mine], self._library
        )
        regions: dict[int, torch.Tensor] = {}
        if decoded is not None:
            regions = {mine[number]: decoded.picture(at) for at, number in enumerate(numbers)}
        at = about.start
        for place, (top, left, height, width) in enumerate(boxes):
            nbytes = 3 * height * width
            if about.files[place] is None:
                regions[place] = buffer[at : at + nbytes]
                at += nbytes
            elif place not in regions:
                try:  # the library cannot, but the CPU may
                    whole = self._decoded(about.files[place])
                except SourceError:
                    about.damaged.append(about.keys.indices[place])
                    return
                region = np.ascontiguousarray(whole[top : top + height, left : left + width])
                regions[place] = torch.from_numpy(region).to(buffer.device)
        data = torch.cat([regions[place].reshape(-1) for place in range(len(boxes))])
        places = parameters.regions
        pictures = Ragged.packed(data, places[:, 2:], places[:, :2])
        self.program.run(pictures, parameters, rows, buffer[: parameters.buffer.nbytes])

    def failed(self, about: Any) -> bool:
        self._damaged.update(about.damaged)
        return bool(about.damaged)

    def _decoded(self, value: Any) -> NDArray[np.uint8]:
        """A whole picture, decoded by the CPU. Raises SourceError if it is damaged."""
        picture: NDArray[np.uint8] = Decode(max_pixels=self.program.most_pixels).apply(value, None)
        return picture


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(picture, quality=90, colorsubsampling="420"))


def _is_audio(stop: Stop) -> bool:
    """Whether a stage runs operations of ``penstock.audio``."""
    operations = getattr(stop, "operations", None) or [getattr(stop, "function", None)]
    return any(type(one).__module__.startswith("penstock.audio.") for one in operations)


def image_work(road: Road, *, decodes: bool = False) -> DeviceWork | str:
    """The part of a road that a device can run, or why there is none.

    ``decodes``: it decodes JPEGs alone, with other pixels than the CPU.
    """
    stops = road.stops
    if any(_is_audio(stop) for stop in stops):
        return (
            "samples are audio, and a loader lets a device prepare images only (for audio, leave "
            "the last operations out of the pipeline, and run them on the batches that arrive on "
            "the device)"
        )
    first = max((place + 1 for place, stop in enumerate(stops) if stop.keeps), default=0)
    if first == len(stops):
        return "no operation stands below the last stage that keeps samples"
    why = ""
    for above in range(first, len(stops)):
        on = getattr(stops[above], "on", None)
        try:
            program = device_program(stops[above:], road.seed, on)
        except NotOnDevice as error:
            why = why or str(error)
            continue
        if not program.exact:
            return f"the device would make other bits than the CPU: {program.tolerance}"
        if decodes and not program.decodes:
            return f"{stops[above].name} gets pictures that are decoded already"
        files = road.source.file_samples()
        made = ImageDecodedOnDevice if decodes else ImageOnDevice
        return made(program, above, on, None if files is None else files.listing)
    return why
