"""The status of one loader at one moment: frozen data, and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stats import (
    BadSample,
    CacheStats,
    DeviceStats,
    EchoStats,
    MachineStats,
    PartStats,
    PoolStats,
    RefurbishStats,
    StageStats,
    Stats,
)

VERSION = 2

LISTED = 20
"""Most bad samples that a snapshot lists by name."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The position of a loader in its epoch, and the state of its queue.

    The next batch has number ``batch`` of ``batches``; ``batches`` is ``None`` where the length of
    an epoch is unknown. ``finished`` batches wait to be taken, ``unfinished`` ones are being
    prepared. ``slots`` counts the slots in use, including those whose batch the training loop still
    holds. ``slot_bytes`` is the memory of all slots.
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
    """A loader at the time ``written`` (seconds since 1970).

    ``waiting`` is the time since which the training loop waits for a batch, ``None`` if it does not
    wait. ``started`` is the start time of the process: process numbers are reused, and a number
    together with its start time is unique. ``number`` counts the loaders of one process.
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
        """The identity of the loader: unique among all loaders of a machine."""
        return self.pid, self.started, self.number

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as dicts, lists, strings and numbers, ready for JSON."""
        stats = self.stats
        bad = unique_bad_samples(stats.bad_samples)[-LISTED:]
        return {
            "version": VERSION,
            **_fields(self),
            "standing": _fields(self.standing),
            "stats": {
                **_fields(stats),
                "stages": [_fields(stage) for stage in stats.stages],
                "caches": [_fields(cache) for cache in stats.caches],
                "pool": _fields(stats.pool),
                "bad_samples": [_fields(sample) for sample in bad],
                "refurbish": None if stats.refurbish is None else _fields(stats.refurbish),
                "echo": None if stats.echo is None else _fields(stats.echo),
                "machines": [_fields(machine) for machine in stats.machines],
                "device": None if stats.device is None else _fields(stats.device),
                "mix": [_fields(part) for part in stats.mix],
            },
        }


def unique_bad_samples(bad: Sequence[BadSample]) -> list[BadSample]:
    """Each bad sample once. A bad sample is recorded again in every epoch."""
    return list({sample.index: sample for sample in bad}.values())


def _fields(record: Any) -> dict[str, Any]:
    # dataclasses.asdict copies the values too, and takes five times as long.
    return {name: getattr(record, name) for name in record.__slots__}


def to_json(snapshot: Snapshot) -> str:
    return json.dumps(snapshot.as_dict(), separators=(",", ":"))


def from_json(text: str | bytes) -> Snapshot | None:
    """The snapshot in a JSON text; ``None`` if it is malformed or has another version."""
    try:
        data = json.loads(text)
        return _snapshot(data) if data["version"] == VERSION else None
    except (ValueError, KeyError, TypeError):
        return None


def _snapshot(data: Mapping[str, Any]) -> Snapshot:
    fields = {name: value for name, value in data.items() if name != "version"}
    return Snapshot(
        **{**fields, "standing": Standing(**data["standing"]), "stats": _stats(data["stats"])}
    )


def _stats(data: Mapping[str, Any]) -> Stats:
    refurbish, echo, device = data["refurbish"], data["echo"], data.get("device")
    records = {
        "stages": tuple(StageStats(**stage) for stage in data["stages"]),
        "caches": tuple(CacheStats(**cache) for cache in data["caches"]),
        "pool": PoolStats(**data["pool"]),
        "bad_samples": tuple(BadSample(**sample) for sample in data["bad_samples"]),
        "refurbish": None if refurbish is None else RefurbishStats(**refurbish),
        "echo": None if echo is None else EchoStats(**echo),
        "machines": tuple(MachineStats(**machine) for machine in data["machines"]),
        "device": None if device is None else DeviceStats(**device),
        "mix": tuple(PartStats(**part) for part in data["mix"]),
    }
    return Stats(**{**data, **records})
