"""The benchmark ``soak``: its schedule, its judgements, and a short one with real processes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main, parse
from benchmarks.faults.member import EpochOutcome
from benchmarks.faults.verdict import Verdict
from benchmarks.soak.courses import make_courses
from benchmarks.soak.flatness import FEWEST, flatness
from benchmarks.soak.job import bad_defects
from benchmarks.soak.schedule import (
    DISTURBANCES,
    KINDS,
    NODE_PAUSE,
    SHORTEST_PAUSE,
    disturbances,
    job_choice,
)
from benchmarks.soak.soak import make_result
from benchmarks.soak.supervisor import SoakReport, SoakSettings

COURSES = ("threads", "disk", "ranks")


# The schedule.


@given(seed=st.integers(0, 2**32), seconds=st.floats(0.0, 300.0))
def test_a_schedule_is_a_function_of_its_seed(seed: int, seconds: float) -> None:
    events = disturbances(seed, seconds)
    assert events == disturbances(seed, seconds)
    times = [event.at for event in events]
    pauses = [later - sooner for sooner, later in pairwise(times)]
    # Differences of sums are rounded.
    assert min(pauses, default=SHORTEST_PAUSE) > SHORTEST_PAUSE - 1e-6
    assert all(0 < at < seconds for at in times)
    assert all(0 <= event.pick < 1 for event in events)


def test_an_hour_has_events_of_every_kind() -> None:
    events = disturbances(0, 3600.0)
    assert {event.kind for event in events} == set(DISTURBANCES)
    assert 1000 < len(events) < 2000


def test_the_node_is_killed_in_the_first_half_only() -> None:
    kills = [event.at for event in disturbances(3, 1000.0) if event.kind == "kill-node"]
    assert len(kills) > 5
    assert max(kills) < 500
    assert min(later - sooner for sooner, later in pairwise(kills)) >= NODE_PAUSE


@given(without=st.sets(st.sampled_from(DISTURBANCES)))
def test_kinds_that_are_left_out_do_not_happen(without: set[str]) -> None:
    assert not {event.kind for event in disturbances(0, 100.0, without)} & without


@given(seed=st.integers(0, 2**32), number=st.integers(0, 10_000))
def test_jobs_are_a_function_of_seed_and_number(seed: int, number: int) -> None:
    choice = job_choice(seed, number, COURSES)
    assert choice == job_choice(seed, number, COURSES)
    assert choice.course in COURSES
    assert job_choice(seed, number, COURSES, {"hold"}).hold == 0


def test_courses_that_are_left_out_are_not_made(tmp_path: Path) -> None:
    assert {"crash", "hang", "ranks"} <= set(make_courses(tmp_path))
    (tmp_path / "again").mkdir()
    rest = make_courses(tmp_path / "again", {"crash", "ranks"})
    assert "crash" not in rest
    assert "ranks" not in rest
    assert "hang" in rest


# Bad samples.


def outcomes(*bad: tuple[int, ...]) -> list[EpochOutcome]:
    return [EpochOutcome(epoch, listed, 0) for epoch, listed in enumerate(bad)]


def test_a_bad_sample_must_be_listed_and_no_other() -> None:
    assert bad_defects(outcomes((7,)), {7}, resumed=False) == []
    assert bad_defects(outcomes(()), set(), resumed=False) == []
    assert bad_defects(outcomes(()), {7}, resumed=False) != []
    assert bad_defects(outcomes((7, 8)), {7}, resumed=False) != []
    assert bad_defects(outcomes((8,)), set(), resumed=True) != []


def test_a_job_that_resumed_may_have_met_its_bad_sample_before() -> None:
    assert bad_defects(outcomes(()), {7}, resumed=True) == []
    assert bad_defects(outcomes((), ()), {7}, resumed=True) != []


# Growth.


def test_noise_is_flat_and_a_leak_is_not() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(100.0, 5.0, 400)
    still, leak = flatness(noise, 20.0), flatness(noise + np.arange(400), 20.0)
    assert still is not None
    assert leak is not None
    assert not still.grows
    assert leak.grows


def test_growth_at_the_start_does_not_count() -> None:
    warming = [*np.arange(200.0), *[200.0] * 200]
    found = flatness(warming, 20.0)
    assert found is not None
    assert not found.grows


def test_one_peak_at_the_end_is_no_growth() -> None:
    found = flatness([*[100.0] * 373, *[125.0] * 27], 20.0)
    assert found is not None
    assert found.end - found.begin == 25.0
    assert not found.grows


def test_a_short_series_is_not_judged() -> None:
    assert flatness([1.0] * (2 * FEWEST - 2), 1.0) is None


# The result.


def test_a_soak_without_defects_is_valid() -> None:
    result = make_result(SoakReport(Verdict(800), batches=100), SoakSettings(60.0, seed=7))
    assert result.wrong == ()
    assert ("batches judged", "100") in result.tables[0].rows


def test_every_defect_is_reported_with_the_seed() -> None:
    report = SoakReport(defects=["job-1 hung"], hung=1, kept="/somewhere")
    result = make_result(report, SoakSettings(60.0, seed=7))
    assert result.wrong == ("soak: job-1 hung", "soak: seed 7; logs are in /somewhere")


def test_an_unknown_kind_of_event_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["soak", "--without", "kill,flood"])
    assert "there is no event 'flood'" in capsys.readouterr().err


def test_a_soak_takes_an_hour_unless_it_is_told_otherwise() -> None:
    assert parse(["soak"])[1].seconds == 3600.0
    assert parse(["soak", "--seconds", "20"])[1].seconds == 20.0


# Real processes.


def test_a_short_soak_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A few harmless events: what is tested here is the supervisor.
    left_out = ",".join(kind for kind in KINDS if kind not in ("leave", "pause", "resume"))
    kept = tmp_path / "soak.json"
    ended = main(
        [
            *["soak", "--seed", "5", "--jobs", "2", "--events", "3", "--hang", "600"],
            *["--without", left_out, "--json", str(kept)],
        ]
    )
    assert ended == 0, capsys.readouterr().out
    data = json.loads(kept.read_text())["data"]["soak"]
    assert sum(data["counts"].values()) == 3
    assert data["jobs"] >= 2
    assert data["batches"] > 0
    verdict = data["verdict"]
    assert (verdict["lost"], verdict["repeated"], verdict["different"]) == (0, 0, 0)
