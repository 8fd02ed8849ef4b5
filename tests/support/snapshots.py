"""Sample snapshots for tests of views."""

from __future__ import annotations

from dataclasses import replace
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
from penstock.watch.snapshot import Snapshot, Standing

STATS = Stats(
    samples=1_000,
    batches=10,
    bytes=50_000,
    bytes_read=80_000,
    elapsed=10.0,
    wait=2.5,
    stages=(StageStats("source", 600, 3.0), StageStats("decode", 1_000, 9.0)),
    caches=(CacheStats(400, 600, 600, 30_000_000, 40_000_000, False),),
    pool=PoolStats("threads", 2, 12.0, 0.6, 0),
    retries=0,
    corrupt=0,
    bad=0,
    bad_samples=(),
)

FULL = replace(
    STATS,
    bad=2,
    bad_samples=(
        BadSample(7, "cat/7.jpg", "decode", "not a JPEG"),
        BadSample(9, 'dog/"9"\n.jpg', "decode", "cut short\nat byte 12"),
    ),
    retries=1,
    corrupt=3,
    refurbish=RefurbishStats(300, 700, 500, 4_000_000),
    echo=EchoStats(500, 1_000, 2.0),
    machines=(MachineStats("helper-1", 300), MachineStats("helper-2", 100)),
    device=DeviceStats(
        name="cuda:0",
        samples=250,
        cpu_samples=750,
        tiny_batches=25,
        cpu_tiny_batches=75,
        again=0,
        threshold=-2,
        frozen=True,
        mode="spatial",
        decided=True,
        copied=3_000_000,
        buffers=400_000,
        in_use=5_000_000,
        lost="",
    ),
    mix=(PartStats("web", 0.75, 750, 1.5), PartStats("code", 0.25, 250, 0.5)),
)

STANDING = Standing(
    name="<Loader of 5,000 samples>",
    epoch=3,
    batch=12,
    batches=50,
    share=None,
    rank=0,
    world=1,
    finished=3,
    unfinished=1,
    slots=5,
    slot_bytes=2_000_000,
)


def snapshot(stats: Stats = STATS, **more: Any) -> Snapshot:
    known: dict[str, Any] = {
        "pid": 4711,
        "started": 99,
        "number": 0,
        "command": "python train.py",
        "written": 1_000.0,
        "waiting": None,
        "standing": STANDING,
        "stats": stats,
    }
    return Snapshot(**{**known, **more})
