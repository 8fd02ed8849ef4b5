"""Checks of what users pass to image operations; each gives back the value in its one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from penstock.errors import PipelineError


def as_sequence(value: Any) -> Sequence[Any] | None:
    """The value, if it is several: text is one thing, not its letters."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None


def integer(name: str, what: str, value: Any, *, least: int) -> int:
    """An integer of at least ``least``; a bool or a float is a mistake, not a number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise PipelineError(f"{name}: {what} is {value!r}; give a whole number of {least} or more.")
    return found


def image_size(name: str, value: SupportsIndex | Sequence[int]) -> tuple[int, int]:
    """A size as (height, width); one number is a square."""
    pair = as_sequence(value)
    if pair is None:
        side = integer(name, "size", value, least=1)
        return side, side
    if len(pair) != 2:
        raise PipelineError(f"{name}: size is {value!r}; give one number, or (height, width).")
    return integer(name, "height", pair[0], least=1), integer(name, "width", pair[1], least=1)


def number(name: str, what: str, value: Any, low: float, high: float) -> float:
    """A finite number from ``low`` to ``high``."""
    try:
        found = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (math.isfinite(found) and low <= found <= high):
        raise PipelineError(f"{name}: {what} is {value!r}; give a number {_span(low, high)}.")
    return found


def interval(name: str, what: str, value: Any, low: float, high: float) -> tuple[float, float]:
    """A pair (from, to), in this order, within ``low`` to ``high``."""
    pair = as_sequence(value)
    if pair is None or len(pair) != 2:
        raise PipelineError(f"{name}: {what} is {value!r}; give a pair (from, to).")
    first = number(name, what, pair[0], low, high)
    last = number(name, what, pair[1], low, high)
    if first > last:
        raise PipelineError(f"{name}: {what} is {value!r}; give the smaller number first.")
    return first, last


def positive_interval(name: str, what: str, value: Any, high: float) -> tuple[float, float]:
    """A pair (from, to) above zero."""
    found = interval(name, what, value, 0.0, high)
    if found[0] == 0.0:
        raise PipelineError(f"{name}: {what} is {value!r}; give numbers above 0.")
    return found


def choice(name: str, what: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(f'"{one}"' for one in choices)
        raise PipelineError(f"{name}: {what} is {value!r}; give one of {known}.")
    return value


def colour(name: str, what: str, value: Any) -> tuple[float, ...]:
    """A grey level for all channels, or one for each of three."""
    return per_channel(name, what, value, 0.0, 255.0)


def per_channel(name: str, what: str, value: Any, low: float, high: float) -> tuple[float, ...]:
    """One number for all channels, or one for each of three."""
    given = as_sequence(value)
    if given is None:
        given = (value,)
    if len(given) not in (1, 3):
        raise PipelineError(
            f"{name}: {what} is {value!r}; give one number, or one for each of red, green and blue."
        )
    return tuple(number(name, what, one, low, high) for one in given)


def _span(low: float, high: float) -> str:
    if math.isfinite(high):
        return f"from {low:g} to {high:g}"
    return f"of {low:g} or more" if math.isfinite(low) else "that is finite"
