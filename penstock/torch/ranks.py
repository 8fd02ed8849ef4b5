"""Finds the rank and the world of this process, when a loader first needs them.

A training script may make its loaders before it initialises the process group, so they are not
looked for when a loader is made.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch.distributed
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from penstock import config
from penstock.errors import PipelineError
from penstock.options import Options

_log = logging.getLogger("penstock.torch")

ForOneProcess = (RandomSampler, SequentialSampler, WeightedRandomSampler)
"""torch's samplers that draw from the whole dataset, in every process. ``SubsetRandomSampler`` is
not one of them: its indices may be the part of a rank."""


def shared_seed() -> int:
    """The seed of loaders without one, if there are several ranks: they must agree on the order.

    That of Lightning's ``seed_everything``, or 0, as for the ``DistributedSampler`` that Lightning
    makes. torch's initial seed may differ between ranks, so torch's own samplers ignore it too.
    """
    given = os.environ.get("PL_GLOBAL_SEED", "")
    return int(given) if given.isdecimal() else 0


class Origin(IntEnum):
    """What told the rank. A later one is more reliable."""

    NOTHING = 0
    ENVIRONMENT = 1
    GROUP = 2


class FoundRank(NamedTuple):
    """The rank of this process, the number of ranks, and what says so.

    ``words``: the variables of the environment that were read, for messages.
    """

    rank: int
    world: int
    origin: Origin
    words: str = ""

    @property
    def incomplete(self) -> bool:
        """Whether a launcher gave the number of processes, but not the rank of this one."""
        return self.origin is Origin.NOTHING and bool(self.words)


def find_rank() -> FoundRank:
    """The rank in the process group, or else in the environment of the launcher."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return FoundRank(distributed.get_rank(), distributed.get_world_size(), Origin.GROUP)
    launched = config.launched_rank()
    if launched is None or launched.world < 2:
        return FoundRank(0, 1, Origin.NOTHING)
    if launched.rank is None:
        return FoundRank(0, 1, Origin.NOTHING, launched.names)
    return FoundRank(launched.rank, launched.world, Origin.ENVIRONMENT, launched.names)


def given_rank(rank: int | None, world: int | None) -> tuple[int, int] | None:
    """The arguments ``rank`` and ``world``; ``None`` if neither is given."""
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        given, missing = ("world", "rank") if rank is None else ("rank", "world")
        value = world if rank is None else rank
        raise PipelineError(
            f"{given}={value!r} without {missing}. Give both, or neither: then they are taken from "
            "torch.distributed, or from the environment of the launcher."
        )
    return rank, world


class RankFinder:
    """The rank and world of a loader that divides its samples over the ranks.

    They are looked for at the first loop and the first ``len``, and again at the start of each
    loop. ``seed``: returns that of several ranks, which must agree on the order, if the user gave
    none.
    ``drop_in``: torch's loader in its place would give every rank all samples, so it is logged that
    this one does not.
    """

    def __init__(self, seed: Callable[[], int] | None = None, *, drop_in: bool = False) -> None:
        self._seed = seed
        self._drop_in = drop_in
        self._found: FoundRank | None = None
        self._used: FoundRank | None = None
        self._warned = False

    def place(self, options: Options, reason: Literal["loop", "length", "state"]) -> Options:
        """The options with the rank and world of this process as they are now known."""
        found = find_rank()
        # A process group that was destroyed says nothing new.
        if self._found is None or found.origin >= self._found.origin:
            self._found = found
        found = self._found
        if reason == "loop":
            self._warn_of_doubts(found)
        self._warn_of_change(found)
        if reason != "state":
            self._used = found
        seed = options.seed if self._seed is None or found.world == 1 else self._seed()
        return replace(options, rank=found.rank, world=found.world, seed=seed)

    def keep_seed(self) -> None:
        """Leave the seed as it is from now on: it is that of a checkpoint."""
        self._seed = None

    def _warn_of_doubts(self, found: FoundRank) -> None:
        if self._drop_in and found.origin is Origin.GROUP and found.world > 1:
            self._drop_in = False
            _log.warning(
                "this DataLoader has no sampler and delivers the part of rank %d of %d. torch's "
                "would give every rank all samples: give rank=0, world=1 for that, or a "
                "DistributedSampler for torch's way to divide them.",
                found.rank,
                found.world,
            )
        if self._warned or found.origin is Origin.GROUP or not found.words:
            return
        self._warned = True
        if found.incomplete:
            _warn(
                f"the environment says {found.words}, but not which rank this process is, and "
                "torch.distributed is not initialised: this loader delivers all samples. "
                "Initialise the process group before the first loop, or give rank= and world=."
            )
        else:
            _warn(
                f"torch.distributed is not initialised. The environment says {found.words}, so "
                f"this loader delivers the part of rank {found.rank} of {found.world}. Initialise "
                "the process group before the first loop, or give rank= and world=; with rank=0, "
                "world=1 every process gets all samples."
            )

    def _warn_of_change(self, found: FoundRank) -> None:
        used = self._used
        if used is None or used[:2] == found[:2]:
            return
        _warn(
            f"this loader was used as rank {used.rank} of {used.world}, and this process is now "
            f"rank {found.rank} of {found.world}. The loader delivers its part from this epoch on; "
            "len() taken before is out of date. Initialise the process group before you use a "
            "loader, or give the loader rank= and world=."
        )

    def __str__(self) -> str:
        if self._found is None:
            return "rank not known yet"
        return f"rank {self._found.rank} of {self._found.world}"


class Undivided:
    """The ranks of a loader that leaves its samples to a sampler or a stream.

    Every rank gets all that the sampler or the stream yields. ``what`` names it. ``doubt`` is the
    warning if there are several ranks: a reason, and what to do; ``None`` if the sampler may well
    divide the samples itself.
    """

    def __init__(self, what: str, doubt: tuple[str, str] | None = None) -> None:
        self._what = what
        self._doubt = doubt

    def place(self, options: Options, reason: Literal["loop", "length", "state"]) -> Options:
        """The options as they are, after a warning if there are several ranks."""
        if reason == "loop" and self._doubt is not None:
            found = find_rank()
            if found.world > 1:
                (why, remedy), self._doubt = self._doubt, None
                _warn(
                    f"{why}, so each of the {found.world} ranks gets all of them. {remedy} If that "
                    "is done, or all ranks are to get the same, give rank=0, world=1."
                )
        return options

    def keep_seed(self) -> None:
        """Nothing to do: the seed always stays as it is."""

    def __str__(self) -> str:
        return f"ranks left to {self._what}"


def of_sampler(sampler: Any) -> Undivided:
    """The ranks of a loader with a sampler or batch sampler of the user."""
    name = type(sampler).__name__
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(inner) not in ForOneProcess:
        return Undivided(name)
    reason = f"{type(inner).__name__} draws from all samples of the dataset"
    remedy = "Use a DistributedSampler, or leave out the sampler: then each rank gets a part."
    return Undivided(name, (reason, remedy))


def of_stream(dataset: Any) -> Undivided:
    """The ranks of a loader of a stream."""
    reason = f"a loader cannot divide the samples of a stream ({type(dataset).__name__})"
    remedy = "Divide the stream where it is made, by the rank."
    return Undivided("the stream", (reason, remedy))


def _warn(text: str) -> None:
    # From the loop or len(): over this function, its method, place() and two methods of loaders.
    warnings.warn(text, UserWarning, stacklevel=6)
