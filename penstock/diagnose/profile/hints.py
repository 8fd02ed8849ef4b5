"""Hints: one line on how to make the slowest stage faster, if the profiler knows a way."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import native
from penstock.config import show_size
from penstock.diagnose.profile.result import HOLDS, StageCost
from penstock.pipeline import Pipeline
from penstock.source import DatasetSource
from penstock.source.stream import StreamSource
from penstock.stops.map import Map

_WAITING_SHARE = 0.5
"""A source whose CPU time is below this share of its wall time is waiting."""

_FRAMING = ("random_resized_crop", "random_crop", "center_crop", "resize")
"""Operations that run in one step with decode."""

_EQUIVALENTS = {
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
"""Transforms of torchvision, and their equivalents in ``penstock.image``."""


def hint(pipeline: Pipeline, rows: Sequence[StageCost], samples: int | None) -> str:
    """How to speed up the slowest of these rows, or ``""``. ``samples``: length of the source."""
    at = max(range(len(rows)), key=lambda i: rows[i].ms)
    row = rows[at]
    if row.ms <= 0:
        return ""
    if row.kind == "source":
        return _reading(pipeline, row, samples)
    if row.kind == "batch":
        if row.needs_process:
            return (
                "the batch is made by your own collate. batch(...) without collate stacks samples "
                "in place, with one copy."
            )
        return ""
    if row.kind in HOLDS:
        return "storing samples costs most. That happens once; later epochs only pay for hits."
    if row.name.startswith("decode") or _decodes(rows[at - 1], row):
        return _decoding(pipeline, rows, at, samples)
    return _mapping(row)


def _reading(pipeline: Pipeline, row: StageCost, samples: int | None) -> str:
    source = pipeline.source
    if isinstance(source, StreamSource):
        return "the stream itself is slowest. With more workers, more streams are read in parallel."
    cached = any(stop.transparent for stop in pipeline.stops)
    waiting = row.cpu_ms < _WAITING_SHARE * row.ms
    if isinstance(source, DatasetSource) and (row.parts or source.random):
        return (
            "the dataset applies its transform while it is read. Remove the transform and add its "
            "steps as maps: then a cache can stand between them, and you can use ps.image."
        )
    if cached or not waiting:
        return ""
    room = "" if samples is None else f" (all samples take {show_size(row.nbytes * samples)})"
    return f"reading waits for the disk or the network: put cache(...) below the source{room}."


def _decodes(above: StageCost, row: StageCost) -> bool:
    return above.leaves.startswith("bytes") and row.leaves.startswith("PIL")


def _decoding(pipeline: Pipeline, rows: Sequence[StageCost], at: int, samples: int | None) -> str:
    row = rows[at]
    if row.leaves.startswith("PIL"):
        return f"{row.name} decodes with PIL: ps.image.decode() is faster and can run in threads."
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
            f"{framing} directly below decode runs in one step with it and decodes only the part "
            f"of the image that it needs. Here {below} stands between them."
        )
    above = maps[: names.index(row.name)] if row.name in names else maps
    cached = any(stop.transparent for stop in pipeline.stops)
    if samples is not None and not cached and not any(stop.random for stop in above):
        room = show_size(row.nbytes * samples)
        return f"a cache below decode keeps the decoded images: {room} for all samples."
    return ""


def _mapping(row: StageCost) -> str:
    slow = max(row.parts, key=lambda part: part.ms).name if row.parts else row.name
    equivalent = _EQUIVALENTS.get(slow.partition("#")[0])
    if row.needs_process and equivalent is not None:
        return f"ps.image.{equivalent} replaces {slow}: it is faster and can run in threads."
    if row.needs_process:
        return (
            f"{row.name} {row.needs_process}, so the pipeline runs in processes. If it works on "
            "NumPy arrays and releases the GIL, make it an Operation, which can run in threads."
        )
    return ""
