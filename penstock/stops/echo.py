"""The echo stop: each sample from above is used several times (data echoing).

Copies of a sample have different replica numbers, so every random map below the stop treats them
differently; everything above the stop runs once. The order decides which copy is in which batch.
The stop keeps a sample from its first copy to its last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.config import memory
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Key, Keys
from penstock.order import BatchKeys, EchoSequence, StreamCopies
from penstock.stats import EchoStats, Held
from penstock.stops.hold import Hold, Keeper, Opening, from_stored, store_key, to_stored
from penstock.stops.stop import Step, StepContext, Stop, Upstream
from penstock.store import HeapStore, SampleStore, ThreadClaims, claims_of, memory_store

LARGEST_FACTOR = 8
"""The largest factor that ``"auto"`` chooses: half of the largest with which the authors of data
echoing still trained faster, 16."""

BATCH_WINDOW = 4
"""The default window of an echo of batches: as many as are prepared ahead anyway."""

LEAST_WINDOW, MOST_WINDOW = 256, 8192
WINDOW_BATCHES, FEWEST_BATCHES = 32, 4
"""The default window of an echo of samples. With copies spread over 8 batches instead of 32, a
factor of 5 took half as many fresh samples again (``python -m benchmarks echo``). 8192 places with
a factor of 2 keep 4096 samples, 2.3 GB of decoded photographs, so the window stops growing there,
as long as copies of a sample are spread over 4 batches."""


def default_window(batch: int) -> int:
    """The window of an echo of samples, for this batch size.

    >>> [default_window(batch) for batch in (1, 8, 64, 256, 1024, 4096)]
    [256, 256, 2048, 8192, 8192, 16384]
    """
    wanted = min(WINDOW_BATCHES * batch, MOST_WINDOW)
    return max(LEAST_WINDOW, FEWEST_BATCHES * batch, wanted)


@dataclass(frozen=True)
class Echo(Hold):
    """Uses each sample ``factor`` times, its copies spread over ``window`` samples.

    Below ``batch`` it repeats whole batches, and its step does not run. ``by_batch``: the user gave
    no window, so it follows from the batch size. ``claims``: with these workers agree on who
    prepares a sample; set when a loader opens the pipeline.
    """

    repeats: ClassVar[bool] = True

    factor: float | Literal["auto"]
    window: int
    by_batch: bool = False
    number: int = 0
    lends: bool = False
    store: SampleStore | None = None
    claims: Path | ThreadClaims | None = None

    @property
    def name(self) -> str:
        return "echo"

    @property
    def note(self) -> str:
        times = "as often as pays" if self.factor == "auto" else f"{self.factor:g} times"
        return f"everything {times}, over a window of {self.window}"

    @property
    def as_call(self) -> str:
        return f".echo({self.factor!r}, window={self.window})"

    @property
    def measured(self) -> bool:
        return self.factor == "auto"

    def for_batches(self, size: int) -> Echo:
        return replace(self, window=default_window(size)) if self.by_batch else self

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        if any(stop.repeats for stop in above):
            raise PipelineError(
                "a second echo() in the pipeline: it would repeat the copies of the first. Use one "
                "echo() with the product of both factors."
            )

    def make_keeper(self, opening: Opening) -> EchoKeeper:
        store = memory_store(memory() // 4, shared=opening.shared)
        stop = replace(
            self,
            number=opening.number,
            lends=opening.lends,
            store=store,
            claims=opening.claims(),
        )
        return EchoKeeper(stop, store)

    def for_trial(self, store: SampleStore, number: int, samples: int, seed: int) -> Echo:
        return replace(self, number=number, store=store)

    def hit_share(self, room: float) -> float | None:
        return None if self.factor == "auto" else 1 - 1 / self.factor

    @property
    def most(self) -> int:
        """The largest number of copies of a sample."""
        return LARGEST_FACTOR if self.factor == "auto" else math.ceil(self.factor)

    def dealt(self, seed: int, factors: Callable[[int], float] | None) -> EchoSequence:
        """The order of the copies. ``factors``: the factor of an epoch, for ``"auto"``."""
        if self.factor != "auto":
            return EchoSequence(self.factor, self.window, seed)
        if factors is None:
            raise TypeError('echo("auto") needs a function that returns the factor of an epoch')
        return EchoSequence(factors, self.window, seed, limit=LARGEST_FACTOR)

    def fingerprint(self) -> str | None:
        # The smallest window was the only default once. A larger one may change with the batch
        # size, which a checkpoint knows by itself.
        follows = self.by_batch and self.window != LEAST_WINDOW
        return fingerprint(("echo", self.factor, "by batch" if follows else self.window))

    def difference(self, old: str) -> str:
        if self.by_batch and old == replace(self, window=LEAST_WINDOW).fingerprint():
            return (
                f"echo has a window of {self.window} samples, which follows from the batch size, "
                f"and had {LEAST_WINDOW}, once the default for all batch sizes: to resume exactly, "
                f"give echo(..., window={LEAST_WINDOW})"
            )
        return ""

    def step(self, context: StepContext) -> Step:
        store, number, tally = self.store, self.number, context.tally
        if store is None:
            raise PipelineError(
                "echo() has no store, because the pipeline was not opened by a loader: a pipeline "
                "runs only through a loader. Iterate pipeline.loader()."
            )
        most, lends = self.most, self.lends
        claims = claims_of(self.claims)

        def get(key: Key) -> Any:
            return store.get_tagged([store_key(key.index, key.epoch)], [_tag(key, most)])[0]

        def get_or_prepare(key: Key, upstream: Upstream) -> Any:
            value = get(key)
            if value is None:
                # Another worker may be preparing a copy of this sample: wait for it.
                with claims.claim(store_key(key.index, key.epoch)):
                    value = get(key)
                    if value is None:
                        base = key.replica // most
                        fresh = upstream(Keys(key.epoch, [key.index], [base] if base else None))[0]
                        if not context.trial:
                            at = store_key(key.index, key.epoch)
                            store.put_tagged([(at, _tag(key, most), to_stored(fresh, lends))])
                        tally.misses[number] += 1
                        return fresh
            tally.hits[number] += 1
            return from_stored(value, store)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            return [get_or_prepare(key, upstream) for key in keys]

        return step


class EchoKeeper(Keeper):
    """Removes samples after their last copy. The loader adds the factor to its statistics."""

    def outdated(self, batch: BatchKeys) -> list[int]:
        spent = [] if batch.spent is None else batch.spent.tolist()
        return [store_key(index, batch.epoch) for index in spent]

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        return held._replace(echo=EchoStats(misses, misses + hits, 1.0))


@dataclass(frozen=True)
class StreamEcho(Stop):
    """An echo of samples on a stream. All copies of a sample come from the worker that read it.

    The worker asks for the copies of a block of samples, one after the other. The stop keeps what
    the stops above made of them. ``keeps`` is false: no other worker needs it.
    """

    repeats: ClassVar[bool] = True

    factor: float
    window: int
    by_batch: bool = False

    @property
    def name(self) -> str:
        return "echo"

    @property
    def note(self) -> str:
        return f"everything {self.factor:g} times, over a window of {self.window}"

    @property
    def as_call(self) -> str:
        return f".echo({self.factor!r}, window={self.window})"

    def for_batches(self, size: int) -> StreamEcho:
        return replace(self, window=default_window(size)) if self.by_batch else self

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        Echo(self.factor, self.window).check_above(above, random_source)

    def fingerprint(self) -> str | None:
        window = "by batch" if self.by_batch else self.window
        return fingerprint(("echo of a stream", self.factor, window))

    def stream_copies(self, seed: int) -> StreamCopies:
        return StreamCopies(self.factor, self.window, seed)

    def step(self, context: StepContext) -> Step:
        store = HeapStore(memory() // 4)
        room = self.stream_copies(0).per_block
        held: deque[int] = deque()

        def get(key: Key, upstream: Upstream) -> Any:
            # Tags are even, because a store takes tag + 1 for the successor of a value.
            value = store.get_tagged([key.index], [2 * key.epoch])[0]
            if value is not None:
                return from_stored(value, store)
            fresh = upstream(Keys(key.epoch, [key.index]))[0]
            # ``room`` is the size of a block: the oldest sample belongs to an earlier block.
            if len(held) == room:
                store.delete_many([held.popleft()])
            store.put_tagged([(key.index, 2 * key.epoch, to_stored(fresh, lends=False))])
            held.append(key.index)
            return fresh

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            return [get(key, upstream) for key in keys]

        return step


def echo_in(stops: Sequence[Stop]) -> Echo | None:
    """The echo among these stops; ``None`` if there is none."""
    return next((stop for stop in stops if isinstance(stop, Echo)), None)


def stream_copies_of(stops: Sequence[Stop], seed: int) -> StreamCopies | None:
    """How these stops repeat the samples of a stream; ``None`` if they do not."""
    found = (copies for stop in stops if (copies := stop.stream_copies(seed)) is not None)
    return next(found, None)


def make_echo(factor: Any, window: Any, *, of: Literal["samples", "batches"]) -> Echo:
    """An echo stop from the arguments of ``Pipeline.echo``. Raises PipelineError."""
    by_batch = window is None and of == "samples"
    if window is None:
        window = LEAST_WINDOW if of == "samples" else BATCH_WINDOW
    if factor != "auto" and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
        raise PipelineError(
            f"echo() got the factor {factor!r}. Give the number of times that a sample is used, "
            'such as 2 or 1.5, or "auto".'
        )
    made = Echo(factor, window, by_batch)
    checked = made.dealt(0, lambda epoch: 1.0)
    return made if factor == "auto" else Echo(float(factor), checked.window, by_batch)


def make_stream_echo(factor: Any, window: Any) -> StreamEcho:
    """An echo of samples on a stream. Raises PipelineError."""
    made = make_echo(factor, window, of="samples")
    if made.factor == "auto":
        raise PipelineError(
            'echo("auto") on a stream: the number of batches of an epoch would change while it is '
            "read. Give a number: how many times as long the stages above take as those below.",
            code="iterable-dataset",
        )
    return StreamEcho(made.factor, made.window, made.by_batch)


def _tag(key: Key, most: int) -> int:
    """The tag of a version in the store. Even, because a store takes tag + 1 for its successor."""
    return 2 * ((key.epoch << 24) + key.replica // most)
