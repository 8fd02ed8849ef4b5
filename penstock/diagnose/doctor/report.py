"""Findings of the checks, and the report on them for a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from penstock.diagnose.doctor.facts import Facts


class Level(enum.IntEnum):
    """How much a finding matters."""

    OK = 0
    NOTE = 1  # worth knowing; nothing has to be done
    WARNING = 2  # costs speed or memory, or breaks a feature that not every run uses
    PROBLEM = 3  # breaks a plain training run

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Fix:
    """How to fix a finding, with a command or setting to paste if there is one."""

    how: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a short ``text``, an explanation (``why``), a list (``details``)."""

    level: Level
    topic: str
    name: str
    text: str
    why: str = ""
    details: tuple[str, ...] = ()
    remedies: tuple[Fix, ...] = ()


_STYLES = {
    Level.OK: "green",
    Level.NOTE: "blue",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}
_SIGNS = {Level.OK: "✓", Level.NOTE: "•", Level.WARNING: "!", Level.PROBLEM: "✗"}
_PLAIN_SIGNS = {Level.OK: "+", Level.NOTE: "-", Level.WARNING: "!", Level.PROBLEM: "x"}
_INDENT = 5


def worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.OK)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print one line for each finding, with its explanation and fixes indented below."""
    width = max((len(finding.name) for finding in findings), default=0)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            console.print(Text(topic, style="bold"))
        _show_finding(finding, width, console)
    console.print()
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> Text:
    counts = [
        Text(f"{count} {level.word}{'' if count == 1 else 's'}", style=_STYLES[level])
        for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
        if (count := sum(finding.level is level for finding in findings))
    ]
    if not counts:
        return Text("No problems found.", style="green")
    text = Text(", ").join(counts)
    if worst(findings) is Level.NOTE:
        text.append(": nothing has to be done.", style="")
    return text


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Findings and facts as JSON, for programs and bug reports."""
    return json.dumps(
        {
            "penstock": facts.penstock,
            "level": worst(findings).word,
            "findings": [
                {**dataclasses.asdict(finding), "level": finding.level.word} for finding in findings
            ],
            "facts": dataclasses.asdict(facts),
        },
        indent=2,
    )


def _show_finding(finding: Finding, width: int, console: Console) -> None:
    plain = console.options.ascii_only
    style = _STYLES[finding.level]
    sign = (_PLAIN_SIGNS if plain else _SIGNS)[finding.level]
    start = Text("  ").append(sign, style=style).append(f"  {finding.name:{width}}  ")
    _print_hanging(
        start, Text(finding.text, style="" if finding.level is Level.OK else style), console
    )
    indent = Text(" " * _INDENT)
    if finding.why:
        _print_hanging(indent, Text(finding.why, style="dim"), console)
    for detail in finding.details:
        _print_whole(indent + Text(detail, style="dim"), console)
    for fix in finding.remedies:
        _show_fix(fix, indent + Text("-> " if plain else "→ ", style="cyan"), console)


def _show_fix(fix: Fix, start: Text, console: Console) -> None:
    command = Text(fix.command, style="cyan")
    how = Text(fix.how)
    if fix.command and start.cell_len + how.cell_len + 1 + command.cell_len <= console.width:
        console.print(start + how + Text(" ") + command)
        return
    _print_hanging(start, how, console)
    if fix.command:
        _print_whole(Text(" " * start.cell_len) + command, console)


def _print_hanging(start: Text, text: Text, console: Console) -> None:
    """Print text wrapped at words, its later lines indented below the first."""
    for line in text.wrap(console, max(20, console.width - start.cell_len)):
        line.rstrip()
        console.print(start + line)
        start = Text(" " * start.cell_len)


def _print_whole(text: Text, console: Console) -> None:
    # A command or path with line breaks cannot be pasted. A terminal's own wrapping does not add
    # line breaks when the text is copied.
    console.print(text, soft_wrap=True)
