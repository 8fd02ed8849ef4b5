"""What a loader says of itself to those who watch it: plain data, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stats import (
    BadSample,
    CacheStats,
    EchoStats,
    PoolStats,
    RefurbishStats,
    StageStats,
    Stats,
)

VERSION = 1

LISTED = 20
"""How many of the bad samples go along by name."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a loader is: ``batch`` of ``batches`` in its epoch, and what lies ready for it.

    ``finished`` batches wait to be taken, ``unfinished`` ones are being prepared. ``slots`` are the
    pieces of memory that batches take, those that the loop still looks at included, and
    ``slot_bytes`` is what all of them occupy.
    """

    name: str
    epoch: int
    batch: int
    batches: int | None
    share: str | None
    rank: int
    world: int
    finished: int
    unfinished: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A loader as of one moment, ``written`` (seconds since 1970).

    ``waiting`` is since when its loop waits for a batch, or ``None`` where it does not. ``started``
    tells its process from a later one of the same number.
    """

    pid: int
    started: int | None
    number: int
    command: str
    written: float
    waiting: float | None
    standing: Standing
    stats: Stats

    @property
    def key(self) -> tuple[int, int | None, int]:
        """What tells it from every other loader."""
        return self.pid, self.started, self.number

    def plain(self) -> dict[str, Any]:
        """As what JSON has."""
        stats = self.stats
        return {
            "version": VERSION,
            **_fields(self),
            "standing": _fields(self.standing),
            "stats": {
                **_fields(stats),
                "stages": [_fields(one) for one in stats.stages],
                "caches": [_fields(one) for one in stats.caches],
                "pool": _fields(stats.pool),
                "bad_samples": [_fields(one) for one in each_once(stats.bad_samples)[-LISTED:]],
                "refurbish": None if stats.refurbish is None else _fields(stats.refurbish),
                "echo": None if stats.echo is None else _fields(stats.echo),
            },
        }


def each_once(bad: Sequence[BadSample]) -> list[BadSample]:
    """Bad samples without repetition: what is bad is bad in every epoch."""
    return list({one.index: one for one in bad}.values())


def _fields(one: Any) -> dict[str, Any]:
    # dataclasses.asdict copies what is in there too, and takes five times as long.
    return {name: getattr(one, name) for name in one.__slots__}


def to_json(snapshot: Snapshot) -> str:
    return json.dumps(snapshot.plain(), separators=(",", ":"))


def from_json(text: str | bytes) -> Snapshot | None:
    """The snapshot that was written so; ``None`` for anything else, and for other versions."""
    try:
        told = json.loads(text)
        return _snapshot(told) if told["version"] == VERSION else None
    except (ValueError, KeyError, TypeError):
        return None


def _snapshot(told: Mapping[str, Any]) -> Snapshot:
    fields = {name: value for name, value in told.items() if name != "version"}
    return Snapshot(
        **{**fields, "standing": Standing(**told["standing"]), "stats": _stats(told["stats"])}
    )


def _stats(told: Mapping[str, Any]) -> Stats:
    refurbish, echo = told["refurbish"], told["echo"]
    made = {
        "stages": tuple(StageStats(**one) for one in told["stages"]),
        "caches": tuple(CacheStats(**one) for one in told["caches"]),
        "pool": PoolStats(**told["pool"]),
        "bad_samples": tuple(BadSample(**one) for one in told["bad_samples"]),
        "refurbish": None if refurbish is None else RefurbishStats(**refurbish),
        "echo": None if echo is None else EchoStats(**echo),
    }
    return Stats(**{**told, **made})
