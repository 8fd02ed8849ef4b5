"""The contract of stops: given keys and a way to ask upstream, a stop returns samples.

Stops do not measure their own time; the road does that between them.
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
"""The known shape and type of each field; one Spec for a sample that is a single value."""

Offer = tuple[int, int, int]
"""A sample that a worker put into a store: (number of the stop, index, bytes it takes)."""


def column_of(skeleton: Any, on: str | int | None, field: str) -> int | None:
    """The number of a field in a batch of this skeleton; ``None`` if it is not a single column.

    ``on``, ``field``: see ``Field``.
    """
    number = skeleton
    if type(number) is tuple:
        number = number[on or 0] if on is None or isinstance(on, int) else None
    elif isinstance(number, Mapping):
        number = number.get(field if on is None else on)
    return number if type(number) is int else None


class Rows:
    """The rows of the batch for the next samples, so that the last stop can write into them.

    A stop need not use its row: the runner copies samples that are not in their rows yet.
    """

    __slots__ = ("_columns", "_row", "_skeleton", "given")

    def __init__(self) -> None:
        self.given: list[NDArray[Any]] = []
        """The rows that ``next`` returned since ``aim``, in the order of the samples."""
        self._columns: Sequence[NDArray[Any] | None] = ()
        self._skeleton: Any = None
        self._row = 0

    def aim(self, columns: Sequence[NDArray[Any] | None], skeleton: Any, row: int) -> None:
        """Give the next samples ``row`` of these columns, and the rows after it."""
        self.clear()
        self._columns, self._skeleton, self._row = columns, skeleton, row

    def clear(self) -> None:
        """Forget the target rows."""
        self._columns = ()
        self.given.clear()

    def next(self, on: str | int | None, field: str) -> NDArray[Any] | None:
        """The row for a field of the next sample, or ``None``. ``on``, ``field``: see ``Field``."""
        if not self._columns:
            return None
        number = column_of(self._skeleton, on, field)
        column = None if number is None else self._columns[number]
        if column is None:
            return None
        row: NDArray[Any] = column[self._row + len(self.given)]
        self.given.append(row)
        return row


@dataclass(slots=True)
class StepContext:
    """What a stop uses in one worker: the counters and offers of the current task.

    - ``offers``: collects the samples that caches put into their stores.
    - ``rows``: given to the last stop of a road only.
    - ``trial``: nothing may be put into stores; the sample is prepared again with its batch.
    """

    seed: int
    tally: Tally
    offers: list[Offer] = field(default_factory=list)
    rows: Rows | None = None
    trial: bool = False


class StageFailure(Exception):
    """A stop failed on a sample; the cause is chained. The runner turns it into a SampleError."""

    def __init__(self, stage: str, index: int) -> None:
        super().__init__(stage, index)
        self.stage = stage
        self.index = index


class KernelWork:
    """The work of one or more stops in a form that the compiled kernel runs by itself."""

    def joined(self, below: KernelWork) -> KernelWork | None:
        """This work and that of the stop below as one; ``None`` if the kernel cannot do that."""
        raise NotImplementedError

    @property
    def reads_files(self) -> bool:
        """Whether its input is the bytes of files, and not what other work made of them."""
        raise NotImplementedError

    @property
    def fills_rows(self) -> bool:
        """Whether its output can be a row of the batch."""
        raise NotImplementedError

    @property
    def makes_input(self) -> bool:
        """Whether its output can be the input of work that does not read files."""
        raise NotImplementedError

    def fits(self, column: NDArray[Any]) -> bool:
        """Whether it can write its output into the rows of this column."""
        raise NotImplementedError

    def suits(self, name: str, peek: Callable[[], bytes] | None) -> bool:
        """Whether the kernel can probably decode a file of this name.

        ``peek``: returns the first bytes of a file, where files have no names.
        """
        return True

    def program(self) -> Any:
        """The program of the compiled kernel."""
        raise NotImplementedError

    def index(self) -> Any:
        """The index that the program uses; ``None``: it needs none."""
        return None


class Stop:
    """One stage of a pipeline. Implementations are frozen dataclasses that can be pickled.

    Other code learns about a stop from these attributes, not from its class:

    - ``threadsafe``: it may run in several threads at once, and releases the GIL.
    - ``global_random``: it may draw from the global generators, so it needs a process of its own.
    - ``preserves_input``: it never changes a sample in place, but returns a new one.
    - ``preferred_group``: samples per call with which it is fastest, for slow samples.
    - ``random``: its output differs from epoch to epoch.
    - ``repeats``: it returns each sample several times, as copies (echo).
    - ``renews``: it returns a kept sample several times before it takes a fresh one (refurbish).
    - ``measured``: one of its settings is ``"auto"``, chosen by measuring while training runs.
    - ``transparent``: it changes no sample (cache).
    - ``keeps``: it keeps samples in a store; it is a ``Hold``.
    - ``span``: it works on samples with indices from the first to before the second of these only;
      ``None``: on all.
    """

    threadsafe: ClassVar[bool] = True
    global_random: ClassVar[bool] = False
    preserves_input: ClassVar[bool] = True
    preferred_group: ClassVar[int] = 1
    repeats: ClassVar[bool] = False
    renews: ClassVar[bool] = False
    transparent: ClassVar[bool] = False
    keeps: ClassVar[bool] = False

    @property
    def span(self) -> tuple[int, int] | None:
        return None

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
        """The text beside its name in ``Pipeline.explain``."""
        return ""

    @property
    def as_call(self) -> str:
        """The call that adds it to a pipeline, for the ``repr`` of the pipeline."""
        return f".map({self.name})"

    def output(self, fields: Fields) -> Fields:
        """The fields of its output, given those of its input. Raises PipelineError if these do not
        fit."""
        return fields

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        """Raise PipelineError if it may not stand below these stops.

        Called when the stop is added. ``random_source``: the source may be random.
        """

    def check_below(self, below: Sequence[Stop]) -> None:
        """Raise PipelineError if it may not stand above these stops. Called by the loader."""

    def order(self, order: Order) -> Order:
        """The order of samples that suits this stop, given the chosen order."""
        return order

    def step(self, context: StepContext) -> Step:
        """The function that runs this stop in one worker."""
        raise NotImplementedError

    def for_kernel(self, seed: int, field: str | int | None) -> KernelWork | None:
        """Its work for the compiled kernel; ``None`` if Python has to do it.

        ``field``: the field of samples that the kernel prepares; see ``FileSamples``.
        """
        return None

    def fingerprint(self) -> str | None:
        """Identifies what it does to samples; ``None`` if nothing. Raises FingerprintError."""
        raise NotImplementedError


class Joined(Stop):
    """Several maps as one step. Made when a road is compiled; not part of a written pipeline."""

    @property
    def operations(self) -> list[Operation]:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return "+".join(operation.name for operation in self.operations)

    def output(self, fields: Fields) -> Fields:
        raise TypeError("maps are joined after their fields were checked")

    def fingerprint(self) -> str | None:
        raise TypeError("a pipeline is fingerprinted by its stops as written, not as joined")


def each(stage: str, do: Callable[[Any, Key], Any]) -> Step:
    """A step that applies ``do`` to each sample. Raises StageFailure with the failed sample."""

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
    """The names of the stops; repeated names are numbered (``flip``, ``flip#2``)."""
    names: list[str] = []
    for stop in stops:
        name, count = stop.name, 2
        while name in names:
            name = f"{stop.name}#{count}"
            count += 1
        names.append(name)
    return names
