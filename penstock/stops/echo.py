"""The echo stop: each sample that comes from above is used several times (data echoing).

Copies of a sample carry replica numbers, so everything random below the stop differs between them,
and all above it is done once. Which copies come where is the order's to say; the stop keeps a
sample from its first copy to its last.
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
from penstock.stops.hold import Hold, Keeper, Opening, place, stored, taken
from penstock.stops.stop import Site, Step, Stop, Upstream
from penstock.store import SampleStore, ThreadClaims, claims_of, memory_store

MOST = 8
"""The largest factor that ``"auto"`` chooses. The authors of data echoing found gains up to 5."""

SAMPLES, BATCHES = 256, 4
"""The window where none is given. 256 decoded photographs take 140 MB, and spread the copies of one
over several batches; four batches are as many as are prepared ahead anyway."""


@dataclass(frozen=True)
class Echo(Hold):
    """Uses a sample ``factor`` times, its copies spread over ``window`` samples.

    Below ``batch`` it repeats batches, and is not asked for samples. ``claims``, by which workers
    agree on who prepares what, are set by its keeper.
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
    def written(self) -> str:
        return f".echo({self.factor!r}, window={self.window})"

    @property
    def measured(self) -> bool:
        return self.factor == "auto"

    def check_above(self, above: Sequence[Stop], random_source: bool) -> None:
        if any(stop.repeats for stop in above):
            raise PipelineError(
                "a second echo() in the pipeline: give one of them the product of both factors, "
                "and leave the other out."
            )

    def opened(self, opening: Opening) -> EchoKeeper:
        store = memory_store(memory() // 4, shared=opening.shared)
        stop = replace(
            self,
            number=opening.number,
            lends=opening.lends,
            store=store,
            claims=opening.claims(),
        )
        return EchoKeeper(stop, store)

    def tried(self, store: SampleStore, number: int, samples: int, seed: int) -> Echo:
        return replace(self, number=number, store=store)

    def hit_share(self, room: float) -> float | None:
        return None if self.factor == "auto" else 1 - 1 / self.factor

    @property
    def most(self) -> int:
        """How many copies of a sample there can be."""
        return MOST if self.factor == "auto" else math.ceil(self.factor)

    def dealt(self, seed: int, factors: Callable[[int], float] | None) -> EchoSequence:
        """How its copies are dealt; ``factors`` says what ``"auto"`` chose for an epoch."""
        if self.factor != "auto":
            return EchoSequence(self.factor, self.window, seed)
        if factors is None:
            raise TypeError("nobody chooses the factor")
        return EchoSequence(factors, self.window, seed, limit=MOST)

    def fingerprint(self) -> str | None:
        return fingerprint(("echo", self.factor, self.window))

    def step(self, site: Site) -> Step:
        store, number, tally = self.store, self.number, site.tally
        if store is None:
            raise PipelineError("echo() has no store: a pipeline runs only through a loader.")
        most, lends = self.most, self.lends
        claims = claims_of(self.claims)

        def get(key: Key) -> Any:
            return store.get_tagged([place(key.index, key.epoch)], [_tag(key, most)])[0]

        def one(key: Key, upstream: Upstream) -> Any:
            frame = get(key)
            if frame is None:
                # Another worker may be at a copy of it just now: then it is worth waiting for.
                with claims.claim(place(key.index, key.epoch)):
                    frame = get(key)
                    if frame is None:
                        base = key.replica // most
                        fresh = upstream(Keys(key.epoch, [key.index], [base] if base else None))[0]
                        if not site.trial:
                            at = place(key.index, key.epoch)
                            value: Any = stored(fresh, lends)
                            store.put_tagged([(at, _tag(key, most), value)])
                        tally.misses[number] += 1
                        return fresh
            tally.hits[number] += 1
            return taken(frame)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            return [one(key, upstream) for key in keys]

        return step


class EchoKeeper(Keeper):
    """Removes samples after their last copy. ``stats`` leaves the factor to the loader's echo."""

    def outdated(self, batch: BatchKeys) -> list[int]:
        spent = [] if batch.spent is None else batch.spent.tolist()
        return [place(index, batch.epoch) for index in spent]

    def stats(self, held: Held, hits: int, misses: int) -> Held:
        return held._replace(echo=EchoStats(misses, misses + hits, 1.0))


def echo_in(stops: Sequence[Stop]) -> Echo | None:
    """The echo among these stops."""
    return next((stop for stop in stops if isinstance(stop, Echo)), None)


def make_echo(factor: Any, window: Any, *, of: Literal["samples", "batches"]) -> Echo:
    """An echo stop, checked."""
    if window is None:
        window = SAMPLES if of == "samples" else BATCHES
    if factor != "auto" and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
        raise PipelineError(
            f"echo() got {factor!r}; give how often everything is used, such as 2 or 1.5, or "
            '"auto".'
        )
    made = Echo(factor, window)
    checked = made.dealt(0, lambda epoch: 1.0)
    return made if factor == "auto" else Echo(float(factor), checked.window)


def _tag(key: Key, most: int) -> int:
    """Which version of a sample: even, so that none is taken for the one that follows another."""
    return 2 * ((key.epoch << 24) + key.replica // most)
