"""What a stop is: given keys and a way to ask upstream, it answers with samples.

Stops neither time nor log themselves; the joints of the road do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray

from penstock.keyed import Key, Keys
from penstock.operation import Operation, Spec
from penstock.order import Order
from penstock.stats import Tally

Upstream = Callable[[Keys], list[Any]]
Step = Callable[[Keys, Upstream], list[Any]]

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
        """Forget the target rows."""
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
    """One stage of a pipeline. Implementations are frozen dataclasses that travel by pickle.

    What others need to know about a stop, they ask it; nobody asks which class it is.

    - ``threadsafe``: it may run in several threads at once, and spends its time outside the GIL.
    - ``global_random``: it may draw from the global generators, which only a process can own.
    - ``careful``: it never changes a sample it is given, but returns a new one.
    - ``together``: this many samples per call are faster than one, where each takes long.
    - ``random``: its output differs from epoch to epoch.
    - ``repeats``: samples pass it once and leave it several times, as copies (echo).
    - ``renews``: samples leave it several times before it takes fresh ones (refurbish).
    - ``measured``: one of its settings is ``"auto"``, chosen by measuring while training runs.
    - ``transparent``: with it or without it, samples are the same (cache).
    - ``keeps``: it keeps samples in a store; it is a ``Hold``.
    """

    threadsafe: ClassVar[bool] = True
    global_random: ClassVar[bool] = False
    careful: ClassVar[bool] = True
    together: ClassVar[int] = 1
    repeats: ClassVar[bool] = False
    renews: ClassVar[bool] = False
    transparent: ClassVar[bool] = False
    keeps: ClassVar[bool] = False

    @property
    def random(self) -> bool:
        return False

    @property
    def measured(self) -> bool:
        return False

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def note(self) -> str:
        """What ``Pipeline.explain`` says about it, beside its name."""
        return ""

    @property
    def written(self) -> str:
        """The call of ``Pipeline`` that makes it, as ``repr`` shows it."""
        return f".map({self.name})"

    def output(self, fields: Fields) -> Fields:
        """What is known of its output; raises PipelineError if it cannot take such input."""
        return fields

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """Raise PipelineError if it may not stand below these. Called as a pipeline is built."""

    def check_below(self, below: Sequence[Stop]) -> None:
        """Raise PipelineError if the stops below it do not fit. Called when a loader is made."""

    def order(self, order: Order) -> Order:
        """The order in which samples are best asked for, given the order that was chosen."""
        return order

    def step(self, site: Site) -> Step:
        """Make it ready to run in one worker."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """Identifies its output; ``None`` if it changes nothing. Raises FingerprintError."""
        raise NotImplementedError


class Joined(Stop):
    """Several maps as one step. It comes after checking, and pipelines are known without it."""

    @property
    def operations(self) -> list[Operation]:
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
