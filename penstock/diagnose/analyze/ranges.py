"""Values and ranges as people write them: ``64GB``, ``0..64GB:8GB``, ``1,2,4,8``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.config import size
from penstock.errors import PipelineError

MOST = 200
"""Values of a range: nobody reads a longer table, and each takes a while to work out."""

PARTS = 8
"""Steps of a range that names none."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """How an option's numbers are read: what they may be, and the least of them."""

    read: Callable[[str, str], float]
    least: float
    whole: bool
    example: str


def _bytes(text: str, what: str) -> float:
    return size(text, what)


def _bytes_a_second(text: str, what: str) -> float:
    try:
        return float(size(re.sub(r"\s*/\s*s(ec)?\s*$", "", text), what))
    except PipelineError:
        raise PipelineError(
            f"{what} is {text!r}; give bytes a second, such as 500MB/s or 2GiB/s."
        ) from None


def _factor(text: str, what: str) -> float:
    if not re.fullmatch(r"\s*-?[0-9]*\.?[0-9]+\s*x?\s*", text.lower()):
        raise PipelineError(f"{what} is {text!r}; give a factor, such as 2x or 1.5.")
    return float(text.strip().lower().removesuffix("x"))


def _count(text: str, what: str) -> float:
    if not re.fullmatch(r"\s*-?\d+\s*", text):
        raise PipelineError(f"{what} is {text!r}; give a whole number.")
    return int(text)


BYTES = Quantity(_bytes, 0, True, "64GB")
BYTES_A_SECOND = Quantity(_bytes_a_second, 1, False, "500MB/s")
FACTOR = Quantity(_factor, 1e-9, False, "2x")
AT_LEAST_ONCE = Quantity(_factor, 1, False, "2")
COUNT = Quantity(_count, 1, True, "8")
COUNT_FROM_0 = Quantity(_count, 0, True, "4")


def values(text: str, what: str, quantity: Quantity) -> tuple[float, ...]:
    """All the values that a text means.

    >>> values("1,2,4", "--cores", COUNT), values("2..4", "--cores", COUNT)
    ((1, 2, 4), (2, 3, 4))
    >>> values("0..64GB:32GB", "--cache", BYTES)
    (0, 32000000000, 64000000000)

    A number without a unit has that of the last one.

    >>> values("8,16GB", "--cache", BYTES)
    (8000000000, 16000000000)
    """
    if ".." in text:
        ends, colon, step = text.partition(":")
        low, _, high = ends.partition("..")
        found = _range(text, what, quantity, low, high, step if colon else None)
    elif ":" in text:
        raise PipelineError(
            f"{what} is {text!r}; a step goes with a range, as in 0..{quantity.example}:"
            f"{quantity.example}."
        )
    else:
        parts = text.split(",")
        found = [quantity.read(_with_unit(one, parts[-1]), what) for one in parts]
    if min(found) < quantity.least:
        raise PipelineError(
            f"{what} is {text!r}; the least is {quantity.least:g}."
            if quantity.least >= 1 or quantity.least == 0
            else f"{what} is {text!r}; it must be above 0."
        )
    return tuple(dict.fromkeys(found))


def _range(
    text: str, what: str, quantity: Quantity, low: str, high: str, step: str | None
) -> list[float]:
    if not low.strip() or not high.strip() or (step is not None and not step.strip()):
        raise PipelineError(
            f"{what} is {text!r}; a range is written 0..{quantity.example}, and with a step "
            f"0..{quantity.example}:{quantity.example}."
        )
    first, last = quantity.read(_with_unit(low, high), what), quantity.read(high, what)
    if last <= first:
        raise PipelineError(f"{what} is {text!r}; a range goes from less to more.")
    if step is None:
        # Small whole numbers are all shown; of anything else a few are enough.
        every = quantity.whole and last - first <= 2 * PARTS
        count = round(last - first) if every else PARTS
        found = [first + (last - first) * n / count for n in range(count + 1)]
    else:
        by = quantity.read(_with_unit(step, high), what)
        if by <= 0:
            raise PipelineError(f"{what} is {text!r}; its step must be above 0.")
        if (last - first) / by > MOST:
            raise PipelineError(f"{what} is {text!r}: more than {MOST} values. Give a larger step.")
        # A hair more, so that 1..2:0.1 has its end too.
        found = [first + by * n for n in range(int((last - first) / by + 1e-9) + 1)]
    return [round(one) if quantity.whole else one for one in found]


def _with_unit(text: str, other: str) -> str:
    """A bare number with the unit of another text; 0 needs none."""
    if not re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*", text) or float(text) == 0:
        return text
    unit = re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*(.*)", other)
    return text if unit is None else text.strip() + unit[1]
