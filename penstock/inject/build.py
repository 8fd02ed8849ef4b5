"""A torch DataLoader taken over: one of ours with the same arguments and those of the command."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, PipelineError
from penstock.inject.wanted import Wanted, shuffles

if TYPE_CHECKING:
    from penstock.inject.dealt import Dealt
    from penstock.torch import DataLoader

_TORCH_PREFETCH = 2
"""What torch sets where a script says nothing; our own choice is then the better one."""


@dataclass
class Upgraded:
    """What stands in for a torch loader: ``dealt`` is its order, ``None`` where that is ours."""

    loader: DataLoader
    dealt: Dealt | None
    stream: bool
    extras: tuple[str, ...] = ()
    missing: dict[str, PenstockError] = field(default_factory=dict)
    """Extras it has to do without, and why."""
    pid: int = field(default_factory=os.getpid)
    turn: int = 0
    """Counts the loops over it: the last one has it."""

    @property
    def echoes(self) -> bool:
        return "echo" in self.extras


class Builder:
    """Makes them, for one process; ``module`` is ``torch.utils.data.dataloader``."""

    def __init__(self, wanted: Wanted, module: Any) -> None:
        self._wanted = wanted
        self._module = module
        self._shared = 0

    def build(self, loader: Any) -> Upgraded:
        """Ours for this torch loader; raises what keeps it from being made."""
        self._check(loader)
        asked = self._wanted.extras(shuffles(loader))
        missing: dict[str, PenstockError] = {}
        try:
            made = self._make(loader, asked)
        except PenstockError as error:
            if not asked:
                raise
            made, missing = self._with_what_works(loader, asked, error)
        made.missing = missing
        if "share" in made.extras:
            self._shared += 1
        return made

    def _with_what_works(
        self, loader: Any, asked: tuple[str, ...], error: PenstockError
    ) -> tuple[Upgraded, dict[str, PenstockError]]:
        if len(asked) == 1:
            return self._make(loader, ()), {asked[0]: error}
        made = self._make(loader, ())
        missing: dict[str, PenstockError] = {}
        for name in asked:
            try:
                made = self._make(loader, (*made.extras, name))
            except PenstockError as why:
                missing[name] = why
        return made, missing

    def _check(self, loader: Any) -> None:
        dataset = type(loader.dataset)
        pipes = (self._module.IterDataPipe, self._module.MapDataPipe)
        if issubclass(dataset, pipes):
            raise PipelineError("torch's datapipes are sharded by torch's own workers.")

    def _make(self, loader: Any, extras: tuple[str, ...]) -> Upgraded:
        from penstock.torch import DataLoader

        wanted = self._wanted
        given = wanted.arguments(extras)
        stream = loader._dataset_kind == self._module._DatasetKind.Iterable
        ours = not stream and self._may_shuffle(loader) and bool({*extras} - {"cache"})
        if "share" in extras:
            given["share"] = self._name()
        seed = wanted.seed
        if seed is None and "share" in extras:
            seed = 0
        workers = loader.num_workers if wanted.workers is None else wanted.workers
        made = DataLoader(
            loader.dataset,
            **self._dealing(loader, stream, ours),
            **self._working(loader, workers),
            num_workers=workers,
            collate_fn=loader.collate_fn,
            # Without a device torch warns and does nothing, and ours would warn once more.
            pin_memory=loader.pin_memory and self._module.torch.cuda.is_available(),
            generator=None if seed is not None else loader.generator,
            in_order=getattr(loader, "in_order", True),
            seed=seed,
            random=wanted.random,
            kind=wanted.kind,  # type: ignore[arg-type]
            on_error=wanted.on_error,  # type: ignore[arg-type]
            native=wanted.native,
            **given,
        )
        dealt = None if stream or ours else self._follow(loader, made, "echo" in extras)
        return Upgraded(made, dealt, stream, extras)

    def _dealing(self, loader: Any, stream: bool, ours: bool) -> dict[str, Any]:
        """Batch size and order, as they are given to a loader."""
        if not loader._auto_collation:
            return {"batch_size": None, "sampler": None if stream else loader.sampler}
        if loader.batch_size is None:
            return {"batch_sampler": loader.batch_sampler}
        made = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if stream:
            return made
        return {**made, "shuffle": True} if ours else {**made, "sampler": loader.sampler}

    def _working(self, loader: Any, workers: Any) -> dict[str, Any]:
        """What is said about workers, where there are any."""
        if workers == 0:
            return {}
        factor = loader.prefetch_factor if loader.num_workers == workers else None
        return {
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": None if factor == _TORCH_PREFETCH else factor,
            "persistent_workers": loader.persistent_workers,
        }

    def _may_shuffle(self, loader: Any) -> bool:
        """Whether all the script asked for is a shuffle, which we may as well do ourselves.

        Refurbish, echo and share are better off, or only possible, with an order of ours. Ranks
        that each shuffle everything would get disjoint parts, so they keep their own.
        """
        module, sampler = self._module, loader.sampler
        alone = not (module.dist.is_available() and module.dist.is_initialized())
        return (
            alone
            and loader.batch_size is not None
            and type(sampler) is module.RandomSampler
            and not sampler.replacement
            and sampler._num_samples is None
        )

    def _name(self) -> str:
        """Jobs of one name must mean the same, so each loader of a script has one of its own."""
        return (
            f"{self._wanted.share}-{self._shared + 1}" if self._shared else f"{self._wanted.share}"
        )

    def _follow(self, loader: Any, made: DataLoader, echoes: bool) -> Dealt:
        """Have it deal what the script's own sampler draws from the script's generators."""
        from penstock.inject.dealt import Dealt

        sampler = loader._index_sampler
        # Echo spreads copies over an epoch, so it must know how long that is.
        total = (lambda: len(sampler)) if echoes else None
        dealt = Dealt(len(loader.dataset), not loader._auto_collation, total)
        made._loader = made._loader.remade(plan=lambda *_: dealt)
        return dealt
