"""Which operations of a pipeline are left for the device: the last one, if it is ``normalize``.

Then uint8 crosses the bus, a quarter of the bytes, and the workers do not write float32. The
decision is pure: it depends on the pipeline only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.operation import ArraySpec, Spec
from penstock.pipeline import Pipeline
from penstock.stops.field import On
from penstock.stops.map import Map
from penstock.stops.stop import Stop

if TYPE_CHECKING:
    from penstock.image.normalizing import Normalize


@dataclass(frozen=True)
class Rest:
    """What the device does: ``normalize`` on the field ``on`` of a batch of ``channels``."""

    normalize: Normalize
    on: On
    channels: int


@dataclass(frozen=True)
class DeviceDivision:
    """What the workers prepare, and the rest, for the device.

    ``why``: why ``normalize`` is not left for the device; empty if it is, or if there is none.
    """

    pipeline: Pipeline
    rest: Rest | None = None
    why: str = ""

    @property
    def note(self) -> str:
        """For the ``repr`` of a loader."""
        if self.rest is not None:
            return "normalize runs there"
        return f"normalize runs on the CPU: {self.why}" if self.why else ""


def divide(pipeline: Pipeline) -> DeviceDivision:
    """Leave ``normalize`` for the device where that changes no value.

    >>> import penstock as ps
    >>> read = ps.from_files(["a.jpg"]).map(ps.image.decode()).map(ps.image.resize((8, 8)))
    >>> divided = divide(read.map(ps.image.normalize()).batch(2))
    >>> divided.note, [stop.name for stop in divided.pipeline.stops]
    ('normalize runs there', ['decode', 'resize'])
    >>> divide(read.map(ps.image.normalize()).batch(2, pad=0.0)).why
    'batch() does more than stack samples'
    """
    from penstock.image.normalizing import Normalize

    stops = pipeline.stops
    place = max((at for at, stop in enumerate(stops) if isinstance(stop, Map)), default=-1)
    last = stops[place] if place >= 0 else None
    if not isinstance(last, Map) or not isinstance(last.function, Normalize):
        return DeviceDivision(pipeline)
    if pipeline.batching is not None and pipeline.batching.collate is not None:
        return DeviceDivision(pipeline, why="batch() does more than stack samples")
    for stop in stops[place + 1 :]:
        if not stop.repeats:
            return DeviceDivision(pipeline, why=f"{stop.name} keeps its output")
    channels = _channels(pipeline, stops[:place], last.function, last.on)
    if channels is None:
        return DeviceDivision(
            pipeline, why="the pipeline does not know beforehand that it gets uint8 images"
        )
    fewer = replace(pipeline, stops=(*stops[:place], *stops[place + 1 :]))
    return DeviceDivision(fewer, Rest(last.function, last.on, channels))


def undivided(pipeline: Pipeline) -> DeviceDivision:
    """Nothing is left for the device."""
    return DeviceDivision(pipeline)


def _channels(
    pipeline: Pipeline, above: tuple[Stop, ...], normalize: Normalize, on: On
) -> int | None:
    """The channels of the uint8 images above ``normalize``; ``None`` if that is not known."""
    fields = replace(pipeline, stops=above).fields
    if isinstance(fields, dict):
        default = 0 if 0 in fields else normalize.field
        spec: Spec = fields.get(default if on is None else on)
    else:
        spec = fields
    if not isinstance(spec, ArraySpec) or spec.dtype.name != "uint8" or len(spec.shape) != 3:
        return None
    return spec.shape[2]
