"""The benchmark ``wide``: sleeps in place of the kernel's work, and what is computed from them."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from benchmarks.wide.wide import WideRun, bare_threads, make_result, sleep_in_python
from penstock import native


def test_bare_threads_sleep_all_at_once() -> None:
    slept: list[tuple[float, float]] = []

    def sleep(nap: float, seconds: float) -> int:
        slept.append((nap, seconds))
        return 10

    rate, cpu = bare_threads(3, 0.5, 2.0, sleep)
    assert slept == [(0.5, 2.0)] * 3
    assert rate > 0
    assert cpu >= 0


def test_naps_are_counted_in_python_and_in_the_kernel() -> None:
    assert sleep_in_python(0.01, 0.05) in range(1, 6)
    if native.kernel_available():
        assert native.kernel().count_naps(0.01, 0.05) in range(1, 6)


@pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())
def test_the_queue_sleeps_instead_of_preparing_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"not even a picture")
    pipeline = ps.from_files([tmp_path / "a.jpg"] * 4).map(ps.image.decode())
    pipeline = pipeline.map(ps.image.random_resized_crop(8)).batch(4)
    native.kernel().nap(1e-3)
    try:
        with pipeline.loader(workers=2, kind="threads") as loader:
            assert [batch.shape for batch in loader] == [(4, 8, 8, 3)]
            assert loader.stats().pool.busy >= 4e-3
    finally:
        native.kernel().nap(0)


def test_goals_are_compared_with_the_median_share() -> None:
    runs = {"uint8": {32: [WideRun(80.0, 100.0, 5e-6, 1e-6), WideRun(90.0, 100.0, 7e-6, 1e-6)]}}
    result = make_result(runs, {"uint8": 1e-3}, (), rounds=2)
    ((workers, rate, ideal, share, goal, cpu, loop),) = result.tables[0].rows
    assert (workers, rate, ideal) == ("32", "85", "100")
    assert share == "0.85 (0.80 to 0.90)"
    assert goal == "0.85: reached"
    assert (cpu, loop) == ("6.0", "1.0")
    assert "1000 us" in result.notes[0]
