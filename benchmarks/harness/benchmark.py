"""The description of a benchmark that ``python -m benchmarks`` runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.report import Result


def _no_arguments(parser: ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its ``name``, one ``line`` that says what it measures, and its ``run`` function.

    ``arguments`` adds the options that only this benchmark has. ``needs_data`` makes --data
    required, ``data`` is the help text of --data, and ``files`` lists the suffixes of files that
    --data accepts besides folders. ``peers`` are the names that --peers accepts. ``seconds`` is the
    default of --seconds.
    """

    name: str
    line: str
    run: Callable[[Namespace], Result]
    arguments: Callable[[ArgumentParser], None] = _no_arguments
    needs_data: bool = False
    peers: tuple[str, ...] = ()
    data: str = "folder of classes, each a folder of JPEGs"
    files: tuple[str, ...] = ()
    seconds: float = 4.0
