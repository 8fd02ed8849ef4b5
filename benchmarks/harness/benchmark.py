"""What a benchmark is: a name, a line that says what it measures, its arguments, and a function."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.report import Found


def _nothing_more(parser: ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Benchmark:
    """``arguments`` adds what only this one takes; ``needs_data`` makes --data required, ``data``
    says what that is, and ``files`` how files end that may be given for it instead of a folder;
    ``peers`` are the names that --peers takes."""

    name: str
    line: str
    run: Callable[[Namespace], Found]
    arguments: Callable[[ArgumentParser], None] = _nothing_more
    needs_data: bool = False
    peers: tuple[str, ...] = ()
    data: str = "folder of classes, each a folder of JPEGs"
    files: tuple[str, ...] = ()
