"""One of several jobs that run together, as a program: it takes batches, and counts them."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.sameness import first_leaf, look
from benchmarks.jobs.board import Board, Phase, Stand, die_with_parent
from benchmarks.jobs.work import SharedPhotos

SEEN = 16
"""Samples of a batch that are looked at."""


@dataclass(frozen=True)
class Part:
    """What a process is told. ``function`` is that of a peer, by name; ``serves`` tells the process
    that prepares for all from those that take; ``checked`` samples are looked at in the end."""

    function: str
    work: dict[str, Any]
    board: str
    places: int
    place: int
    answer: str
    serves: bool = False
    stamped: bool = False
    checked: int = 0


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def of_name(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def serve(part: Part) -> None:
    """Prepare for the others, until it is ended from without."""
    board, work = Board(Path(part.board), part.places), SharedPhotos.of_plain(part.work)

    def gave(samples: int) -> None:
        board.add(part.place, samples)
        board.stands(part.place, Stand.RUNNING)

    of_name(part.function)(work, gave)


def take(part: Part) -> None:
    """Take batches from the moment all may, until all should end."""
    board, work = Board(Path(part.board), part.places), SharedPhotos.of_plain(part.work)
    make = of_name(part.function)(work)
    board.stands(part.place, Stand.IMPORTED)
    board.wait_for(Phase.RUN)

    started = time.perf_counter()
    loader = make()
    batches = _endless(loader)
    delays: list[tuple[int, int]] = []

    def one() -> None:
        batch = next(batches)
        if part.stamped:
            now = time.monotonic_ns()
            delays.append((now, now - int(batch[-1].max())))
        leaf = first_leaf(batch)
        leaf[(0,) * leaf.ndim]
        board.add(part.place, len(leaf))

    one()
    answer: dict[str, Any] = {"first": time.perf_counter() - started}
    board.stands(part.place, Stand.RUNNING)
    while board.phase < Phase.LOOK:
        one()
    answer["delays"] = delays
    # After the clock has stopped, because whoever looks falls behind the others.
    if part.checked:
        answer["look"] = asdict(look(_some_of(batches), part.checked))
    Path(part.answer).write_text(json.dumps(answer))
    board.stands(part.place, Stand.LOOKED)
    while board.phase < Phase.END:
        one()
    batches.close()
    close = getattr(loader, "close", None)
    if close is not None:
        close()


def _endless(loader: Iterable[Any]) -> Any:
    while True:
        yield from loader


def _some_of(batches: Iterable[Any]) -> Iterator[Any]:
    """A few samples of each batch: some loaders give up a job that takes long over one."""
    for batch in batches:
        yield first_leaf(batch)[:SEEN]
        del batch


if __name__ == "__main__":
    die_with_parent()
    told = Part(**json.loads(sys.argv[1]))
    (serve if told.serves else take)(told)
