"""Reports of machines: whom to ask while a user watches, and malformed answers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cluster.survey import (
    AT_ONCE,
    EVERY,
    OLD,
    WATCHED,
    CacheReport,
    MachineReport,
    Survey,
    report_of,
)

REPORT = MachineReport(8, 2.5, 10, 20, (CacheReport("c", 1, 2, 3, False, 4, 5, 6, 7, 8),))


def test_machines_are_asked_only_while_somebody_watches() -> None:
    survey = Survey()
    assert survey.due(["b"], 0.0) == []
    survey.watched(0.0)
    asked = [survey.due(["b"], 0.5 * step) for step in range(40)]
    assert sum(map(len, asked)) == WATCHED / EVERY
    assert asked[-1] == []


def test_in_a_large_cluster_machines_take_turns() -> None:
    survey = Survey()
    names = [f"m{number}" for number in range(3 * AT_ONCE)]
    asked: list[str] = []
    for step in range(3):
        survey.watched(step * EVERY)
        found = survey.due(names, step * EVERY)
        assert len(found) == AT_ONCE
        asked += found
    assert sorted(asked) == sorted(names)


def test_an_old_report_is_not_shown() -> None:
    survey = Survey()
    survey.reported("b", REPORT, 10.0)
    assert survey.of("b", 12.0) == (2.0, REPORT)
    assert survey.of("b", 10.0 + OLD + 1) is None
    assert survey.of("c", 10.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"cores": "8"},
        {"idle_cores": float("nan")},
        {"sent": -1},
        {"sent": 2**70},
        {"caches": "none"},
        {"caches": [{"content": "c"}]},
        {"caches": [{}] * 1_000},
        {"caches": [7]},
    ],
    ids=str,
)
def test_a_malformed_report_is_ignored(change: dict[str, Any]) -> None:
    assert report_of(REPORT.as_dict()) == REPORT
    assert report_of({**REPORT.as_dict(), **change}) is None


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert report_of({**REPORT.as_dict(), "accelerators": 4}) == REPORT
