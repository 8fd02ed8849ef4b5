"""The echo stop: each sample from above is used several times (data echoing).

Copies of a sample have different replica numbers, so every random map below the stop treats them
differently; everything above the stop runs once. The order decides which copy is in which batch.
The stop keeps a sample from its first copy to its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.config import memory
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.keyed import Key, Keys
from penstock.order import BatchKeys, EchoSequence
from penstock.stats import EchoStats, Held
from penstock.stops.hold import Hold, Keeper, Opening, from_stored, store_key, to_stored
from penstock.stops.stop import Step, StepContext, Stop, Upstream
from penstock.store import SampleStore, ThreadClaims, claims_of, memory_store

LARGEST_FACTOR = 8
"""The largest factor that ``"auto"`` chooses. The authors of data echoing found gains up to 5."""

SAMPLE_WINDOW, BATCH_WINDOW = 256, 4
"""The default windows. 256 decoded photographs take 140 MB, and spread the copies of one over
several batches; four batches are as many as are prepared ahead anyway."""


@dataclass(frozen=True)
class Echo(Hold):
    """Uses each sample ``factor`` times, its copies spread over ``window`` samples.

    Below ``batch`` it repeats whole batches, and its step does not run. ``claims``: with these
    workers agree on who prepares a sample; set when a loader opens the pipeline.
    """

    repeats: ClassVar[bool] = True

    factor: float | Literal["auto"]
    window: int
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
        return fingerprint(("echo", self.factor, self.window))

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


def echo_in(stops: Sequence[Stop]) -> Echo | None:
    """The echo among these stops; ``None`` if there is none."""
    return next((stop for stop in stops if isinstance(stop, Echo)), None)


def make_echo(factor: Any, window: Any, *, of: Literal["samples", "batches"]) -> Echo:
    """An echo stop from the arguments of ``Pipeline.echo``. Raises PipelineError."""
    if window is None:
        window = SAMPLE_WINDOW if of == "samples" else BATCH_WINDOW
    if factor != "auto" and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
        raise PipelineError(
            f"echo() got the factor {factor!r}. Give the number of times that a sample is used, "
            'such as 2 or 1.5, or "auto".'
        )
    made = Echo(factor, window)
    checked = made.dealt(0, lambda epoch: 1.0)
    return made if factor == "auto" else Echo(float(factor), checked.window)


def _tag(key: Key, most: int) -> int:
    """The tag of a version in the store. Even, because a store takes tag + 1 for its successor."""
    return 2 * ((key.epoch << 24) + key.replica // most)
