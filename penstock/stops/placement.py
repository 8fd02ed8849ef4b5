"""Where stops may stand: what can only be checked over a whole pipeline, and shared rules."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.stops.stop import Stop


def check_complete(stops: Sequence[Stop]) -> None:
    """Raise PipelineError where the stops below one do not fit it."""
    for place, stop in enumerate(stops):
        stop.check_below(stops[place + 1 :])


def first_random(stops: Sequence[Stop]) -> Stop | None:
    """The first stop whose output differs from epoch to epoch."""
    return next((stop for stop in stops if stop.random), None)
