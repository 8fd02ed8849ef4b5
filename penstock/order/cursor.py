"""Where in its data a training run stands."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import StateError


class Cursor(NamedTuple):
    """Where a run stands: all that a checkpoint needs to deal the rest.

    ``position`` counts samples of the epoch's sequence that all ranks together have been dealt,
    so it means the same for any number of ranks and any batch size. ``batch`` counts what this
    rank has been given in the epoch.

    >>> Cursor.from_dict(Cursor(epoch=2, position=512, batch=4).as_dict())
    Cursor(epoch=2, position=512, batch=4)
    """

    epoch: int = 0
    position: int = 0
    batch: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain numbers under plain names, for a checkpoint in any format."""
        return {name: int(value) for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """The cursor that ``as_dict`` described. Entries of other names are left alone."""
        if not isinstance(state, Mapping):
            raise StateError(
                f"The cursor in the checkpoint is of type {type(state).__name__}, not a dict. "
                "Pass what state_dict() returned."
            )
        return cls(*(_count(state, name) for name in cls._fields))


def _count(state: Mapping[str, Any], name: str) -> int:
    if name not in state:
        raise StateError(
            f"The cursor in the checkpoint has no {name!r}, only {sorted(map(str, state))}. "
            "Pass what state_dict() returned."
        )
    value = state[name]
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise StateError(
            f"The cursor in the checkpoint has {name!r} = {value!r}, and it is a count: 0 or more. "
            "The checkpoint is damaged or was not written by this loader."
        )
    return found
