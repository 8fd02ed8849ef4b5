"""What may stand where on a road, and why the rest may not."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PipelineError
from penstock.stops.echo import Echo
from penstock.stops.map import Map
from penstock.stops.refurbish import Refurbish
from penstock.stops.stop import Stop


def check_cache(above: Sequence[Stop], random_source: bool) -> None:
    """A cache keeps a sample for good, so nothing random may stand above it."""
    if random_source:
        raise PipelineError(
            "cache() stands below a dataset that may be random: a cached sample would never "
            "change again. If it is not random, say so with from_dataset(..., random=False); "
            "if it is, leave augmentation out of it and put it below cache() as a map.",
            code="random-above-cache",
        )
    for stop in above:
        if is_random(stop):
            raise PipelineError(
                f"cache() stands below {stop.name} (a random map): a cached sample would never "
                f"change again. Use refurbish(reuse=...) here, or move cache() above {stop.name}; "
                "or, if it is not random, say so with map(..., random=False)."
            )


def check_refurbish(above: Sequence[Stop], random_source: bool) -> None:
    """Refurbish keeps what is random, once on a road, and not the copies of an echo."""
    for stop in above:
        if isinstance(stop, Refurbish):
            raise PipelineError(
                "a second refurbish() on the road: the epochs that renew a sample would no longer "
                "be level. Leave one of them out."
            )
        if isinstance(stop, Echo):
            raise PipelineError(
                "refurbish() stands below echo(): it would give every copy the same kept sample. "
                "Put echo() below refurbish(), or leave it out and raise reuse."
            )
    if not random_source and not any(map(is_random, above)):
        raise PipelineError(
            "refurbish() has nothing random above it: what it keeps would never have to be made "
            "again. Use cache() here."
        )


def check_echo(above: Sequence[Stop], echoed: Echo | None) -> None:
    """One echo is enough."""
    if echoed is not None or any(isinstance(stop, Echo) for stop in above):
        raise PipelineError(
            "a second echo() on the road: give one of them the product of both factors, and leave "
            "the other out."
        )


def check_road(stops: Sequence[Stop]) -> None:
    """What is only known once the road is complete."""
    for place, stop in enumerate(stops):
        if not isinstance(stop, Refurbish) or stop.reuse in (1, "auto"):
            continue
        if not any(map(is_random, stops[place + 1 :])):
            raise PipelineError(
                f"refurbish(reuse={stop.reuse}) has no random map below it: the very same sample "
                f"would come {stop.reuse} times. Move one of the random maps from above it to "
                "below it; or say that this is what you want with echo().",
                code="nothing-random-below-refurbish",
            )


def is_random(stop: Stop) -> bool:
    return isinstance(stop, Map) and stop.random
