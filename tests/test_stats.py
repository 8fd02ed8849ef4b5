"""What a loader says of itself: counts that add up, time where it was spent."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import penstock as ps
from penstock.stats import BadSample, Held, Meter, Tally


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


def test_a_stage_is_charged_its_own_time_only() -> None:
    now = [0.0]
    meter = Meter(["source", "decode", "crop"], 0, lambda: now[0])
    meter.start()
    tally = Tally(3, 0)
    tally.samples[:] = [4, 4, 4]
    tally.seconds[:] = [1.0, 3.5, 4.0]  # each with all that is above it
    meter.add(tally.as_list())
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


def hang(value: Any) -> Any:
    import time

    if value == 5:
        time.sleep(3)
    return value


def test_a_hung_thread_is_named_with_its_stack() -> None:
    pipeline = ps.from_dataset(np.arange(16.0)).map(hang, random=False).batch(4)
    with (
        pipeline.loader(workers=2, kind="threads", shuffle=False, timeout=0.3) as loader,
        pytest.raises(ps.PenstockError, match=r"(?s)more than 0.3 s.*in hang"),
    ):
        list(loader)
