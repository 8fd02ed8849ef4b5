"""A member of a group, as a program: it takes batches at its own pace and keeps a diary of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.verdict import Batch
from benchmarks.faults.work import Numbered, as_batch
from benchmarks.jobs.board import NAP, die_with_parent

GROUP = "faults"

SAVED = "saved"
"""What a diary says after the batch that the checkpoint was taken behind."""


@dataclass(frozen=True)
class Life:
    """What a member does, and what becomes of it without anybody's help.

    It goes through ``epochs``, with ``step`` seconds for a batch, and from batch ``slow_from`` on
    ``slower`` times as many. It leaves behind batch ``leave_at``; behind ``save_at`` it writes a
    checkpoint, and with ``resume`` it goes on from one. Batches are counted from its beginning.
    """

    samples: int
    batch: int
    kind: Literal["threads", "processes"]
    epochs: int
    step: float
    lag: Literal["detach", "wait"] = "detach"
    slow_from: int | None = None
    slower: float = 1.0
    leave_at: int | None = None
    save_at: int | None = None
    resume: str | None = None

    @property
    def work(self) -> Numbered:
        return Numbered(self.samples, self.batch, self.kind)


@dataclass(frozen=True)
class Papers:
    """Where a member's files are; it begins when ``go`` is there."""

    place: Path
    name: str

    @property
    def go(self) -> Path:
        return self.place / f"{self.name}.go"

    @property
    def ready(self) -> Path:
        return self.place / f"{self.name}.ready"

    @property
    def diary(self) -> Path:
        return self.place / f"{self.name}.diary"

    @property
    def state(self) -> Path:
        return self.place / f"{self.name}.state"

    @property
    def said(self) -> Path:
        return self.place / f"{self.name}.said"


@dataclass(frozen=True)
class Diary:
    """What a member had, and how many batches of that a checkpoint knows of."""

    batches: tuple[Batch, ...]
    saved: int | None = None


def read(path: Path) -> Diary:
    """A diary as far as it was written: the last line of a killed member may be half a line."""
    if not path.exists():
        return Diary(())
    had: list[Batch] = []
    saved = None
    for line in path.read_text().split("\n")[:-1]:
        if line == SAVED:
            saved = len(had)
            continue
        at, epoch, indices, digest = json.loads(line)
        had.append(Batch(at, epoch, tuple(indices), digest))
    return Diary(tuple(had), saved)


def written(path: Path) -> int:
    """How many batches there are in a diary: quicker than reading it, for those who wait."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    return sum(line.startswith(b"[") for line in lines[:-1])


def live(life: Life, papers: Papers) -> None:
    """Go through the epochs."""
    loader = life.work.loader(share=GROUP, lag=life.lag)
    papers.ready.touch()
    while not papers.go.exists():
        time.sleep(NAP)
    if life.resume is not None:
        loader.load_state_dict(json.loads(Path(life.resume).read_text()))
    # Unbuffered: what was had must stand there, whatever happens to this process next.
    diary = os.open(papers.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for count, (epoch, batch) in enumerate(_batches(loader, life.epochs), start=1):
        had = as_batch(time.monotonic(), epoch, batch)
        del batch
        os.write(diary, (json.dumps(had) + "\n").encode())
        if count == life.save_at:
            # Into place at once: whoever sees it may kill this process.
            half = papers.state.with_suffix(".half")
            half.write_text(json.dumps(loader.state_dict()))
            os.write(diary, f"{SAVED}\n".encode())
            half.rename(papers.state)
        if count == life.leave_at:
            break
        slow = life.slow_from is not None and count >= life.slow_from
        time.sleep(life.step * (life.slower if slow else 1.0))
    loader.close()


def _batches(loader: Any, epochs: int) -> Iterator[tuple[int, Any]]:
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch
            del batch


if __name__ == "__main__":
    die_with_parent()
    told = json.loads(sys.argv[1])
    live(Life(**told["life"]), Papers(Path(told["place"]), told["name"]))
