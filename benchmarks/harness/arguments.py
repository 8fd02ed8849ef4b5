"""The kinds of arguments that benchmarks take, with what is said of wrong ones."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from benchmarks.harness.chart import SUFFIXES


def count(text: str) -> int:
    """Counts something."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def positive(text: str) -> float:
    """Seconds, or a ratio."""
    value = _number(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def drawing(text: str) -> Path:
    """A file to draw into."""
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise ArgumentTypeError(f"{text!r} ends in none of {', '.join(SUFFIXES)}")
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
