"""What ``penstock run`` was told to change, and for which of a script's loaders it is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

EXTRAS = ("share", "reuse", "echo", "cache")
"""What a loader may have to do without, in the order in which they are tried."""

_NESTED = 8
"""How deep samplers around samplers are looked into; a bound, because they may form a ring."""


@dataclass(frozen=True)
class Wanted:
    """The options of the command, as plain data."""

    cache: str | None = None
    reuse: int | Literal["auto"] | None = None
    split: int | None = None
    echo: float | Literal["auto"] | None = None
    echo_at: str = "sample"
    share: str | None = None
    workers: int | Literal["auto"] | None = None
    kind: str = "auto"
    seed: int | None = None
    on_error: str = "raise"
    native: bool = False
    random: bool | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Wanted:
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in settings.items() if name in known})

    def extras(self, training: bool) -> tuple[str, ...]:
        """Those of EXTRAS that were asked for and are meant for such a loader."""
        meant = EXTRAS if training else ("cache",)
        return tuple(name for name in meant if getattr(self, name) is not None)

    def arguments(self, extras: tuple[str, ...]) -> dict[str, Any]:
        """Arguments of our loader for these extras."""
        made = {name: getattr(self, name) for name in extras}
        if "reuse" in extras:
            made["split"] = self.split
        if "echo" in extras:
            made["echo_at"] = self.echo_at
        return made

    def show(self, extras: tuple[str, ...]) -> list[str]:
        """The same for people."""
        made = self.arguments(extras)
        made.pop("share", None)  # whoever shows where the work is done shows that too
        return [
            f"{name.replace('_', '-')} {value}" for name, value in made.items() if value is not None
        ]


def shuffles(loader: Any) -> bool:
    """Whether a torch loader goes through its data in another order each time.

    That is taken for training, and what goes through the data in order for validation. The sampler
    is looked for inside of those that wrap it; one that is not known is a user's own and counts as
    a shuffle.
    """
    if loader._auto_collation:
        sampler = loader.batch_sampler
    else:
        sampler = loader.sampler
    for _ in range(_NESTED):
        if isinstance(getattr(sampler, "shuffle", None), bool):
            return bool(sampler.shuffle)
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            break
        sampler = inner
    in_order = ("SequentialSampler", "_InfiniteConstantSampler")
    return type(sampler).__name__ not in in_order and not isinstance(sampler, range)
