"""The position of a training run in its data, as saved in a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import StateError


class Cursor(NamedTuple):
    """The position of a run: everything a checkpoint needs to deal the rest of the epoch.

    ``position`` counts the samples of the epoch's sequence that all ranks together have been
    dealt, so it means the same for any number of ranks and any batch size. ``batch`` counts the
    batches that this rank has received in the epoch.

    >>> Cursor.from_dict(Cursor(epoch=2, position=512, batch=4).as_dict())
    Cursor(epoch=2, position=512, batch=4)
    """

    epoch: int = 0
    position: int = 0
    batch: int = 0

    def as_dict(self) -> dict[str, int]:
        """The cursor as a dict of plain ints, for a checkpoint in any format."""
        return {name: int(value) for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """The cursor that ``as_dict`` returned as ``state``. Other entries are ignored."""
        if not isinstance(state, Mapping):
            raise StateError(
                f"The cursor in the checkpoint is of type {type(state).__name__}, not a dict. "
                "Pass the dict that state_dict() returned."
            )
        return cls(*(_count(state, name) for name in cls._fields))


def _count(state: Mapping[str, Any], name: str) -> int:
    if name not in state:
        raise StateError(
            f"The cursor in the checkpoint has no {name!r}, only {sorted(map(str, state))}. "
            "Pass the dict that state_dict() returned."
        )
    value = state[name]
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise StateError(
            f"The cursor in the checkpoint has {name!r} = {value!r}, which must be a whole number, "
            "0 or more. The checkpoint is damaged or was not written by this loader."
        )
    return count
