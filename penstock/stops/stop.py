"""What a stop is: given keys and a way to ask upstream, it answers with samples.

Stops neither time nor log themselves; the joints of the road do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.keyed import Key, Keys
from penstock.operation import Operation, Spec
from penstock.serialize import Packed, pack, unpack
from penstock.stats import Tally
from penstock.store.value import Lent
from penstock.tree import flatten

Upstream = Callable[[Keys], list[Any]]
Step = Callable[[Keys, Upstream], list[Any]]
_BESIDE = 256
"""Bytes that a sample takes beside what its fields hold, about."""

Fields = dict[str | int, Spec] | Spec
"""What is known of a sample by its fields; one Spec for a sample that is a single value."""


class Rows:
    """Where in the batch the next samples will stand, so that the last stop can write there.

    A stop may use a row or leave it: whoever writes batches copies what is not in its row yet.
    """

    __slots__ = ("_columns", "_row", "_skeleton", "given")

    def __init__(self) -> None:
        self.given: list[NDArray[Any]] = []
        """The rows that were asked for since ``aim``, in the order of the samples."""
        self._columns: Sequence[NDArray[Any] | None] = ()
        self._skeleton: Any = None
        self._row = 0

    def aim(self, columns: Sequence[NDArray[Any] | None], skeleton: Any, row: int) -> None:
        """The next sample will stand in ``row`` of these columns, and so on."""
        self.clear()
        self._columns, self._skeleton, self._row = columns, skeleton, row

    def clear(self) -> None:
        """Nobody knows any more."""
        self._columns = ()
        self.given.clear()

    def next(self, on: str | int | None, field: str) -> NDArray[Any] | None:
        """The place of a field of the next sample, if it has one; see ``stops.field``."""
        if not self._columns:
            return None
        number = self._skeleton
        if type(number) is tuple:
            number = number[on or 0] if on is None or isinstance(on, int) else None
        elif isinstance(number, Mapping):
            number = number.get(field if on is None else on)
        column = self._columns[number] if type(number) is int else None
        if column is None:
            return None
        row: NDArray[Any] = column[self._row + len(self.given)]
        self.given.append(row)
        return row


@dataclass(slots=True)
class Site:
    """What a stop may use where it runs: one for every worker.

    ``offers`` collects what caches put into their stores during a task: (cache, index, cost).
    ``rows`` is there for the last stop of a road alone. In a ``trial`` nothing is to be kept: the
    sample is prepared again with its batch, and counted then.
    """

    seed: int
    tally: Tally
    offers: list[tuple[int, int, int]] = field(default_factory=list)
    rows: Rows | None = None
    trial: bool = False


class StageFailure(Exception):
    """A stop failed on a sample; the cause is chained. Never leaves the runner."""

    def __init__(self, stage: str, index: int) -> None:
        super().__init__(stage, index)
        self.stage = stage
        self.index = index


class Stop:
    """A stop on the road. Implementations are frozen dataclasses that travel by pickle.

    ``threadsafe``: it may run in several threads at once, and spends its time outside the GIL.
    ``global_random``: it may draw from the global generators, which only a process can own.
    ``careful``: it never changes what it is given, but makes something new of it.
    ``together``: so many samples at a time are faster than one, where each takes long.
    """

    threadsafe: ClassVar[bool] = True
    global_random: ClassVar[bool] = False
    careful: ClassVar[bool] = True
    together: ClassVar[int] = 1

    @property
    def name(self) -> str:
        raise NotImplementedError

    def output(self, fields: Fields) -> Fields:
        """What is known of the samples below it; raises PipelineError where that cannot work."""
        return fields

    def step(self, site: Site) -> Step:
        """Make it ready to run in one worker."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """What makes its output differ from another stop's; ``None`` if it changes nothing."""
        raise NotImplementedError


class Hold(Stop):
    """A stop that keeps samples, and counts when it had one (a hit) and when it had not.

    ``number`` counts the holds of a pipeline; tallies have a place for each. One that ``lends``
    hands out what it keeps instead of copies: its store is in this process, and nothing below it
    changes what it is given.
    """

    number: int
    lends: bool

    @property
    def note(self) -> str:
        """What it keeps and where, for people."""
        raise NotImplementedError

    @property
    def written(self) -> str:
        """How a user would write it."""
        raise NotImplementedError


def stored(sample: Any, lends: bool) -> Packed | Lent:
    """A sample as it is put into a store: as bytes, or, where nobody below changes it, itself."""
    return (lent(sample) if lends else None) or pack(sample)


def lent(sample: Any) -> Lent | None:
    """A sample to be kept as it is; ``None`` where part of it is handed out and may be changed."""
    nbytes = _BESIDE
    for leaf in flatten(sample)[0]:
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            nbytes += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            nbytes += len(leaf)
        elif not isinstance(leaf, (int, float, complex, np.generic)):
            return None  # an object is not copied into a batch
    return Lent(sample, nbytes)


def taken(frame: Any) -> Any:
    """The sample that a store had."""
    return frame.sample if type(frame) is Lent else unpack(frame)


def place(index: int, version: int) -> int:
    """Where a sample is kept that there may be two versions of: the next epoch may need the new
    one while this one still needs the old."""
    return 2 * index + version % 2


class Joined(Stop):
    """Several maps as one step. It comes after checking, and pipelines are known without it."""

    @property
    def operations(self) -> list[Operation]:
        raise NotImplementedError

    @property
    def how(self) -> str:
        """How they are done together, for people."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return "+".join(operation.name for operation in self.operations)

    def output(self, fields: Fields) -> Fields:
        raise TypeError("joining comes after checking")

    def fingerprint(self) -> str | None:
        raise TypeError("pipelines are known by what was written, not by how it runs")


def each(stage: str, do: Callable[[Any, Key], Any]) -> Step:
    """A step that does the same to every sample, and says on which it failed."""

    def step(keys: Keys, upstream: Upstream) -> list[Any]:
        out = []
        for key, sample in zip(keys, upstream(keys), strict=True):
            try:
                out.append(do(sample, key))
            except Exception as error:
                raise StageFailure(stage, key.index) from error
        return out

    return step


def names_of(stops: Sequence[Stop]) -> list[str]:
    """The stops' names, numbered where one comes twice."""
    names: list[str] = []
    for stop in stops:
        name, again = stop.name, 2
        while name in names:
            name = f"{stop.name}#{again}"
            again += 1
        names.append(name)
    return names
