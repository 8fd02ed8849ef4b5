"""Mixes: one pipeline made of several, each with its own maps and its own passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Keys
from penstock.operation import ArraySpec
from penstock.order import Mixed, MixPart, Order
from penstock.order.mixed import Weight, part_seed
from penstock.order.order import whole
from penstock.pipeline import Pipeline, fused
from penstock.source.source import FetchedAhead, Source
from penstock.stops.road import draws_globally
from penstock.stops.stop import (
    Fields,
    StageFailure,
    Step,
    StepContext,
    Stop,
    Upstream,
    names_of,
)


def mix(
    parts: Mapping[str, tuple[Pipeline, Weight] | tuple[Pipeline, Weight, Order]],
    *,
    samples: int | None = None,
) -> Pipeline:
    """One pipeline of several: ``{name: (pipeline, weight)}``, mixed in proportion to the weights.

    A weight is a number, a list of numbers by epoch (the last one stays), or a function of the
    epoch. Every batch of every rank has exact shares of the sources, rounded. Each source has its
    own passes: it begins anew when all its samples came, not when the epoch of the mix ends.
    ``samples``: the number of samples in an epoch, by default the sum of all sources. Stages below
    apply to all samples.

    ``(pipeline, weight, order)`` gives a source an order of its own; the others have the order of
    the loader.

    >>> import numpy as np
    >>> import penstock as ps
    >>> web = ps.from_dataset(np.arange(6))
    >>> code = ps.from_dataset(np.arange(100, 103))
    >>> p = ps.mix({"web": (web, 0.75), "code": (code, 0.25)}, samples=8).batch(4)
    >>> [sorted(batch.tolist()) for batch in p.loader(workers=0, shuffle=False)]
    [[0, 1, 2, 100], [3, 4, 5, 101]]
    """
    if not isinstance(parts, Mapping) or not parts:
        raise PipelineError(
            f"mix() got {parts!r}. Give a dict of the sources: {{name: (pipeline, weight)}}."
        )
    made = [_part(name, given) for name, given in parts.items()]
    source = MixSource(made, samples)
    Mixed(
        source.order_parts(_LengthOnly()), source.samples
    )  # raises PipelineError for a wrong weight
    fields = _common_fields({part.name: part.pipeline for part in made})
    branches: list[Branch] = []
    for part, start in zip(made, source.starts, strict=False):
        if part.pipeline.stops:
            inner, end = part.pipeline.stops, start + len(part.pipeline.source)
            branches.append(Branch(part.name, start, end, inner, fused(inner)))
    if branches:
        branches[-1] = replace(branches[-1], result=fields)
    else:
        source.known_fields = fields
    return Pipeline(source, tuple(branches))


@dataclass(frozen=True)
class _Given:
    name: str
    pipeline: Pipeline
    weight: Weight
    order: Order | None


class _LengthOnly:
    """An order that only says its length, to check the other arguments."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return np.arange(n, dtype=np.int64)

    def length(self, n: int) -> int:
        return n


class MixSource(Source):
    """The samples of several sources, one source after the other."""

    def __init__(self, parts: Sequence[_Given], samples: int | None) -> None:
        self._given = tuple(
            replace(part, pipeline=Pipeline(part.pipeline.source)) for part in parts
        )
        self.sources = [part.pipeline.source for part in parts]
        lengths = [len(source) for source in self.sources]
        self.starts: list[int] = np.cumsum([0, *lengths]).tolist()
        self.samples = sum(lengths) if samples is None else whole("samples of mix()", samples, 1)
        self.known_fields: Fields = None
        self.random = any(draws_globally(source) for source in self.sources)
        # Class variables in Source; here they depend on the sources.
        self.__dict__["threadsafe"] = all(source.threadsafe for source in self.sources)
        self.__dict__["runs_user_code"] = any(source.runs_user_code for source in self.sources)

    def __len__(self) -> int:
        return self.starts[-1]

    def __repr__(self) -> str:
        return f"mix of {', '.join(part.name for part in self._given)}"

    def read(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = [None] * len(indices)
        for number, places in self._by_part(np.asarray(indices, dtype=np.int64)):
            start = self.starts[number]
            found = self.sources[number].read([int(indices[place]) - start for place in places])
            for place, sample in zip(places, found, strict=True):
                samples[place] = sample
        return samples

    def name(self, index: int) -> str:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        inner = self.sources[number].name(index - self.starts[number])
        return f"{self._given[number].name}: {inner}"

    def identity(self) -> str:
        return fingerprint(("mix", [source.identity() for source in self.sources]))

    def fields(self) -> Fields:
        return self.known_fields

    @property
    def shards(self) -> NDArray[np.int64] | None:
        by_source = [source.shards for source in self.sources]
        known = [shards for shards in by_source if shards is not None]
        return np.concatenate(known) if len(known) == len(by_source) else None

    def will_need(self, indices: NDArray[np.int64]) -> None:
        for number, places in self._by_part(indices):
            self.sources[number].will_need(indices[places] - self.starts[number])

    @property
    def objects(self) -> FetchedAhead | None:
        by_part = {
            number: ahead
            for number, source in enumerate(self.sources)
            if (ahead := source.objects) is not None
        }
        return _PartsAhead(self, by_part) if by_part else None

    def order_parts(self, order: Order) -> tuple[MixPart, ...]:
        """The parts of the order, given the order of the loader."""
        return tuple(
            MixPart(
                part.name,
                len(source),
                part.weight,
                source.ordered(order if part.order is None else part.order),
            )
            for part, source in zip(self._given, self.sources, strict=True)
        )

    def ordered(self, order: Order) -> Order:
        return Mixed(self.order_parts(order), self.samples)

    @property
    def parts(self) -> Mapping[str, Any]:
        weights = {part.name: (part.weight, part.order) for part in self._given}
        return {**weights, "": (self.samples, self.starts)}

    def _by_part(self, indices: NDArray[np.int64]) -> list[tuple[int, NDArray[np.intp]]]:
        numbers = np.searchsorted(self.starts, indices, side="right") - 1
        return [(n, np.flatnonzero(numbers == n)) for n in np.unique(numbers).tolist()]


class _PartsAhead:
    """Fetches samples of several sources ahead, each by its own way, in one order."""

    TOGETHER = 64
    """Samples that are announced source by source; from one such group to the next, the order is
    that of the batches. A message for each sample would cost more than a request."""

    def __init__(self, source: MixSource, by_part: Mapping[int, FetchedAhead]) -> None:
        self._source, self._by_part = source, by_part

    def expect(self, indices: Iterable[int]) -> None:
        wanted = np.fromiter(indices, dtype=np.int64)
        for first in range(0, len(wanted), self.TOGETHER):
            group = wanted[first : first + self.TOGETHER]
            for number, places in self._source._by_part(group):
                if number in self._by_part:
                    own = group[places] - self._source.starts[number]
                    self._by_part[number].expect(own.tolist())

    def hold(self, samples: int) -> None:
        """Windows belong to the orders of single sources, which a mix does not read by windows."""

    def forget(self) -> None:
        for ahead in self._by_part.values():
            ahead.forget()

    def stats(self) -> Any:
        """What was fetched for all of them: they have one fetcher."""
        return next(iter(self._by_part.values())).stats()


@dataclass(frozen=True)
class Branch(Stop):
    """The stages of one pipeline of a mix, for its samples only.

    - ``start``, ``end``: its samples are those from index ``start`` to before ``end``.
    - ``written``: the stages as written; ``stops``: as they run.
    - ``result``: of the last branch: what is known of samples below all branches.

    Random maps are keyed by the name of the source and the index of the sample within it, so
    another source in the mix changes nothing.
    """

    part: str
    start: int
    end: int
    written: tuple[Stop, ...]
    stops: tuple[Stop, ...]
    result: Fields = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"{self.part}: {', '.join(names_of(self.stops))}"

    @property
    def note(self) -> str:
        return f"samples of {self.part} only"

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end

    @property
    def threadsafe(self) -> bool:  # type: ignore[override]
        return all(stop.threadsafe for stop in self.stops)

    @property
    def global_random(self) -> bool:  # type: ignore[override]
        return any(stop.global_random for stop in self.stops)

    @property
    def preserves_input(self) -> bool:  # type: ignore[override]
        return all(stop.preserves_input for stop in self.stops)

    @property
    def preferred_group(self) -> int:  # type: ignore[override]
        return max(stop.preferred_group for stop in self.stops)

    @property
    def random(self) -> bool:
        return any(stop.random for stop in self.written)

    @property
    def as_call(self) -> str:
        return f"{self.part}: " + "".join(stop.as_call for stop in self.written)

    def output(self, fields: Fields) -> Fields:
        return self.result

    def fingerprint(self) -> str | None:
        stops = [stop.fingerprint() for stop in self.written]
        return fingerprint(("branch", self.part, self.start, self.end, stops))

    def step(self, context: StepContext) -> Step:
        start, end = self.start, self.end
        own = replace(context, seed=part_seed(context.seed, self.part), rows=None)
        steps = [stop.step(own) for stop in self.stops]

        def mine(keys: Keys, upstream: Upstream) -> list[Any]:
            """The samples of this part, whose stages know the index within the part."""
            above: StageFailure | None = None

            def from_above(local: Keys) -> list[Any]:
                nonlocal above
                shifted = [index + start for index in local.indices]
                try:
                    return upstream(Keys(local.epoch, shifted, local.replicas))
                except StageFailure as failure:
                    above = failure
                    raise

            get: Upstream = from_above
            for step in steps:
                get = _joined(step, get)
            local = [index - start for index in keys.indices]
            try:
                return get(Keys(keys.epoch, local, keys.replicas))
            except StageFailure as failure:
                if failure is above:
                    raise
                failed = StageFailure(f"{self.part}: {failure.stage}", failure.index + start)
                raise failed from failure.__cause__

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            places = [i for i, index in enumerate(keys.indices) if start <= index < end]
            if not places:
                return upstream(keys)
            if len(places) == len(keys):
                return mine(keys, upstream)
            samples: list[Any] = [None] * len(keys)
            inside = set(places)
            others = [i for i in range(len(keys)) if i not in inside]
            for chosen, get in ((places, lambda k: mine(k, upstream)), (others, upstream)):
                for i, sample in zip(chosen, get(keys.pick(chosen)), strict=True):
                    samples[i] = sample
            return samples

        return step


def _joined(step: Step, upstream: Upstream) -> Upstream:
    return lambda keys: step(keys, upstream)


def _part(name: Any, given: Any) -> _Given:
    if not isinstance(name, str) or not name:
        raise PipelineError(f"mix() got the name {name!r}; give each source a name, a text.")
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise PipelineError(
            f"mix() got {given!r} for {name!r}. Give a tuple (pipeline, weight), or (pipeline, "
            "weight, order)."
        )
    pipeline, weight, order = (*given, None)[:3]
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(
            f"mix() got {type(pipeline).__name__} as the pipeline of {name!r}. Make one of it with "
            "ps.from_dataset() or another source."
        )
    if pipeline.batching is not None:
        raise PipelineError(
            f"The pipeline of {name!r} in mix() has a batch(): a mix makes batches of samples of "
            "all sources. Leave it out, and call batch() on the mix."
        )
    if not pipeline.source.indexed:
        raise PipelineError(
            f"The pipeline of {name!r} in mix() is a stream: its samples have no index, so the "
            "shares and passes of a mix cannot be computed. Use a source with random access."
        )
    if isinstance(pipeline.source, MixSource):
        raise PipelineError(
            f"The pipeline of {name!r} in mix() is a mix itself. Put all sources into one mix, "
            "each with the product of its weights."
        )
    if isinstance(weight, (list, tuple, np.ndarray)):
        if len(weight) == 0:
            raise PipelineError(f"The weights of {name!r} in mix() are empty. Give a number.")
        weight = tuple(float(w) for w in weight)
    stop = next((s for s in pipeline.stops if s.keeps or s.repeats or s.renews), None)
    if stop is not None:
        raise PipelineError(
            f"The pipeline of {name!r} in mix() has a {stop.name}(), which works for a whole "
            f"loader. Put it below the mix: ps.mix(...).{stop.name}(...)."
        )
    return _Given(name, pipeline, weight, order)


def _common_fields(pipelines: Mapping[str, Pipeline]) -> Fields:
    """What is known of the samples of all pipelines. Raises PipelineError if they differ."""
    known = {name: p.fields for name, p in pipelines.items() if p.fields is not None}
    if not known:
        return None
    first, fields = next(iter(known.items()))
    for name, other in known.items():
        if not _alike(fields, other):
            raise PipelineError(
                f"The pipelines of mix() end in different samples: {first!r} in {_shown(fields)}, "
                f"{name!r} in {_shown(other)}. A batch has samples of all sources, so bring them "
                "to one form with maps in each pipeline."
            )
    return fields if len(known) == len(pipelines) and _same(list(known.values())) else None


def _same(all_fields: list[Fields]) -> bool:
    return all(fields == all_fields[0] for fields in all_fields)


def _alike(one: Fields, other: Fields) -> bool:
    """Whether samples may stack, as far as is known."""
    if isinstance(one, dict) != isinstance(other, dict):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if not isinstance(one, ArraySpec) or not isinstance(other, ArraySpec):
        return True
    if not one.known or not other.known:
        return True
    return one.shape == other.shape and one.dtype == other.dtype


def _shown(fields: Fields) -> str:
    if isinstance(fields, dict):
        inner = ", ".join(f"{name!r}: {_shown(spec)}" for name, spec in fields.items())
        return f"{{{inner}}}"
    if isinstance(fields, ArraySpec):
        return f"{fields.dtype} {fields.shape}" if fields.known else "an array"
    return "unknown" if fields is None else str(fields)
