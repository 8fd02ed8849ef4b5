"""The program of one job: takes batches and counts them, together with other jobs."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import die_with_parent
from benchmarks.harness.sameness import first_leaf, look
from benchmarks.jobs.board import Board, JobState, Phase
from benchmarks.jobs.work import SharedPhotos

INSPECTED = 16
"""Samples inspected per batch."""


@dataclass(frozen=True)
class JobSpec:
    """The argument of a process. ``function``: path of the peer's function. ``serves``: the process
    prepares batches for all jobs instead of taking them. ``checked``: samples to inspect at the
    end."""

    function: str
    work: dict[str, Any]
    board: str
    places: int
    place: int
    answer: str
    serves: bool = False
    stamped: bool = False
    checked: int = 0


def function_path(function: Callable[..., Any]) -> str:
    """The path ``module:name`` of a function."""
    return f"{function.__module__}:{function.__qualname__}"


def import_function(path: str) -> Any:
    """The function at a path ``module:name``."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def serve(spec: JobSpec) -> None:
    """Prepare batches for the jobs until this process is killed."""
    board, work = Board(Path(spec.board), spec.places), SharedPhotos.from_plain(spec.work)

    def count_batch(samples: int) -> None:
        board.add(spec.place, samples)
        board.set_state(spec.place, JobState.RUNNING)

    import_function(spec.function)(work, count_batch)


def take(spec: JobSpec) -> None:
    """Take batches from phase RUN until phase END."""
    board, work = Board(Path(spec.board), spec.places), SharedPhotos.from_plain(spec.work)
    make = import_function(spec.function)(work)
    board.set_state(spec.place, JobState.IMPORTED)
    board.wait_for(Phase.RUN)

    started = time.perf_counter()
    loader = make()
    batches = _endless(loader)
    delays: list[tuple[int, int]] = []

    def take_batch() -> None:
        batch = next(batches)
        if spec.stamped:
            now = time.monotonic_ns()
            delays.append((now, now - int(batch[-1].max())))
        leaf = first_leaf(batch)
        leaf[(0,) * leaf.ndim]
        board.add(spec.place, len(leaf))

    take_batch()
    answer: dict[str, Any] = {"first": time.perf_counter() - started}
    board.set_state(spec.place, JobState.RUNNING)
    while board.phase < Phase.INSPECT:
        take_batch()
    answer["delays"] = delays
    # After the measurement, because inspecting makes this job fall behind the others.
    if spec.checked:
        answer["look"] = asdict(look(_some_of(batches), spec.checked))
    Path(spec.answer).write_text(json.dumps(answer))
    board.set_state(spec.place, JobState.INSPECTED)
    while board.phase < Phase.END:
        take_batch()
    batches.close()
    close = getattr(loader, "close", None)
    if close is not None:
        close()


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        yield from loader


def _some_of(batches: Iterable[Any]) -> Iterator[Any]:
    """A few samples of each batch: some loaders drop a job that takes long for one batch."""
    for batch in batches:
        yield first_leaf(batch)[:INSPECTED]
        del batch


if __name__ == "__main__":
    die_with_parent()
    spec = JobSpec(**json.loads(sys.argv[1]))
    (serve if spec.serves else take)(spec)
