"""Checkpoints: the description of a loader, and the check that it fits the loader that resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import FingerprintError, StateError
from penstock.fingerprint import fingerprint
from penstock.options import Options
from penstock.pipeline import Pipeline
from penstock.stops.stop import names_of

VERSION = 3
"""The format of checkpoints. Version 1 had other names for its entries. Version 2 is read too: its
one fingerprint of the data is now the part ``all``."""

_READ = (2, VERSION)


def describe(pipeline: Pipeline, options: Options, order_name: str = "") -> dict[str, Any]:
    """What decides which samples are in which batch, and their values, except the data.

    This hashes the code and the parameters of all stops, and the order: keep the result.
    """
    changing = [stop for stop in pipeline.stops if not stop.transparent]
    stops = [
        [name, _fingerprint_or_none(stop.fingerprint)]
        for name, stop in zip(names_of(changing), changing, strict=True)
    ]
    if pipeline.batching is not None and pipeline.batching.collate is not None:
        stops.append(["collate", _fingerprint_or_none(pipeline.batching.fingerprint)])
    if pipeline.batching is not None and pipeline.batching.budget is not None:
        found = _fingerprint_or_none(pipeline.batching.budget_fingerprint)
        stops.append(["batches by length", found])
    if pipeline.echoed is not None:
        stops.append(["echo of batches", _fingerprint_or_none(pipeline.echoed.fingerprint)])
    order = options.order
    if order is not None:
        order_name = f"{type(order).__name__} {_fingerprint_or_none(lambda: fingerprint(order))}"
    order_name = order_name or ("shuffled" if options.shuffle else "sequential")
    parts = pipeline.source.parts
    if parts is not None:
        order_name += f", mixed {_fingerprint_or_none(lambda: fingerprint(parts))}"
    return {
        "version": VERSION,
        "seed": options.seed,
        "order": order_name,
        "stops": stops,
        "dealing": dealing_of(pipeline, options),
    }


def dealing_of(pipeline: Pipeline, options: Options) -> dict[str, Any]:
    """How the samples of an epoch are dealt: the number of ranks, and the batch size."""
    return {"world": options.world, "batch": pipeline.batching and pipeline.batching.size}


def _fingerprint_or_none(find: Callable[[], str | None]) -> str | None:
    """A fingerprint; ``None`` if it cannot be made, and then it is not compared."""
    try:
        return find()
    except FingerprintError:
        return None


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise StateError if a checkpoint is of another pipeline, other data or another seed."""
    if not isinstance(state, Mapping) or "cursor" not in state or "stops" not in state:
        raise StateError(
            f"load_state_dict() got {_shown(state)}, which is not the state of a loader. Give it "
            "the value that state_dict() returned."
        )
    if state.get("version") not in _READ:
        raise StateError(
            f"the checkpoint has version {state.get('version')!r}, and this release of Penstock "
            f"reads versions {_READ[0]} to {VERSION}. Resume with the release that wrote it, or "
            "start anew."
        )
    differing = differences(state, mine)
    if differing:
        raise StateError(
            "the checkpoint does not belong to this loader: " + "; ".join(differing) + ". "
            "Resume with the pipeline, data and seed it was taken with, or start anew."
        )


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """A phrase for each difference between two descriptions."""
    found = []
    for entry in ("seed", "order", "samples", "on_error", "directory"):
        if entry in mine and theirs.get(entry) != mine[entry]:
            found.append(f"{entry} was {theirs.get(entry)!r} and is {mine[entry]!r}")
    data = data_difference(theirs, mine)
    if data is not None:
        found.append(data)
    before, now = list(theirs["stops"]), list(mine["stops"])
    names = [name for name, _ in before], [name for name, _ in now]
    if names[0] != names[1]:
        return [*found, f"the stops were {names[0]} and are {names[1]}"]
    for (name, old), (_, new) in zip(before, now, strict=True):
        if _differ(old, new):
            found.append(f"{name} has changed (its code or its parameters)")
    return found


def parts_of_data(state: Mapping[str, Any]) -> Mapping[str, str | None]:
    """The parts of the identity of the data in a checkpoint or description."""
    data = state.get("data")
    return data if isinstance(data, Mapping) else {"all": data}


def data_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """A phrase if the data of two descriptions differs, as far as both know it."""
    before, now = ({p: f for p, f in parts_of_data(d).items() if f} for d in (theirs, mine))
    if before.get("names") != now.get("names") and (
        {"names"} <= before.keys() & now.keys()
        # Files are always known by their names, so this is data of another kind.
        or (before and now and isinstance(theirs.get("data"), Mapping))
    ):
        return "the data is not the same (the names of files, their order or labels have changed)"
    if any(before[part] != now[part] for part in before.keys() & now.keys()):
        return "the data is not the same (files, sizes or times have changed)"
    return None


def check_dealing(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise StateError if the batches left of an epoch would be dealt in another way.

    For an epoch that is echoed, or that began in the middle.
    """
    theirs = state.get("dealing")
    if theirs != mine["dealing"]:
        raise StateError(
            "the checkpoint was taken within an epoch that was echoed, or begun in the middle, "
            f"with {theirs}, and this loader has {mine['dealing']}. The rest of such an epoch "
            "depends on the number of ranks (world) and the batch size. Resume with the same, or "
            "from a checkpoint taken between epochs."
        )


def _shown(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a mapping with the entries {[str(entry) for entry in state][:8]}"
    return f"a {type(state).__name__}"


def _differ(before: str | None, now: str | None) -> bool:
    return before is not None and now is not None and before != now
