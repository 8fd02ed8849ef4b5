"""Checkpoints: a description of the loader they were taken from, and what may not differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import FingerprintError, StateError
from penstock.fingerprint import fingerprint
from penstock.options import Options
from penstock.pipeline import Pipeline
from penstock.stops.stop import names_of

VERSION = 2
"""Version 1 named its entries otherwise."""


def describe(pipeline: Pipeline, options: Options, order_name: str = "") -> dict[str, Any]:
    """Everything that decides which samples come, and what they look like."""
    source = pipeline.source
    changing = [stop for stop in pipeline.stops if not stop.transparent]
    stops = [
        [name, _known(stop.fingerprint)]
        for name, stop in zip(names_of(changing), changing, strict=True)
    ]
    if pipeline.batching is not None and pipeline.batching.collate is not None:
        stops.append(["collate", _known(pipeline.batching.fingerprint)])
    if pipeline.echoed is not None:
        stops.append(["echo of batches", _known(pipeline.echoed.fingerprint)])
    order = options.order
    if order is not None:
        order_name = f"{type(order).__name__} {_known(lambda: fingerprint(order))}"
    return {
        "version": VERSION,
        "seed": options.seed,
        "order": order_name or ("shuffled" if options.shuffle else "sequential"),
        "samples": len(source) if source.indexed else None,
        "data": _known(source.identity),
        "stops": stops,
        "dealing": {"world": options.world, "batch": pipeline.batching and pipeline.batching.size},
    }


def _known(find: Callable[[], str | None]) -> str | None:
    """A fingerprint; ``None`` where there is none, so that it cannot be compared."""
    try:
        return find()
    except FingerprintError:
        return None


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another pipeline, other data or another seed, naming what differs."""
    if not isinstance(state, Mapping) or "cursor" not in state or "stops" not in state:
        raise StateError("this is not a loader's state: give what state_dict() returned.")
    if state.get("version") != VERSION:
        raise StateError(
            f"the checkpoint has version {state.get('version')!r}, and this Penstock reads "
            f"{VERSION}."
        )
    found = differences(state, mine)
    if found:
        raise StateError(
            "the checkpoint does not belong to this loader: " + "; ".join(found) + ". "
            "Resume with what it was taken from, or start anew."
        )


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions, in words."""
    found = []
    for what in ("seed", "order", "samples", "on_error", "directory"):
        if what in mine and theirs.get(what) != mine[what]:
            found.append(f"{what} was {theirs.get(what)!r} and is {mine[what]!r}")
    if _differ(theirs.get("data"), mine["data"]):
        found.append("the data is not the same (files, sizes or times have changed)")
    before, now = list(theirs["stops"]), list(mine["stops"])
    names = [name for name, _ in before], [name for name, _ in now]
    if names[0] != names[1]:
        return [*found, f"the stops were {names[0]} and are {names[1]}"]
    for (name, one), (_, other) in zip(before, now, strict=True):
        if _differ(one, other):
            found.append(f"{name} has changed (its code or its parameters)")
    return found


def check_dealing(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse to go on with an epoch that was echoed, or begun in the middle, in another way."""
    theirs = state.get("dealing")
    if theirs != mine["dealing"]:
        raise StateError(
            f"the checkpoint was taken within an epoch that was echoed, or begun in the middle, "
            f"and dealt as {theirs}; this loader deals {mine['dealing']}: what is still to come "
            "depends on that. Resume with the same, or from a checkpoint taken between epochs."
        )


def _differ(before: str | None, now: str | None) -> bool:
    return before is not None and now is not None and before != now
