"""Checks of the arguments of operations. Each function returns the value in its normal form."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from penstock.errors import PipelineError


def as_sequence(value: Any) -> Sequence[Any] | None:
    """The value if it is a sequence, else ``None``. A string does not count as a sequence."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None


def integer(name: str, argument: str, value: Any, *, least: int) -> int:
    """An integer of at least ``least``. Bools and floats are rejected."""
    try:
        if isinstance(value, bool):
            raise TypeError
        checked = operator.index(value)
    except TypeError:
        checked = least - 1
    if checked < least:
        raise PipelineError(
            f"{name}: {argument} is {value!r}; give a whole number of {least} or more."
        )
    return checked


def image_size(name: str, value: SupportsIndex | Sequence[int]) -> tuple[int, int]:
    """A size as (height, width). One number means a square."""
    pair = as_sequence(value)
    if pair is None:
        side = integer(name, "size", value, least=1)
        return side, side
    if len(pair) != 2:
        raise PipelineError(f"{name}: size is {value!r}; give one number, or (height, width).")
    return integer(name, "height", pair[0], least=1), integer(name, "width", pair[1], least=1)


def number(name: str, argument: str, value: Any, low: float, high: float) -> float:
    """A finite number from ``low`` to ``high``."""
    try:
        checked = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        checked = math.nan
    if not (math.isfinite(checked) and low <= checked <= high):
        raise PipelineError(f"{name}: {argument} is {value!r}; give a number {_span(low, high)}.")
    return checked


def interval(name: str, argument: str, value: Any, low: float, high: float) -> tuple[float, float]:
    """A pair (from, to) with from <= to, both within ``low`` to ``high``."""
    pair = as_sequence(value)
    if pair is None or len(pair) != 2:
        raise PipelineError(f"{name}: {argument} is {value!r}; give a pair (from, to).")
    first = number(name, argument, pair[0], low, high)
    last = number(name, argument, pair[1], low, high)
    if first > last:
        raise PipelineError(f"{name}: {argument} is {value!r}; give the smaller number first.")
    return first, last


def positive_interval(name: str, argument: str, value: Any, high: float) -> tuple[float, float]:
    """A pair (from, to), both above 0 and at most ``high``."""
    pair = interval(name, argument, value, 0.0, high)
    if pair[0] == 0.0:
        raise PipelineError(f"{name}: {argument} is {value!r}; give numbers above 0.")
    return pair


def choice(name: str, argument: str, value: Any, choices: Sequence[str]) -> str:
    """One of the strings in ``choices``."""
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(f'"{option}"' for option in choices)
        raise PipelineError(f"{name}: {argument} is {value!r}; give one of {allowed}.")
    return value


def colour(name: str, argument: str, value: Any) -> tuple[float, ...]:
    """Levels from 0 to 255: one for all channels, or one for each of three."""
    return per_channel(name, argument, value, 0.0, 255.0)


def per_channel(name: str, argument: str, value: Any, low: float, high: float) -> tuple[float, ...]:
    """One number for all channels, or one for each of three."""
    values = as_sequence(value)
    if values is None:
        values = (value,)
    if len(values) not in (1, 3):
        raise PipelineError(
            f"{name}: {argument} is {value!r}; give one number, or one for each of red, green and "
            "blue."
        )
    return tuple(number(name, argument, each, low, high) for each in values)


def _span(low: float, high: float) -> str:
    if math.isfinite(high):
        return f"from {low:g} to {high:g}"
    return f"of {low:g} or more" if math.isfinite(low) else "that is finite"
