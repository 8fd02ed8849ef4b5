"""The report of the doctor, in a terminal and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.diagnose.doctor.checks import check
from penstock.diagnose.doctor.facts import Facts, Leftovers
from penstock.diagnose.doctor.report import Finding, Fix, Level, as_json, show, summary, worst

COMMAND = "sudo mount -o remount,size=29G /dev/shm && echo a command longer than the terminal"


def finding(level: Level, **more: object) -> Finding:
    return Finding(level, "Memory", "shared memory", "64.0 MB", **more)  # type: ignore[arg-type]


def shown(findings: list[Finding], width: int = 80, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    show(findings, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def test_a_finding_is_one_line_with_its_fix_below() -> None:
    found = finding(Level.WARNING, remedies=(Fix("start the container with", "docker run"),))
    assert shown([found]) == [
        "Memory",
        "  !  shared memory  64.0 MB",
        "     → start the container with docker run",
        "",
        "1 warning",
    ]


def test_a_command_is_never_broken_into_lines() -> None:
    found = finding(Level.WARNING, remedies=(Fix("make it larger:", COMMAND),))
    assert f"       {COMMAND}" in shown([found], width=60)


def test_details_are_never_broken_into_lines() -> None:
    path = "/dev/shm/" + "x" * 100
    assert f"     {path}" in shown([finding(Level.WARNING, details=(path,))])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_words_stay_within_the_terminal(sound: Facts, width: int) -> None:
    why = "Memory caches move to the temporary directory. " * 4
    findings = [*check(sound), finding(Level.NOTE, why=why)]
    assert max(map(len, shown(findings, width))) <= width


def test_no_line_ends_in_blanks(sound: Facts) -> None:
    assert [line for line in shown(check(sound)) if line != line.rstrip()] == []


def test_a_terminal_without_unicode_gets_plain_signs() -> None:
    levels = [finding(level, remedies=(Fix("do it"),)) for level in Level]
    lines = shown(levels, encoding="ascii")
    assert [line[2] for line in lines if line.startswith("  ") and line[2] != " "] == list("+-!x")
    assert "     -> do it" in lines


def test_square_brackets_are_not_read_as_markup() -> None:
    fix = Fix("install it:", 'pip install "penstock[image]"')
    assert '     → install it: pip install "penstock[image]"' in shown(
        [finding(Level.NOTE, remedies=(fix,), why="[bold]")]
    )


def test_the_summary_counts_what_matters() -> None:
    many = [finding(level) for level in (Level.PROBLEM, Level.WARNING, Level.WARNING, Level.OK)]
    assert str(summary(many)) == "1 problem, 2 warnings"
    assert str(summary([finding(Level.NOTE)])) == "1 note: nothing has to be done."
    assert str(summary([finding(Level.OK)])) == "No problems found."


def test_the_worst_level_is_that_of_the_worst_finding() -> None:
    assert worst([finding(Level.NOTE), finding(Level.WARNING)]) is Level.WARNING
    assert worst([]) is Level.OK


def test_json_has_the_findings_and_the_facts(sound: Facts) -> None:
    left = Leftovers("/dev/shm/p", found=(("/dev/shm/p/run-1", 12),))
    facts = replace(sound, leftovers=left)
    report = json.loads(as_json(facts, check(facts)))
    assert (report["penstock"], report["level"]) == ("0.1.0", "warning")
    assert report["facts"]["cores"] == {"usable": 16, "mask": 16, "machine": 16}
    bad = [finding for finding in report["findings"] if finding["level"] != "ok"]
    assert [finding["remedies"] for finding in bad] == [
        [{"how": "remove them:", "command": "penstock doctor --fix"}]
    ]
