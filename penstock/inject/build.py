"""Penstock's loader for a torch DataLoader: the script's arguments plus those of the command."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import PenstockError, PipelineError, SampleError

if TYPE_CHECKING:
    from penstock.loader import Loader
    from penstock.torch import DataLoader
    from penstock.torch.sampler_plan import SamplerPlan

EXTRAS = ("cluster", "share", "reuse", "echo", "cache")
"""Options that a loader is built without if they do not work, in the order of the attempts."""

_TORCH_PREFETCH = 2
"""torch's default. A script that does not set the value gets Penstock's own default instead."""

_NESTED = 8
"""Most samplers around samplers that are unwrapped. A limit, because they may form a ring."""


@dataclass(frozen=True)
class RunOptions:
    """The options of ``penstock run``, as plain data."""

    cache: str | None = None
    reuse: int | Literal["auto"] | None = None
    split: int | None = None
    echo: float | Literal["auto"] | None = None
    echo_at: str = "sample"
    share: str | None = None
    cluster: str | None = None
    workers: int | Literal["auto"] | None = None
    kind: str = "auto"
    seed: int | None = None
    on_error: str = "raise"
    native: bool = False
    random: bool | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RunOptions:
        """The options among the settings of the task."""
        known = {option.name for option in fields(cls)}
        return cls(**{name: value for name, value in settings.items() if name in known})

    def extras(self, training: bool) -> tuple[str, ...]:
        """The given options among ``EXTRAS``; only the cache if the loader is not for training."""
        applicable = EXTRAS if training else ("cache",)
        return tuple(name for name in applicable if getattr(self, name) is not None)

    def arguments(self, extras: tuple[str, ...]) -> dict[str, Any]:
        """Arguments of ``penstock.torch.DataLoader`` for these extras."""
        arguments = {name: getattr(self, name) for name in extras}
        if "reuse" in extras:
            arguments["split"] = self.split
        if "echo" in extras:
            arguments["echo_at"] = self.echo_at
        return arguments

    def show(self, extras: tuple[str, ...]) -> list[str]:
        """The arguments for these extras as text, for messages."""
        arguments = self.arguments(extras)
        arguments.pop("share", None)  # the description of the workers names the share
        return [
            f"{name.replace('_', '-')} {value}"
            for name, value in arguments.items()
            if value is not None
        ]


def shuffles(loader: Any) -> bool:
    """Whether a torch loader goes through its data in another order each time.

    A loader that does is taken for training, one that reads in order for validation. Samplers that
    wrap another sampler are unwrapped. An unknown sampler, the user's own, counts as a shuffle.
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


@dataclass
class Upgraded:
    """Penstock's replacement for a torch loader.

    ``plan`` follows the script's own sampler; ``None`` if Penstock decides the order, or if the
    dataset is a stream.
    """

    loader: DataLoader
    plan: SamplerPlan | None
    stream: bool
    extras: tuple[str, ...] = ()
    missing: dict[str, PenstockError] = field(default_factory=dict)
    """Extras that it was built without, each with the reason."""
    pid: int = field(default_factory=os.getpid)
    turn: int = 0
    """Number of loops begun over it. Only the latest loop may use it."""
    seed: int | None = None
    """The last seed that a loop has drawn for workers."""
    given_up: Callable[[PenstockError], None] = lambda _: None
    """Called when torch's own iterator takes over."""

    @property
    def echoes(self) -> bool:
        return "echo" in self.extras

    # What an iteration needs to know; see ``penstock.torch.iteration.Prepared``.

    @property
    def inner(self) -> Loader:
        return self.loader._loader

    @property
    def keyed(self) -> bool:
        return False

    @property
    def may_go_back(self) -> bool:
        return not self.echoes

    def another(self) -> Upgraded:
        raise NotImplementedError("an earlier loop goes on with torch's own iterator")

    def goes_back(self, error: PenstockError) -> bool:
        return True

    def give_up(self, error: PenstockError) -> None:
        self.given_up(error)

    def failed(self, error: SampleError) -> BaseException:
        from penstock.torch.iteration import original_exception

        return original_exception(error)


class Builder:
    """Builds the replacements of one process. ``module`` is ``torch.utils.data.dataloader``."""

    def __init__(self, options: RunOptions, module: Any) -> None:
        self._options = options
        self._module = module
        self._shared = 0
        self._clustered = 0

    def build(self, loader: Any) -> Upgraded:
        """The replacement for this torch loader. Raises the reason if there can be none."""
        self._check(loader)
        extras = self._options.extras(shuffles(loader))
        missing: dict[str, PenstockError] = {}
        try:
            upgraded = self._make(loader, extras)
        except PenstockError as error:
            if not extras:
                raise
            upgraded, missing = self._with_working_extras(loader, extras, error)
        upgraded.missing = missing
        self._shared += "share" in upgraded.extras
        self._clustered += "cluster" in upgraded.extras
        return upgraded

    def _with_working_extras(
        self, loader: Any, extras: tuple[str, ...], error: PenstockError
    ) -> tuple[Upgraded, dict[str, PenstockError]]:
        if len(extras) == 1:
            return self._make(loader, ()), {extras[0]: error}
        upgraded = self._make(loader, ())
        missing: dict[str, PenstockError] = {}
        for name in extras:
            try:
                upgraded = self._make(loader, (*upgraded.extras, name))
            except PenstockError as why:
                missing[name] = why
        return upgraded, missing

    def _check(self, loader: Any) -> None:
        dataset = type(loader.dataset)
        pipes = (self._module.IterDataPipe, self._module.MapDataPipe)
        if issubclass(dataset, pipes):
            raise PipelineError(
                "its dataset is a torch datapipe, and only torch's own workers can shard these."
            )

    def _make(self, loader: Any, extras: tuple[str, ...]) -> Upgraded:
        from penstock.torch import DataLoader

        options = self._options
        arguments = options.arguments(extras)
        stream = loader._dataset_kind == self._module._DatasetKind.Iterable
        own_order = not stream and self._may_shuffle(loader) and bool({*extras} - {"cache"})
        if "share" in extras:
            arguments["share"] = self._share_name()
        elif "cluster" in extras and (rank := self._rank()) is not None:
            # Every rank has the batches of its own sampler, so none are shared with other ranks.
            arguments["share"] = f"run-{self._clustered + 1}-rank-{rank}"
        seed = options.seed
        if seed is None and {"cluster", "share"} & {*extras}:
            seed = 0
        workers = loader.num_workers if options.workers is None else options.workers
        ours = DataLoader(
            loader.dataset,
            **self._batch_arguments(loader, stream, own_order),
            **self._worker_arguments(loader, workers),
            num_workers=workers,
            collate_fn=loader.collate_fn,
            # Without a device torch warns and does nothing, and ours would warn once more.
            pin_memory=loader.pin_memory and self._module.torch.cuda.is_available(),
            generator=None if seed is not None else loader.generator,
            in_order=getattr(loader, "in_order", True),
            seed=seed,
            random=options.random,
            kind=options.kind,  # type: ignore[arg-type]
            on_error=options.on_error,  # type: ignore[arg-type]
            native=options.native,
            # torch divides nothing by itself; a script does that with its sampler.
            rank=0,
            world=1,
            **arguments,
        )
        plan = None if stream or own_order else self._follow_sampler(loader, ours, "echo" in extras)
        return Upgraded(ours, plan, stream, extras)

    def _batch_arguments(self, loader: Any, stream: bool, own_order: bool) -> dict[str, Any]:
        """The arguments for batch size and order."""
        if not loader._auto_collation:
            return {"batch_size": None, "sampler": None if stream else loader.sampler}
        if loader.batch_size is None:
            return {"batch_sampler": loader.batch_sampler}
        arguments = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if stream:
            return arguments
        order = {"shuffle": True} if own_order else {"sampler": loader.sampler}
        return {**arguments, **order}

    def _worker_arguments(self, loader: Any, workers: Any) -> dict[str, Any]:
        """The arguments for workers; none if there are no workers."""
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
        """Whether the script asks for a plain shuffle, which Penstock may do in torch's place.

        Refurbish, echo and share work better, or only, with an order of Penstock's own. With
        several ranks the script's order stays: torch's plain shuffle gives every rank all the data,
        Penstock's would give the ranks disjoint parts.
        """
        module, sampler = self._module, loader.sampler
        return (
            self._rank() is None
            and loader.batch_size is not None
            and type(sampler) is module.RandomSampler
            and not sampler.replacement
            and sampler._num_samples is None
        )

    def _rank(self) -> int | None:
        """The rank of this process in torch's process group; ``None`` if there is none."""
        dist = self._module.dist
        return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else None

    def _share_name(self) -> str:
        """The share of the next loader: jobs that use one name must load the same data.

        So every loader of a script has a name of its own.
        """
        return (
            f"{self._options.share}-{self._shared + 1}"
            if self._shared
            else f"{self._options.share}"
        )

    def _follow_sampler(self, loader: Any, ours: DataLoader, echoes: bool) -> SamplerPlan:
        """Make our loader deliver the batches that the script's own sampler draws."""
        from penstock.torch.sampler_plan import SamplerPlan

        inner = ours._loader  # an error if only torch's own iterator can read the dataset
        sampler = loader._index_sampler
        # Echo spreads copies over an epoch, so it must know the length of the epoch.
        total = (lambda: len(sampler)) if echoes else None
        plan = SamplerPlan(len(loader.dataset), not loader._auto_collation, total)
        ours._loader = inner.remade(plan=lambda *_: plan)
        return plan
