"""What a device does to a tiny-batch: the operations below decode, with the bits of the CPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PenstockError
from penstock.image.augment import AutoAugment, RandAugment, TrivialAugment
from penstock.image.codec import Decode
from penstock.image.deep_augment import DeepAutoAugment
from penstock.image.erasing import Erase
from penstock.image.geometry import RandomFlip
from penstock.image.jitter import ColorJitter
from penstock.image.normalizing import Normalize
from penstock.image.on_device.changes import ChangesStage
from penstock.image.on_device.deep import deep_stages
from penstock.image.on_device.erasing import EraseStage
from penstock.image.on_device.framing import FRAMINGS, RESIZING, FramingStage, Size, frames_of
from penstock.image.on_device.parameters import Arrays, DeviceParameters, LeftToCpu, pack
from penstock.image.program import ImageWork
from penstock.keyed import Key, Keyed, Keys
from penstock.operation import ArraySpec, Spec
from penstock.stops.field import works_on
from penstock.stops.stop import Stop

AUGMENTS = (RandAugment, AutoAugment, TrivialAugment)


class NotOnDevice(Exception):
    """Operations of a road that a device cannot run with the bits of the CPU; says why."""


class DeviceStage(Protocol):
    """A part of a program. ``frames``: it changes the size of pictures, and reads a part of them.

    ``draw_one`` draws the parameters of one sample of this size, ``pack`` makes arrays of those of
    all samples (none if it has nothing to do), and ``run`` applies them with the functions of
    ``backend``: to the rows of the batch if ``final`` is given.
    """

    @property
    def frames(self) -> bool: ...

    def draw_one(self, key: Key, size: Size) -> Any: ...

    def pack(self, drawn: Sequence[Any], sizes: Sequence[Size]) -> dict[str, NDArray[Any]]: ...

    def run(self, backend: Any, pictures: Any, arrays: Arrays, host: Arrays, final: Any) -> Any: ...


@dataclass(frozen=True)
class DeviceProgram:
    """The operations of a road that a device runs on whole tiny-batches.

    - ``decodes``: the road begins with ``decode()``; ``most_pixels`` is its limit. Only JPEGs that
      the compiled kernel decodes may be given: the CPU resizes all others by OpenCV, which has
      other bits.
    - ``stages``: what happens to the pixels, in order.
    - ``table``: (3, 256) of normalize, or ``None``. ``channels_first``: its layout.
    - ``shape``, ``dtype``: of one row of the batch.
    - ``exact``: the rows have the bits of the CPU. If not, ``tolerance`` says what differs.
    - ``backend``: ``"triton"``, ``"torch"``, or ``None``: Triton on CUDA if it is installed.
    - ``drawer``: draws the parameters faster; ``None`` if it does not know all operations.

    One tiny-batch goes ``draw`` (host), ``regions`` (what to decode), ``run`` (device)::

        parameters = program.draw(keys, sizes)   # sizes: height and width of each picture
        pictures = ...                           # a Ragged of parameters.regions
        program.run(pictures, parameters, rows)  # writes rows[parameters.places]
        parameters.left                          # place to reason: the CPU must prepare it
    """

    decodes: bool
    most_pixels: int
    stages: tuple[DeviceStage, ...]
    table: NDArray[np.float32] | None
    channels_first: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    exact: bool
    tolerance: str = ""
    backend: str | None = None
    drawer: KernelDrawer | None = field(default=None, repr=False, compare=False)
    _tables: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def draw(self, keys: Keys, sizes: Sequence[Size]) -> DeviceParameters:
        """Draw the parameters of a tiny-batch, by the generators that the CPU uses.

        Samples that fail here, such as a picture too small to crop, are left to the CPU, which
        reports them.
        """
        places: list[int] = []
        left: dict[int, str] = {}
        drawn: list[list[Any]] = []
        for place, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            try:
                drawn.append(self._draw_one(key, size))
            except (LeftToCpu, PenstockError) as error:
                left[place] = str(error)
            else:
                places.append(place)
        count = len(places)
        chosen = [tuple(map(int, sizes[place])) for place in places]
        stages: list[dict[str, NDArray[Any]]] = []
        regions = np.array([(0, 0, *size) for size in chosen], np.int32).reshape(count, 4)
        frames = np.concatenate([regions, regions[:, 2:]], axis=1)
        if count:
            for number, stage in enumerate(self.stages):
                mine = [row[number][0] for row in drawn]
                arrays = stage.pack(mine, [row[number][1] for row in drawn])
                if stage.frames and number == 0:
                    regions, frames = arrays["region"], frames_of(mine)
                arrays.pop("region", None)
                stages.append(arrays)
        return pack(np.array(places, np.int64), left, regions, frames, stages)

    def _draw_one(self, key: Key, size: Size) -> list[tuple[Any, Size]]:
        """What each stage draws for one sample, and the size of its output."""
        rows, columns = map(int, size)
        if self.decodes and rows * columns > self.most_pixels:
            raise LeftToCpu(f"the picture has more than {self.most_pixels} pixels")
        out = []
        size = rows, columns
        if self.drawer is not None:
            drawn = self.drawer.draw_one(key, size)
            if drawn is not None and drawn[-1][1] == self._size:
                return drawn
        for stage in self.stages:
            one: Any = stage.draw_one(key, size)
            if stage.frames:
                size = one.size
            out.append((one, size))
        if size != self._size:
            raise LeftToCpu(f"its result has {size[0]} x {size[1]} pixels, not {self._size}")
        return out

    @property
    def _size(self) -> Size:
        height, width = self.shape[1:] if self.channels_first else self.shape[:2]
        return height, width

    def regions(self, parameters: DeviceParameters) -> NDArray[np.int32]:
        """The part (top, left, height, width) of each picture that must be decoded."""
        return parameters.regions

    def run(
        self, pictures: Any, parameters: DeviceParameters, rows: Any, buffer: Any = None
    ) -> None:
        """Prepare the pictures, a ``Ragged``, and write them to ``rows[parameters.places]``.

        ``rows``: the rows of the whole tiny-batch, on the device of the pictures. ``buffer``: a
        copy of ``parameters.buffer`` on this device, if the caller has one.
        """
        import torch

        if len(pictures) != len(parameters):
            raise ValueError(
                f"{len(pictures)} pictures and parameters for {len(parameters)}: give one picture "
                "for each place of the parameters"
            )
        if not len(parameters):
            return
        device = pictures.data.device
        if buffer is None:
            buffer = torch.from_numpy(parameters.buffer).to(device)
        backend = self._backend(device)
        places = torch.from_numpy(parameters.places).to(device)
        table = None if self.table is None else self._table_on(device)
        final = backend.RowsOut(rows, places, table, self.channels_first)
        active = [number for number, arrays in enumerate(parameters.stages) if arrays]
        if not active:
            backend.finish(pictures, final)
        arrays = parameters.on(buffer)
        for number in active:
            pictures = self.stages[number].run(
                backend,
                pictures,
                arrays[number],
                parameters.stages[number],
                final if number == active[-1] else None,
            )

    def _table_on(self, device: Any) -> Any:
        if device not in self._tables:
            import torch

            self._tables[device] = torch.from_numpy(np.array(self.table)).to(device)
        return self._tables[device]

    def _backend(self, device: Any) -> Any:
        """The module with the operations."""
        chosen = self.backend
        if chosen is None:
            found = device.type == "cuda" and importlib.util.find_spec("triton") is not None
            chosen = "triton" if found else "torch"
        return importlib.import_module(f"penstock.image.on_device.{chosen}_ops")


def device_program(
    stops: Sequence[Stop], seed: int, on: str | int | None = None, *, backend: str | None = None
) -> DeviceProgram:
    """The program of these stops, all of which must work on the field ``on`` of samples.

    The stops are the last of a road, from ``decode()`` on, or from a hold of decoded pictures on.
    Raises ``NotOnDevice`` with the reason if a device cannot run them.
    """
    parts: list[tuple[Any, Keyed]] = []
    for stop in stops:
        if not works_on(getattr(stop, "on", None), "image", on):
            raise NotOnDevice(f"{stop.name} works on another field than the image")
        operations = getattr(stop, "operations", None)
        if operations is None:
            operations = [getattr(stop, "function", None)]
        if operations == [None]:
            raise NotOnDevice(
                f"the stage {stop.name} is none that a device can run (give maps of the sources of "
                "mix() to the mixture instead)"
            )
        ordinals = getattr(stop, "ordinals", None)
        if ordinals is None:
            ordinals = [getattr(stop, "ordinal", 0)] * len(operations)
        parts += [
            (operation, Keyed(seed, f"map/{ordinal}"))
            for operation, ordinal in zip(operations, ordinals, strict=True)
        ]
    return program_of(parts, backend=backend)


def program_of(parts: Sequence[tuple[Any, Keyed]], *, backend: str | None = None) -> DeviceProgram:
    """The program of these operations, each with the generators of its stage."""
    if not native.kernel_available():
        raise NotOnDevice(
            f"without the compiled kernel the CPU computes other bits: {native.why_no_kernel()}"
        )
    rest = list(parts)
    most_pixels = 0
    decodes = bool(rest) and isinstance(rest[0][0], Decode)
    if decodes:
        decode = rest.pop(0)[0]
        if decode.mode != "rgb":
            raise NotOnDevice(f'decode(mode="{decode.mode}") makes pictures that are not RGB')
        most_pixels = decode.most_pixels
    spec: Spec = ArraySpec.of((None, None, 3), np.uint8)
    table, channels_first = None, False
    stages: list[DeviceStage] = []
    exact, tolerance = True, ""
    while rest:
        operation, keyed = rest[0]
        if isinstance(operation, (*FRAMINGS, RandomFlip)):
            stage = _framing(rest)
            stages.append(stage)
            for each, _ in stage.parts:
                spec = each.output(spec)
            continue
        del rest[0]
        if isinstance(operation, AUGMENTS):
            if operation.interpolation != "nearest":
                raise NotOnDevice(
                    f'{operation.name}(interpolation="{operation.interpolation}") samples with '
                    "OpenCV's interpolation"
                )
            levels = operation._fill if len(operation._fill) == 3 else operation._fill * 3
            stages.append(ChangesStage(operation, keyed, tuple(map(round, levels))))
        elif isinstance(operation, DeepAutoAugment):
            stages += deep_stages(operation, keyed)
        elif isinstance(operation, ColorJitter):
            stages.append(ChangesStage(operation, keyed))
            if operation.hue is not None:
                exact, tolerance = False, "color_jitter's hue: within one grey level"
        elif isinstance(operation, Erase):
            stages.append(EraseStage(operation, keyed))
        elif isinstance(operation, Normalize):
            if rest:
                raise NotOnDevice(f"{rest[0][0].name} stands below normalize")
            table, channels_first = operation.table(3), operation.layout == "chw"
        else:
            name = getattr(operation, "name", None) or getattr(operation, "__name__", "a function")
            raise NotOnDevice(f"{name} is no operation of penstock.image that a device can run")
        spec = operation.output(spec)
    if not isinstance(spec, ArraySpec) or not spec.known:
        raise NotOnDevice("rows have no fixed size: no crop or resize gives one to all pictures")
    shape = tuple(side for side in spec.shape if side is not None)
    return DeviceProgram(
        decodes,
        most_pixels,
        tuple(stages),
        table,
        channels_first,
        shape,
        spec.dtype,
        exact,
        tolerance,
        backend,
        _drawer(stages),
    )


@dataclass(frozen=True)
class KernelDrawer:
    """Draws the parameters of crops, flips and automatic augmentation in the compiled kernel.

    ``program``: the same operations as a program of the kernel. ``changes``: the stage below.
    """

    program: Any
    framing: FramingStage
    changes: ChangesStage | None

    def draw_one(self, key: Key, size: Size) -> list[tuple[Any, Size]] | None:
        """What each stage draws; ``None``: Python must draw, and may raise an error."""
        drawn = self.program.draw(key.index, key.epoch, key.replica, *size)
        framed = None if drawn is None else self.framing.of_kernel(drawn, size)
        if framed is None:
            return None
        out: list[tuple[Any, Size]] = [(framed, framed.size)]
        if self.changes is not None:
            out.append((self.changes.of_kernel(drawn, framed.size), framed.size))
        return out


def _drawer(stages: Sequence[DeviceStage]) -> KernelDrawer | None:
    """The drawer of these stages; ``None`` if the kernel does not draw all of them."""
    if not stages:
        return None
    framing, *below = stages
    changes = below[0] if below else None
    if (
        not isinstance(framing, FramingStage)
        or not isinstance(changes, ChangesStage | None)
        or len(below) > 1
    ):
        return None
    parts = list(framing.parts)
    if changes is not None:
        parts.append((changes.operation, changes.keyed))
    joined: ImageWork | None = None
    for operation, keyed in parts:
        work = operation.kernel_work(keyed.key)
        if not isinstance(work, ImageWork):
            return None
        joined = work if joined is None else joined.joined(work)
        if joined is None:
            return None
    if joined is None or not joined.framing:
        return None
    return KernelDrawer(joined.program(), framing, changes)


def _framing(rest: list[tuple[Any, Keyed]]) -> FramingStage:
    """Take the crops, at most one resize, and flips at the front of ``rest``, as one stage.

    The same groups as on the CPU, where ``fuse`` forms them.
    """
    parts: list[tuple[Any, Keyed]] = []
    while rest and isinstance(rest[0][0], (*FRAMINGS, RandomFlip)):
        operation = rest[0][0]
        if not isinstance(operation, RandomFlip):
            flipped = any(isinstance(each, RandomFlip) for each, _ in parts)
            resized = any(isinstance(each, RESIZING) for each, _ in parts)
            if flipped or (resized and isinstance(operation, RESIZING)):
                break
        parts.append(rest.pop(0))
    return FramingStage(tuple(parts))
