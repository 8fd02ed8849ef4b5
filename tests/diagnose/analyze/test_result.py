"""A result whose parts contradict each other is found out before anybody sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.analyze.report import Interval, Rate
from penstock.diagnose.analyze.result import (
    Forecasts,
    LoaderRates,
    Result,
    Shares,
    Trust,
    Verdict,
    broken_rules,
)


def rate(value: float, spread: float = 0.02) -> Rate:
    return Rate(value, value * (1 - spread), value * (1 + spread))


def share(value: float) -> Interval:
    return Interval(value, max(0.0, value - 0.01), value + 0.01)


COMPUTE = Result(
    Verdict("compute", "the loop waits 1 % of the time"),
    LoaderRates(G=rate(100), P=rate(300), F=rate(900), C=rate(9_000), S=rate(900)),
    Trust(rate(99), 100.0, 0.03),
    Shares(share(0.01), share(0.0), share(0.02)),
    forecasts=Forecasts(((1, 99.0), (2, 99.0)), ((1, 99.0), (2, 60.0)), most=100.0),
)


def test_a_consistent_result_breaks_no_rule() -> None:
    assert broken_rules(COMPUTE) == ()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # The verdict of the issue: fetch-bound beside G 8 (2 to inf), S 1,159.
        (
            replace(
                COMPUTE,
                verdict=Verdict("fetch", "x"),
                rates=LoaderRates(G=rate(8), P=rate(267), S=rate(1_159)),
            ),
            "waited only 1 %",
        ),
        (replace(COMPUTE, rates=replace(COMPUTE.rates, P=rate(103))), "not above G"),
        (replace(COMPUTE, shares=Shares(share(0.2), share(0.0), share(0.0))), "waited 20 %"),
        (replace(COMPUTE, shares=Shares(share(0.0), share(0.0), share(0.2))), "step longer"),
        (replace(COMPUTE, rates=replace(COMPUTE.rates, C=rate(100), S=rate(900))), "memory (C"),
        (replace(COMPUTE, forecasts=Forecasts(cores=((1, 99.0), (2, 90.0)))), "2 cores"),
        (replace(COMPUTE, forecasts=Forecasts(jobs=((1, 60.0), (2, 90.0)))), "each of 2 jobs"),
        (replace(COMPUTE, forecasts=Forecasts(cores=((1, 500.0),), most=100.0)), "accelerator"),
        (replace(COMPUTE, rates=LoaderRates(G=None, P=rate(300))), "not measured"),
        (
            replace(
                COMPUTE,
                verdict=Verdict("prep", "x"),
                shares=Shares(share(0.1), share(0.3), share(0.0)),
            ),
            "longer for storage",
        ),
        (
            replace(COMPUTE, verdict=Verdict("contention", "x"), shares=Shares(*[share(0.0)] * 3)),
            "may be as fast",
        ),
    ],
)
def test_each_contradiction_is_found(changed: Result, words: str) -> None:
    broken = broken_rules(changed)
    assert any(words in line for line in broken), broken


def test_a_verdict_without_a_bottleneck_says_why() -> None:
    with pytest.raises(ValueError, match="either"):
        Verdict(None)
    with pytest.raises(ValueError, match="either"):
        Verdict("prep", refusal="not enough steps")
