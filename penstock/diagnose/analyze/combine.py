"""Combines the reports of several ranks, on one machine or several, into that of the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.stalls import all_ranks, rank_speeds, slowest
from penstock.errors import ReportError


def combine(reports: Iterable[AnalysisReport]) -> AnalysisReport:
    """The report of the slowest rank, with those of the other ranks, which wait for it.

    Each report may contain several ranks. Raises ``ReportError`` if they are not of one job.
    """
    found: dict[int, AnalysisReport] = {}
    for report in reports:
        for rank in all_ranks(report):
            one = replace(rank, ranks=(), notes=_without_missing(rank.notes))
            before = found.setdefault(one.setup.rank, one)
            if before != one:
                raise ReportError(
                    f"rank {one.setup.rank} has two reports: one of {_origin(before)} and one of "
                    f"{_origin(one)}. Give the reports of one run only."
                )
    ranks = [found[number] for number in sorted(found)]
    worlds = sorted({rank.setup.world for rank in ranks})
    if len(worlds) > 1:
        raise ReportError(
            f"the reports are of jobs with {' and '.join(map(str, worlds))} ranks. Give the "
            "reports of one run only."
        )
    first = replace(ranks[0], ranks=tuple(ranks[1:]))
    last = slowest(rank_speeds(first)) if len(ranks) > 1 else None
    chosen = ranks[0] if last is None else found[last.report.setup.rank]
    others = tuple(rank for rank in ranks if rank is not chosen)
    notes = chosen.notes
    absent = missing(ranks)
    if absent:
        notes += (f"{MISSING}{ranges(absent)}. {len(ranks)} of {worlds[0]} ranks have a report.",)
    return replace(chosen, ranks=others, notes=notes)


MISSING = "no report of the ranks "


def _without_missing(notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(note for note in notes if not note.startswith(MISSING))


def _origin(report: AnalysisReport) -> str:
    return f"{report.host or 'an unknown machine'} at {report.made or 'an unknown time'}"


def missing(reports: Iterable[AnalysisReport]) -> list[int]:
    """Ranks of the job that have no report here."""
    ranks = [rank for report in reports for rank in all_ranks(report)]
    world = max((rank.setup.world for rank in ranks), default=0)
    return sorted(set(range(world)) - {rank.setup.rank for rank in ranks})


def ranges(numbers: list[int]) -> str:
    """Numbers in words, with ranges.

    >>> ranges([0, 1, 2, 5]), ranges([3])
    ('0 to 2, 5', '3')
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts
    )


def load_reports(paths: Iterable[Path]) -> Mapping[Path, AnalysisReport]:
    """The reports in these files, and in all ``.json`` files of these directories.

    Other files in a directory are left out. Raises ``ReportError`` if there is no report at all.
    """
    found: dict[Path, AnalysisReport] = {}
    given = list(paths)
    for path in given:
        if not path.is_dir():
            found[path] = AnalysisReport.load(path)
            continue
        for file in sorted(path.glob("*.json")):
            try:
                found[file] = AnalysisReport.load(file)
            except ReportError:
                continue
    if not found:
        raise ReportError(
            f"there is no report in {', '.join(map(str, given))}. `penstock analyze` writes one on "
            "every machine; copy them into one directory."
        )
    return found
