"""Reports of ranks on several machines: who makes the job wait, and what for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock import cli
from penstock.commands import analyze as command
from penstock.diagnose.analyze.combine import combine, missing
from penstock.diagnose.analyze.page import page_of
from penstock.diagnose.analyze.report import AnalysisReport, PhaseName, Wait
from penstock.diagnose.analyze.stalls import own_stalls, rank_speeds, slowest, stalls_of
from penstock.diagnose.analyze.text import lines_of
from penstock.errors import ReportError
from tests.support.reports import report

BATCH = 64


def rank(number: int, host: str, *, cached: float, cold: float, **more: object) -> AnalysisReport:
    """A rank of a job of four that exchange gradients, so all have the phases of the slowest.

    ``cached``, ``cold``: seconds per sample that its own loop waited for its loader.
    """
    phases: list[tuple[PhaseName, float]] = [("replay", 0.0), ("cached", cached), ("cold", cold)]
    waits = [Wait(0.0, name, BATCH * wait, 0.03) for name, wait in phases for _ in range(8)]
    made = report(rank=number, world=4, **more)
    return replace(made, host=host, waits=tuple(waits))


def slow_storage() -> list[AnalysisReport]:
    """Both ranks of gpu-2 wait for storage. The phases say: replay 2,000, cold 900 samples/s."""
    return [
        rank(0, "gpu-1", cached=0.0, cold=0.0, storage=1e9),
        rank(1, "gpu-1", cached=0.0, cold=0.0, storage=1e9),
        rank(2, "gpu-2", cached=0.0, cold=0.0004),
        rank(3, "gpu-2", cached=0.0, cold=0.0005),
    ]


def test_one_rank_s_stall_is_not_taken_for_another_s() -> None:
    fast, *_, slow = slow_storage()
    # Their phases are equally slow, so the phases alone blame both.
    assert stalls_of(fast) == stalls_of(slow)
    own, others = own_stalls(fast)
    assert (own.prep, own.fetch, own.bound) == (0.0, 0.0, "compute")
    assert others == pytest.approx(1 / 900 - 1 / 2_000)
    own, others = own_stalls(slow)
    assert own.fetch == pytest.approx(0.0005)
    assert own.bound == "fetch"
    assert others == pytest.approx(1 / 900 - 1 / 2_000 - 0.0005)


def test_the_slowest_rank_and_machine_are_named_with_their_bottleneck() -> None:
    job = combine(slow_storage())
    assert (job.setup.rank, job.host) == (3, "gpu-2")
    lines = lines_of(job)
    assert lines[0].startswith("fetch-bound: ")
    assert (
        "These figures are of rank 3 on gpu-2, the slowest of 4 ranks on 2 machines: the others "
        "wait for it." in lines
    )
    text = "\n".join(lines)
    assert (
        "Rank 3 on gpu-2 is the slowest: the others wait for it. All ranks on gpu-2 are slower "
        "than those on other machines." in text
    )
    (first,) = [line for line in lines if line.strip().startswith("0  gpu-1")]
    assert first.split()[-1] == "compute"
    assert "55 %" in first  # of its time it waits for other ranks
    page = page_of(job)
    assert "the slowest of 4 ranks on 2 machines" in page
    assert "3 (slowest)" in page
    assert "<td>gpu-2</td>" in page


@pytest.mark.parametrize("number", range(4))
def test_every_rank_is_there_once_whichever_is_the_slowest(number: int) -> None:
    fast = [rank(one, "gpu", cached=0.0, cold=0.0, storage=1e9) for one in range(4)]
    ranks = [*fast[:number], rank(number, "gpu", cached=0.0, cold=0.0005), *fast[number + 1 :]]
    joined = combine(ranks)
    assert joined.setup.rank == number
    assert [one.setup.rank for one in joined.ranks] == [one for one in range(4) if one != number]


def test_of_two_bottlenecks_the_one_that_costs_more_time_is_named() -> None:
    ranks = [
        rank(0, "gpu-1", cached=0.0, cold=0.0),
        rank(1, "gpu-1", cached=0.0003, cold=0.0003),
        rank(2, "gpu-2", cached=0.0, cold=0.0005),
        rank(3, "gpu-2", cached=0.0, cold=0.0),
    ]
    last = slowest(rank_speeds(combine(ranks)))
    assert last is not None
    assert (last.report.setup.rank, last.stalls.bound) == (2, "fetch")
    assert "All ranks on" not in "\n".join(lines_of(combine(ranks)))


def test_equal_ranks_on_two_machines_name_none() -> None:
    ranks = [rank(number, f"gpu-{number // 2}", cached=0.0, cold=0.0005) for number in range(4)]
    job = combine(ranks)
    assert job.setup.rank == 0
    assert "No rank is slower than the others." in lines_of(job)


def test_combining_does_not_depend_on_how_the_ranks_are_distributed_over_files() -> None:
    ranks = slow_storage()
    halves = [combine(ranks[:2]), combine(ranks[2:])]
    assert combine(halves) == combine(reversed(ranks)) == combine([*halves, combine(ranks)])


def test_missing_ranks_are_noted() -> None:
    half = combine(slow_storage()[:2])
    assert missing([half]) == [2, 3]
    assert half.notes[-1] == "no report of the ranks 2 to 3. 2 of 4 ranks have a report."
    assert missing([combine(slow_storage())]) == []
    assert combine(slow_storage()).notes == ()


def test_reports_of_two_runs_are_refused() -> None:
    ranks = slow_storage()
    again = replace(ranks[0], made="2025-01-02T12:00:00")
    with pytest.raises(ReportError, match="rank 0 has two reports: one of gpu-1 at 2025-01-01"):
        combine([*ranks, again])
    with pytest.raises(ReportError, match="jobs with 1 and 4 ranks"):
        combine([report(rank=9, world=1), *ranks])


# The command.


def test_the_reports_in_a_directory_are_combined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    ranks = slow_storage()
    combine(ranks[:2]).save(place / "report-gpu-1.json")
    combine(ranks[2:]).save(place / "report-gpu-2.json")
    (place / "other.json").write_text("{}")
    output = tmp_path / "job"
    assert cli.main(["analyze", "--output", str(output), "--combine", str(place)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fetch-bound: ")
    assert "rank 3 on gpu-2" in out
    assert AnalysisReport.load(tmp_path / "job.json") == combine(ranks)
    assert "gpu-2" in (tmp_path / "job.html").read_text()


def test_nothing_to_combine_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", "--combine", str(tmp_path)]) == 1
    assert "there is no report in" in capsys.readouterr().err


def test_machines_of_one_name_do_not_overwrite_each_others_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [replace(one, host="box") for one in slow_storage()]
    for part in (ranks[:2], ranks[2:]):
        monkeypatch.setattr(command, "_load_reports", lambda _, part=part: part)
        given = ["--seconds", "1", "--output", str(tmp_path / "report"), "--", "true"]
        assert cli.main(["analyze", *given]) == 0
        assert "This is a part of the job: 2 of 4 ranks" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "report-box-rank0.json",
        "report-box-rank2.json",
    ]
