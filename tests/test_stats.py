"""Statistics of a loader: counters add up, time is charged to its stage, and they print well."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import penstock as ps
from penstock.engine.pools.threads import ThreadPool
from penstock.stats import BadSample, CacheStats, Held, Meter, PoolStats, Tally
from penstock.watch.snapshot import from_json, to_json
from tests.support.snapshots import FULL, STATS, snapshot


def test_counts_add_up() -> None:
    data = [(np.zeros(100, dtype=np.float32), i) for i in range(50)]
    pipeline = ps.from_dataset(data).cache("1MB").map(lambda s: s, random=False, name="same")
    with pipeline.batch(8).loader(workers=0) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        stats = loader.stats()
    assert (stats.samples, stats.batches) == (100, 14)
    assert stats.bytes == 100 * (400 + 8)
    assert stats.bytes_read == 50 * 400
    assert [(s.name, s.samples) for s in stats.stages] == [
        ("source", 50),
        ("cache", 100),
        ("same", 100),
    ]
    assert 0 < stats.wait <= stats.elapsed
    assert 0 < stats.stall <= 1
    assert stats.pool.kind == "none"
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.samples = 1  # type: ignore[misc]


def test_a_stage_is_charged_only_its_own_time() -> None:
    now = [0.0]
    meter = Meter(["source", "decode", "crop"], 0, lambda: now[0])
    meter.start()
    tally = Tally(3, 0)
    tally.samples[:] = [4, 4, 4]
    tally.seconds[:] = [1.0, 3.5, 4.0]  # each includes the stages above it
    meter.handed_out(0.0, tally.as_list(), (), 0, 0)
    meter.worked(4.0)
    meter.waited(2.0)
    now[0] = 8.0
    stats = meter.snapshot("threads", 2, 0, Held())
    assert [stage.seconds for stage in stats.stages] == [1.0, 2.5, 0.5]
    assert stats.pool.utilisation == 4.0 / 16.0
    assert stats.stall == 0.25


def test_bad_samples_are_all_counted_and_the_last_ones_listed() -> None:
    meter = Meter([], 0, lambda: 0.0)
    for i in range(500):
        meter.bad(BadSample(i, f"n{i}", "decode", "broken"))
    stats = meter.snapshot("none", 0, 0, Held())
    assert stats.bad == 500
    assert [bad.index for bad in stats.bad_samples] == list(range(400, 500))


@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_bar_shows_speed_and_waiting(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    with ps.from_dataset(np.arange(40)).batch(4).loader(workers=0) as loader:
        seen = sum(len(batch) for batch in ps.progress(loader, "training", console=console))
    assert seen == 40
    assert "training" in out.getvalue()
    assert "10/10" in out.getvalue()
    assert "samples/s" in out.getvalue()


def test_a_hung_thread_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, released = threading.Event(), threading.Event()
    # A clock that jumps when a thread hangs, however late that is.
    clock = functools.partial(ThreadPool, clock=lambda: 1000.0 if hangs.is_set() else 0.0)
    monkeypatch.setattr("penstock.engine.pools.choose.ThreadPool", clock)

    def hang(value: Any) -> Any:
        hangs.set()
        released.wait(60)
        return value

    pipeline = ps.from_dataset(np.arange(16.0)).map(hang, random=False).batch(4)
    try:
        with pipeline.loader(workers=2, kind="threads", shuffle=False, timeout=60) as loader:
            with pytest.raises(ps.PenstockError, match=r"(?s)timeout of 60 s.*in hang"):
                list(loader)
            released.set()
    finally:
        released.set()


# Printing


def test_stats_print_as_an_aligned_table() -> None:
    assert repr(FULL).splitlines() == [
        "delivered  1,000 samples in 10 batches, 50.0 KB",
        "read       80.0 KB from the source",
        "speed      100.0 samples/s, 1.0 batches/s, in 10.0 s",
        "waiting    25% of the time, 2.5 s",
        "workers    2 threads, busy 60% of the time",
        "prepared   600 samples here, 300 by helper-1, 100 by helper-2",
        "device     cuda:0, 25% of the samples (25 of 100 tiny-batches); t = -2; spatial; "
        "3.0 MB over the bus, buffers 400.0 KB",
        "cache      400 hits, 600 misses (40% hits); holds 600 samples, 30.0 MB of 40.0 MB",
        "refurbish  700 reused, 300 fresh; keeps 500 samples, 4.0 MB",
        "echo       1,000 delivered from 500 fresh, factor 2 in this epoch",
        "mix        web: 750 samples in this epoch (75.0% by weight), 1.50 passes",
        "           code: 250 samples in this epoch (25.0% by weight), 0.50 passes",
        "retries    1 task run again after a worker died",
        "corrupt    3 damaged values in a cache, prepared again",
        "bad        2 samples skipped or substituted",
        "           cat/7.jpg (index 7) in decode: not a JPEG",
        '           dog/"9" .jpg (index 9) in decode: cut short',
        "",
        "stage   samples  seconds  ms/sample  share",
        "source      600    3.000      5.000    25%",
        "decode    1,000    9.000      9.000    75%",
    ]
    assert str(FULL) == f"{FULL}" == repr(FULL)


def test_stats_without_batches_stages_or_caches_print_too() -> None:
    stats = Meter([], 0, lambda: 0.0).snapshot("none", 0, 0, Held())
    assert repr(stats).splitlines() == [
        "delivered  0 samples in 0 batches",
        "read       0 B from the source",
        "workers    none, the training loop prepares batches, busy 0% of the time",
    ]


def test_several_caches_and_a_node_are_told_apart_in_the_table() -> None:
    caches = (CacheStats(0, 0, 0, 0, 1000, False), CacheStats(1, 1, 1, 1000, 1000, True))
    pool = PoolStats("node", 0, 0.0, 0.0, 2)
    lines = repr(dataclasses.replace(STATS, caches=caches, pool=pool)).splitlines()
    assert "workers    those of the node, 2 restarts" in lines
    assert "cache 1    0 hits, 0 misses; holds 0 samples, 0 B of 1.0 KB" in lines
    assert "cache 2    1 hit, 1 miss (50% hits); holds 1 sample, 1.0 KB of 1.0 KB, full" in lines


def test_a_notebook_shows_stats_as_escaped_html_tables() -> None:
    page = FULL._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert "1,000 samples in 10 batches, 50.0 KB</td>" in page
    assert ">decode</td>" in page
    assert ">75%</td>" in page
    hostile = BadSample(1, "<script>&", "decode", '"</table>"')
    page = dataclasses.replace(STATS, bad=1, bad_samples=(hostile,))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;&amp; (index 1) in decode: &quot;&lt;/table&gt;&quot;" in page


def test_printing_leaves_fields_equality_pickling_and_json_alone() -> None:
    assert dataclasses.replace(FULL) == FULL
    assert FULL != STATS
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert FULL.__slots__ == tuple(field.name for field in dataclasses.fields(FULL))
    assert from_json(to_json(snapshot(FULL))) == snapshot(FULL)
