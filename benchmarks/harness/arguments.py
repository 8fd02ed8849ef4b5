"""Argument types of the benchmarks' command lines, with their error messages."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from benchmarks.harness.chart import SUFFIXES


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """A number above 0: seconds, or a ratio."""
    value = _number(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """A number between 0 and 1, both excluded."""
    value = _number(text)
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def drawing(text: str) -> Path:
    """The path of a chart to write, by its suffix SVG or PNG."""
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise ArgumentTypeError(f"{text!r} must end in one of {', '.join(SUFFIXES)}")
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
