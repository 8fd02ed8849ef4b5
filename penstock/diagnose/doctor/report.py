"""Findings as people read them in a terminal, and as machines do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from penstock.diagnose.doctor.facts import Facts
from penstock.diagnose.doctor.finding import Finding, Level, Remedy

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
    """One line for each finding, what explains and remedies it indented below."""
    width = max((len(finding.name) for finding in findings), default=0)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            console.print(Text(topic, style="bold"))
        _show_one(finding, width, console)
    console.print()
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> Text:
    counts = [
        Text(f"{count} {level.word}{'' if count == 1 else 's'}", style=_STYLES[level])
        for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
        if (count := sum(finding.level is level for finding in findings))
    ]
    if not counts:
        return Text("Everything is as it should be.", style="green")
    text = Text(", ").join(counts)
    if worst(findings) is Level.NOTE:
        text.append(": nothing has to be done.", style="")
    return text


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """The same for machines; the facts are what a report of a bug should carry."""
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


def _show_one(finding: Finding, width: int, console: Console) -> None:
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
    for remedy in finding.remedies:
        _show_remedy(remedy, indent + Text("-> " if plain else "→ ", style="cyan"), console)


def _show_remedy(remedy: Remedy, start: Text, console: Console) -> None:
    command = Text(remedy.command, style="cyan")
    how = Text(remedy.how)
    if remedy.command and start.cell_len + how.cell_len + 1 + command.cell_len <= console.width:
        console.print(start + how + Text(" ") + command)
        return
    _print_hanging(start, how, console)
    if remedy.command:
        _print_whole(Text(" " * start.cell_len) + command, console)


def _print_hanging(start: Text, text: Text, console: Console) -> None:
    """Text wrapped at words, its later lines below its first."""
    for line in text.wrap(console, max(20, console.width - start.cell_len)):
        line.rstrip()
        console.print(start + line)
        start = Text(" " * start.cell_len)


def _print_whole(text: Text, console: Console) -> None:
    # Broken into lines by us, a command or a path could not be pasted; the terminal's own
    # wrapping is undone when it is copied.
    console.print(text, soft_wrap=True)
