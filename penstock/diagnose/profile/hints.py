"""What to do about the slowest stop, in one line, where that is known."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import native
from penstock.config import show_size
from penstock.diagnose.profile.result import HOLDS, Row
from penstock.pipeline import Pipeline
from penstock.source import DatasetSource
from penstock.source.stream import StreamSource
from penstock.stops.map import Map

_WAITS = 0.5
"""Below this part of its time on the CPU, reading is waiting."""

_FRAMING = ("random_resized_crop", "random_crop", "center_crop", "resize")
"""What runs in one step with decode."""

_OURS = {
    "CenterCrop": "center_crop",
    "ColorJitter": "color_jitter",
    "Normalize": "normalize",
    "RandAugment": "rand_augment",
    "RandomErasing": "random_erasing",
    "RandomHorizontalFlip": "random_flip",
    "RandomResizedCrop": "random_resized_crop",
    "Resize": "resize",
    "TrivialAugmentWide": "trivial_augment",
}
"""Transforms of torchvision that ``penstock.image`` has too."""


def hint(pipeline: Pipeline, rows: Sequence[Row], samples: int | None) -> str:
    """What would help the slowest of these rows; ``samples`` is how many the source has."""
    at = max(range(len(rows)), key=lambda i: rows[i].ms)
    row = rows[at]
    if row.ms <= 0:
        return ""
    if row.kind == "source":
        return _reading(pipeline, row, samples)
    if row.kind == "batch":
        if row.needs_process:
            return "collate is yours: stacking in place, batch(...) without it, copies once."
        return ""
    if row.kind in HOLDS:
        return "putting samples in costs most, once: later epochs only pay for hits."
    if row.name.startswith("decode") or _decodes(rows[at - 1], row):
        return _decoding(pipeline, rows, at, samples)
    return _mapping(row)


def _reading(pipeline: Pipeline, row: Row, samples: int | None) -> str:
    source = pipeline.source
    if isinstance(source, StreamSource):
        return "the stream itself is slowest; more workers read more streams side by side."
    cached = any(stop.transparent for stop in pipeline.stops)
    waits = row.cpu_ms < _WAITS * row.ms
    if isinstance(source, DatasetSource) and (row.parts or source.random):
        return (
            "the dataset does all this when it is read: give it no transform and put the steps "
            "below it as maps, so that a cache can stand between and ps.image can be used."
        )
    if cached or not waits:
        return ""
    room = "" if samples is None else f" (all of it takes {show_size(row.nbytes * samples)})"
    return f"reading waits for the disk or the network: put cache(...) below the source{room}."


def _decodes(above: Row, row: Row) -> bool:
    return above.leaves.startswith("bytes") and row.leaves.startswith("PIL")


def _decoding(pipeline: Pipeline, rows: Sequence[Row], at: int, samples: int | None) -> str:
    row = rows[at]
    if row.leaves.startswith("PIL"):
        return f"{row.name} decodes with PIL: ps.image.decode() is faster and runs in threads."
    below = rows[at + 1].name if at + 1 < len(rows) else ""
    maps = [stop for stop in pipeline.stops if isinstance(stop, Map)]
    names = [stop.name for stop in maps]
    if row.kind == "fused":
        if native.kernel_available():
            return ""
        return f"the compiled kernel would do this step faster: {native.why_no_kernel()}"
    framing = next((name for name in names if name in _FRAMING), "")
    if framing and below not in _FRAMING:
        return (
            f"{framing} right below decode runs in one step with it, which decodes only what is "
            f"wanted; here {below} stands between."
        )
    above = maps[: names.index(row.name)] if row.name in names else maps
    cached = any(stop.transparent for stop in pipeline.stops)
    if samples is not None and not cached and not any(stop.random for stop in above):
        room = show_size(row.nbytes * samples)
        return f"a cache below decode keeps what it made: {room} for all samples."
    return ""


def _mapping(row: Row) -> str:
    slow = max(row.parts, key=lambda part: part.ms).name if row.parts else row.name
    ours = _OURS.get(slow.partition("#")[0])
    if row.needs_process and ours is not None:
        return f"ps.image.{ours} does what {slow} does, faster, and runs in threads."
    if row.needs_process:
        return (
            f"{row.name} {row.needs_process}, so the road runs in processes. If it works on NumPy "
            "arrays outside the GIL, make it an Operation; it then runs in threads."
        )
    return ""
