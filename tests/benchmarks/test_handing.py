"""The benchmark ``handing``: figures of a case, and a real run of one."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import handing


def test_a_row_has_the_medians_without_the_thread_of_the_loop() -> None:
    case = handing.Case(32, 4e-3)
    runs = [(1000, 1.0, 0.001, 0.005), (2000, 1.0, 0.002, 0.006), (3000, 1.0, 0.003, 0.009)]
    assert handing.row_of(case, 12, runs)[1:] == ("0.67", "2.0", "0.40", "1.0", "yes")
    runs = [(1000, 1.0, 0.001, 0.016)]
    assert handing.row_of(case, 12, runs)[1:] == ("0.33", "15.0", "1.50", "1.0", "NO")


def test_a_slow_loop_limits_what_is_ideal() -> None:
    case = handing.Case(32, 4e-3, step=0.02)
    assert handing.row_of(case, 12, [(1600, 1.0, 0.0, 0.0)])[1] == "1.00"


def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "CASES", (handing.Case(4, 1e-4),))
    monkeypatch.setattr(
        handing, "run_alone", lambda call, *args, timeout: Namespace(value=call(*args))
    )
    options = Namespace(workers=1, rounds=1, side=4, warm_up=0.05, seconds=0.05)
    result = handing.run(options)
    assert result.wrong == ()
    ((samples, elapsed, loop, whole),) = next(iter(result.data.values()))
    assert samples > 0
    assert elapsed >= 0.05
    assert loop >= 0.0
    assert whole >= 0.0
