"""The drop-in for ``torch.utils.data.DataLoader``: the same arguments, on Penstock's engine.

It is a subclass of torch's, with real samplers, and all of its arguments are attributes: trainers
that look for a DataLoader find one, and those that make it anew with another sampler make one of
this class. Accelerate makes a plain one, so it has an integration: ``penstock.torch.accelerate``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import multiprocessing
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Literal, NoReturn

import torch
import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data._utils.collate import default_convert
from typing_extensions import TypeVar  # with a default; torch needs this package too

from penstock import config
from penstock.device.choose import DevicePrep
from penstock.engine.pools.launch import ChooseStart, StartMethod, as_fork, as_program
from penstock.errors import PenstockError, PipelineError, SampleError, StateError
from penstock.loader import Custom, Loader, Ranks
from penstock.operation import Operation
from penstock.options import CLUSTER_SHARE, Kind, Options, is_whole
from penstock.order import Sampled
from penstock.order.plan import Plan
from penstock.serialize import pack
from penstock.source import is_stream
from penstock.source.dataset import DatasetSource
from penstock.source.stream import is_stateful
from penstock.stats import Stats
from penstock.stops.batch import Collate
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING
from penstock.torch.accelerate import integrate, remember
from penstock.torch.batches import Tensors
from penstock.torch.dataset import (
    EchoPlace,
    ReuseOptions,
    add_echo,
    build_pipeline,
    reads_together,
    refuse,
)
from penstock.torch.delivering import delivering
from penstock.torch.failed_sample import of_both_kinds
from penstock.torch.iteration import Iteration, OwnOrder, torch_iterator
from penstock.torch.ranks import (
    RankFinder,
    Undivided,
    given_rank,
    of_sampler,
    of_stream,
    shared_seed,
)
from penstock.torch.sampler_plan import SamplerPlan, TorchDraws
from penstock.torch.worker import TorchWorkerSetup
from penstock.torch.worker import default_collate as fallback_collate

_log = logging.getLogger("penstock.torch")


T = TypeVar("T", covariant=True, default=Any)

OWN_ARGUMENTS = (
    *(
        "device",
        "device_normalize",
        "device_prep",
        "cache",
        "cache_where",
        "seed",
        "random",
        "kind",
        "tiny_batch",
        "on_error",
    ),
    *("native", "memory", "reuse", "split", "partial", "final", "reuse_size", "reuse_where"),
    *("reuse_encode", "echo", "echo_at", "echo_window", "share", "lag", "join", "cluster"),
    *("rank", "world", "metrics_port"),
)
"""The arguments that torch's DataLoader does not have."""

_COUNT_LATER = frozenset(
    {"collate_fn", "worker_init_fn", "num_workers", "pin_memory", "timeout", "in_order"}
    | {"multiprocessing_context", "prefetch_factor", *OWN_ARGUMENTS}
)
"""Attributes that may be assigned to; the new value counts from the next loop on."""

_OF_RANKS = ("rank", "world", "metrics_port")
"""Arguments that a loader made like another does not take over: a port can be used once."""

_TORCH_PREFETCH = 2
"""torch's default. A loader that has it prepares as many batches ahead as Penstock chooses."""


class DataLoader(torch.utils.data.DataLoader[T], Generic[T]):  # type: ignore[misc]
    """Replaces ``torch.utils.data.DataLoader``: the same arguments, the same batches.

    In addition to torch's arguments it takes:

    - ``device``: deliver batches to this device, such as ``"cuda"``, ahead of the loop. The last
      transform is done there if it is ``Normalize`` and ``native`` applies, with the same values;
      ``device_normalize=False`` leaves it to the workers.
    - ``device_prep``: ``"auto"`` lets the device prepare a share of each batch where it can: for an
      ``ImageFolder`` to which ``native`` applies, with ``kind="threads"``. ``True`` makes it an
      error if it cannot.
    - ``cache``: size of a cache of the samples, such as ``"8GB"``; ``cache_where``: ``"memory"``,
      ``"disk"`` or a directory.
    - ``seed``: fixes the order and the augmentation. By default it is the seed of ``generator``, or
      torch's initial seed.
    - ``random``: ``False`` says that the dataset draws no random numbers. Then the global
      generators are not seeded before each sample.
    - ``kind``: ``"threads"``, ``"processes"`` or ``"crew"`` (processes with several threads each),
      instead of an automatic choice.
    - ``tiny_batch``: how many samples a worker gets at a time, instead of an automatic choice.
    - ``on_error``: ``"raise"``, ``"skip"`` or ``"substitute"`` for samples that fail.
    - ``native``: an ``ImageFolder`` is taken apart, and operations of ``penstock.image`` replace
      torchvision's transforms where they are equivalent. ``False`` keeps torchvision's transforms.
    - ``memory``: limit on the shared memory of batches.
    - ``reuse``: how often a partly transformed sample is used (refurbishing). Which transforms run
      every time is said by ``split``, their number at the end of the ``Compose``, or by ``partial``
      and ``final``, two callables. ``reuse_size``, ``reuse_where`` and ``reuse_encode`` say how
      much is kept, where, and in which encoding.
    - ``echo``: how often every sample or batch is used (data echoing). ``echo_at`` is ``"sample"``
      (before the augmentation), ``"augmented"`` (after it) or ``"batch"``; ``echo_window`` is the
      number of samples, or of batches, over which the copies are spread.
    - ``share``: the name of a group of jobs on this machine. Each batch is prepared once for all of
      them, by the workers of a background process, and ``num_workers`` is not used. ``lag="wait"``
      makes the others wait for the slowest job; with ``"detach"`` they do not. ``join="start"``
      makes a job that joins late begin with the first batch.
    - ``cluster``: joins the caches of several machines into one: ``"auto"``, or the addresses of
      machines. Batches are prepared as with ``share``.
    - ``rank`` and ``world``: which part of every epoch this process gets. By default they are those
      of ``torch.distributed``, or else of the launcher's environment, as they are when the first
      loop begins. With a sampler or a stream nothing is divided.
    - ``metrics_port``: serve metrics for Prometheus on this port of the local address.

    Augmentation is keyed by (seed, epoch, sample index). So batches do not depend on
    ``num_workers``, and ``load_state_dict`` resumes exactly.

    >>> import torch
    >>> from penstock.torch import DataLoader
    >>> data = torch.utils.data.TensorDataset(torch.arange(4.0), torch.arange(4))
    >>> for x, y in DataLoader(data, batch_size=2):
    ...     print(x, y)
    tensor([0., 1.]) tensor([0, 1])
    tensor([2., 3.]) tensor([2, 3])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: str | torch.device | None = None,
        device_normalize: bool = True,
        device_prep: DevicePrep = False,
        cache: int | str | None = None,
        cache_where: str = "memory",
        seed: int | None = None,
        random: bool | None = None,
        kind: Kind = "auto",
        tiny_batch: int | Literal["auto"] = "auto",
        on_error: Literal["raise", "skip", "substitute"] = "raise",
        native: bool = True,
        memory: int | str | None = None,
        reuse: int | Literal["auto"] | None = None,
        split: int | None = None,
        partial: Operation | Callable[..., Any] | None = None,
        final: Operation | Callable[..., Any] | None = None,
        reuse_size: int | str | None = None,
        reuse_where: str = "memory",
        reuse_encode: str = DEFAULT_ENCODING,
        echo: float | Literal["auto"] | None = None,
        echo_at: EchoPlace = "sample",
        echo_window: int | None = None,
        share: str | None = None,
        lag: Literal["detach", "wait"] = "detach",
        join: Literal["live", "start"] = "live",
        cluster: str | None = None,
        rank: int | None = None,
        world: int | None = None,
        metrics_port: int | None = None,
    ) -> None:
        streaming = is_stream(dataset)
        num_workers, prefetch_factor = _as_int(num_workers), _as_int(prefetch_factor)
        if cluster is not None and share is None:
            share = CLUSTER_SHARE
        _check(
            streaming=streaming,
            shuffles_itself=isinstance(dataset, IterDataPipe),
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            shared=share is not None,
            drop_last=drop_last,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        if cache is None and cache_where != "memory":
            refuse(
                f"cache_where={cache_where!r} has no effect without cache. Give cache, such as "
                'cache="8GB", or leave out cache_where.'
            )
        self._given_up = self._closed = self._torchs_order_loaded = False
        self._prepared: _Backing | None = None
        self._dataset_watch: DatasetWatch | None = None
        if share is not None:
            _check_shared(share, streaming=streaming, worker_init_fn=worker_init_fn)
            if not persistent_workers:
                self._dataset_watch = DatasetWatch(dataset, share)
        self._streaming = streaming
        self._auto_workers = num_workers == "auto"
        count = (1 if streaming else config.cores()) if num_workers == "auto" else num_workers
        self._own_sampler = sampler is not None or batch_sampler is not None
        self._shuffles = bool(shuffle)
        self._persistent, self._prefetch = persistent_workers, prefetch_factor
        super().__init__(
            dataset,
            batch_size=1 if batch_sampler is not None else batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=count,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context if share is None or count else None,
            generator=generator,
            prefetch_factor=prefetch_factor if count else None,
            persistent_workers=persistent_workers and count > 0,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.device, self.device_normalize = device, device_normalize
        self.device_prep = device_prep
        self.cache, self.cache_where = cache, cache_where
        self.seed, self.random = seed, random
        self.kind, self.tiny_batch, self.on_error = kind, tiny_batch, on_error
        self.native, self.memory = native, memory
        self.reuse, self.split = reuse, split
        self.partial, self.final = partial, final
        self.reuse_size, self.reuse_where, self.reuse_encode = reuse_size, reuse_where, reuse_encode
        self.echo, self.echo_at, self.echo_window = echo, echo_at, echo_window
        self.share, self.lag, self.join, self.cluster = share, lag, join, cluster
        self.rank, self.world = rank, world
        self.metrics_port = metrics_port

        self._given_rank = given_rank(rank, world)
        if self._given_rank is not None and self._given_rank[1] != 1 and self._own_sampler:
            refuse(
                f"world={world} with a sampler, which decides itself which samples a rank gets. "
                "Leave out rank and world, or the sampler."
            )
        self._seed_is_given = seed is not None
        """Penstock decides the order, by a seed of the user or of a checkpoint."""
        self._ranks: RankFinder | Undivided | None = None
        if self._given_rank is None:
            if streaming:
                self._ranks = of_stream(dataset)
            elif self._own_sampler:
                self._ranks = of_sampler(sampler if batch_sampler is None else batch_sampler)
            else:
                agreed = shared_seed
                if generator is not None:
                    agreed = functools.partial(int, generator.initial_seed() % 2**63)
                self._ranks = RankFinder(None if seed is not None else agreed, drop_in=True)
        self._loop: weakref.ref[Any] | None = None
        self._make(self._first_seed())
        integrate()
        remember(self)

    # How it is made.

    @property
    def dataset(self) -> Any:
        """The dataset. Whoever makes a loader anew reads it first, so integrations begin here."""
        integrate()
        return self.__dict__["dataset"]

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset
        if "_prepared" in self.__dict__:  # a finished loader, as object.__setattr__ replaces it
            self.__dict__["_stale"] = True

    def _first_seed(self) -> int:
        """The seed of the order and of random choices; 0 where torch's own seeds are followed."""
        if self.seed is not None:
            return self.seed
        divided = self._given_rank is not None and self._given_rank[1] != 1
        if not (divided or self._asks_for_own_order):
            return 0
        if self.generator is not None:
            return int(self.generator.initial_seed() % 2**63)
        return shared_seed() if divided else int(torch.initial_seed() % 2**63)

    @property
    def _asks_for_own_order(self) -> bool:
        """Whether arguments need an order of Penstock's, instead of that of the sampler."""
        asked = (self.reuse, self.echo, self.share)
        return self._seed_is_given or any(value is not None for value in asked)

    def _make(self, seed: int, epoch: int = 0) -> None:
        """Make Penstock's loader from the attributes as they are now."""
        self._stale, self._pid = False, os.getpid()
        self._prepared = None
        own = (self.cache, self.reuse, self.echo, self.share, self.seed, self.device)
        extended = any(value is not None for value in own) or self.on_error != "raise"
        self._why_torch = "" if extended else why_torch(self.dataset, self._streaming)
        if self._why_torch:
            _log.info("torch's own iterator prepares the batches: %s", self._why_torch)
            return
        self._setup = TorchWorkerSetup(self.worker_init_fn)
        self._make_loader = self._prepare()
        self._use(self._make_loader(seed, self._ranks))
        if epoch:
            self._loader.set_epoch(epoch)

    def _use(self, loader: Loader) -> None:
        """Take the batches from this loader from now on."""
        self._prepared = _Backing(weakref.ref(self), loader, self._setup)

    @property
    def _loader(self) -> Loader:
        """Penstock's loader behind this one."""
        if self._prepared is None:
            raise PipelineError(
                f"torch's own iterator prepares the batches of this loader: {self._why_torch}"
            )
        return self._prepared.inner

    @_loader.setter
    def _loader(self, loader: Loader) -> None:
        self._use(loader)

    def _current(self) -> _Backing | None:
        """Penstock's loader, made again if attributes were assigned to or the process forked."""
        if self._closed:
            raise RuntimeError(
                "this loader is closed. Make a new one, or iterate it before close() and before "
                "the end of its with block."
            )
        prepared, here = self._prepared, os.getpid() == self._pid
        if self._stale or not here or (prepared is None and not self._given_up):
            epoch = 0 if prepared is None else prepared.inner.next_epoch
            seed = self._first_seed() if prepared is None else prepared.inner.options.seed
            if prepared is not None and here:
                prepared.inner.close()
            self._make(seed, epoch)
        return self._prepared

    def _prepare(self) -> Callable[[int, Ranks | None], Loader]:
        """A function that makes Penstock's loader, for a seed and ranks."""
        streaming, collate_fn = self._streaming, self.collate_fn
        sampler, batch_sampler = self.sampler, self.batch_sampler
        worker_init_fn, workers = self.worker_init_fn, self.num_workers
        kind = self.kind
        if worker_init_fn is not None and workers != 0:
            if kind in ("threads", "crew"):
                refuse(
                    "worker_init_fn is for worker processes with one thread; leave out "
                    f'kind="{kind}".'
                )
            kind = "processes"
        reuse_options = ReuseOptions(
            reuse=self.reuse,
            split=self.split,
            partial=self.partial,
            final=self.final,
            reuse_size=self.reuse_size,
            reuse_where=self.reuse_where,
            reuse_encode=self.reuse_encode,
            echo=self.echo,
            echo_at=self.echo_at,
            echo_window=self.echo_window,
        )
        single = not self._auto_collation
        staged = (self.cache, self.reuse, self.echo, self.share, self.partial, self.final)
        as_torch = (
            self.on_error == "raise"
            and not (streaming or any(value is not None for value in staged))
            and reads_together(self.dataset)
        )
        together = as_torch and not single
        pipeline = build_pipeline(
            self.dataset,
            cache=self.cache,
            cache_where=self.cache_where,
            random=self.random,
            native=self.native,
            whole=worker_init_fn is not None,
            calls="batches" if together else "none" if as_torch else "groups",
            options=reuse_options,
        )
        collate: Collate | None = None
        if single:
            collate = _Single(collate_fn)
        elif collate_fn is not default_collate:
            collate = collate_fn
        elif together:
            collate = fallback_collate
        # None: single samples, or a batch_sampler, which decides the size of each batch.
        size = 1 if self.batch_size is None else self.batch_size
        pipeline = pipeline.batch(size, drop_last=self.drop_last, collate=collate)
        if reuse_options.echoes("batch"):
            pipeline = add_echo(pipeline, reuse_options)
        given, prefetch = self._prefetch, None
        if given is not None and (given != _TORCH_PREFETCH or self.share is not None):
            prefetch = max(1, given * (workers if self.share is None else 1))
        rank, world = self._given_rank or (0, 1)
        options = Options(
            workers="auto" if self._auto_workers else workers,
            kind=kind,
            seed=0,
            shuffle=self._shuffles,
            rank=rank,
            world=world,
            prefetch=prefetch,
            tiny_batch=self.tiny_batch,
            on_error=self.on_error,
            timeout=self.timeout or None,
            memory=self.memory,
            in_order=self.in_order,
            share=self.share,
            lag=self.lag,
            join=self.join,
            cluster=self.cluster,
            metrics_port=self.metrics_port,
        )
        context = self.multiprocessing_context
        self._start = as_program if self.share is not None else _start_method(context, self.dataset)
        name = type(sampler if batch_sampler is None else batch_sampler).__name__
        if self._own_sampler and self.batch_size is not None:
            name = type(sampler).__name__
        custom = Custom(
            init=self._setup,
            start=self._start,
            # What a user's collate made stays as it is.
            convert=Tensors(list) if collate is None or collate_fn is default_convert else None,
            fallback=fallback_collate,
            order_name=name if self._own_sampler else "",
            recheck=not self._persistent,
            deliver=delivering(
                self.device,
                pin_memory=self.pin_memory,
                normalize=self.device_normalize,
                device_prep=self.device_prep,
            ),
        )

        find, own_sampler = weakref.ref(self), self._own_sampler
        listed = self.batch_size is not None or single

        def make_loader(seed: int, ranks: Ranks | None) -> Loader:
            outer = find()
            plan: Callable[[int, int, bool], Plan] | None = None
            if not streaming and outer is not None and not outer._asks_for_own_order:
                n = None if isinstance(pipeline.source, DatasetSource) else len(pipeline.source)
                plan = SamplerPlan(n, single, drawing=TorchDraws(outer)).for_loader
            elif own_sampler:
                plan = _plan(sampler, None if listed else batch_sampler, seed)
            own = replace(custom, plan=plan, ranks=ranks)
            return Loader(pipeline, replace(options, seed=seed), own)

        return make_loader

    def like_this(self, dataset: Any, **given: Any) -> DataLoader[Any]:
        """A loader with these arguments, and Penstock's own arguments of this one.

        Ranks are left to whoever makes it.
        """
        own = {name: getattr(self, name) for name in OWN_ARGUMENTS if name not in _OF_RANKS}
        return type(self)(dataset, **given, **own)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _COUNT_LATER and "_prepared" in self.__dict__:
            self.__dict__["_stale"] = True
            if name == "prefetch_factor":
                self.__dict__["_prefetch"] = value
            elif name == "num_workers":
                self.__dict__["_auto_workers"] = False

    def __getstate__(self) -> dict[str, Any]:
        """Everything but Penstock's loader, which the copy makes for itself."""
        left_out = ("_prepared", "_loop", "_make_loader", "_setup", "_iterator")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _prepared=None, _loop=None, _iterator=None, _given_up=False)
        remember(self)

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        # Workers that persist are those of Penstock's loader, not of one iterator.
        return self._get_iterator()

    def _get_iterator(self) -> Iterator[Any]:
        if self._dataset_watch is not None:
            self._dataset_watch.check()
        prepared = self._current()
        if prepared is None:
            return self._torch_iterator()
        last = None if self._loop is None else self._loop()
        if last is not None and not last.over and not (self._persistent or self._keeps):
            last.displace()
        prepared.inner.find_ranks("loop")
        if self._torchs_order_loaded and not prepared.follows:
            refuse_within(f"{prepared.inner.options.world} ranks")
        self._torchs_order_loaded = False
        loop = Iteration(self, prepared) if prepared.follows else OwnOrder(self, prepared)
        self._loop = weakref.ref(loop)
        return loop

    def _torch_iterator(self) -> Iterator[Any]:
        """torch's own iterator, kept between epochs if workers persist."""
        if not (self.persistent_workers and self.num_workers):
            return torch_iterator(self)
        kept: Any = self.__dict__.get("_iterator")
        if kept is None:
            kept = self._iterator = torch_iterator(self)
        else:
            kept._reset(self)
        return kept  # type: ignore[no-any-return]

    def _fall_back(self, why: str) -> None:
        """Let torch's own iterators prepare the batches from now on."""
        _log.warning("torch's own iterator prepares the batches from now on: %s", why)
        self._why_torch, self._given_up = why, True
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.inner.close()

    @property
    def _keeps(self) -> bool:
        """Whether samples or batches are kept, so that a second loader would keep its own."""
        kept = (self.cache, self.reuse, self.echo, self.share)
        return any(value is not None for value in kept)

    def __len__(self) -> int:
        return self._length()

    def _length(self) -> int:
        """The number of batches, also where a subclass has another ``__len__``."""
        prepared = None if self._closed else self._current()
        if prepared is None:
            return int(super().__len__())
        prepared.inner.find_ranks("length")
        if prepared.follows and not self._streaming:
            return int(super().__len__())
        return len(prepared.inner)

    def __repr__(self) -> str:
        prepared = self._prepared if self._closed else self._current()
        if prepared is None:
            return f"<DataLoader, batches by torch's own iterator ({self._why_torch})>"
        text = repr(prepared.inner).replace("<Loader", "<DataLoader")
        if prepared.follows:
            text = text.replace(f"seed {prepared.inner.options.seed}", "torch's seeds", 1)
        if isinstance(self._start, StartAsTorch) and prepared.inner.choice.own_processes:
            why = self._start.why_not_fork()
            if why:
                return f"{text.removesuffix('>')}, not forked: {why}>"
        return text

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint; see ``Loader.state_dict``."""
        prepared = self._current()
        if prepared is None:
            raise StateError(
                "this loader has no position that could be saved, because torch's own iterator "
                f"prepares its batches: {self._why_torch}"
            )
        # That of a stream is saved by whoever reads it, with its position.
        stateful = not self._streaming and is_stateful(self.dataset)
        if stateful:  # reading it may have changed it since the last checkpoint
            prepared.inner.renew_data()
        return {
            **prepared.inner.state_dict(),
            "seed_given": self.seed is not None or self.generator is not None,
            "follows_torch": prepared.follows,
            **({"dataset": copy.deepcopy(self.dataset.state_dict())} if stateful else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; see ``Loader.load_state_dict``.

        A loader that was made without a seed takes the seed of the checkpoint. One of several ranks
        takes it only within an epoch: a new epoch has the seed that all ranks without one share. If
        the checkpoint does not belong to this loader, an error is raised and the loader stays as it
        was.
        """
        prepared = self._current()
        if prepared is None:
            raise StateError(
                "this loader cannot resume, because torch's own iterator prepares its batches: "
                f"{self._why_torch}"
            )
        if not (isinstance(state, Mapping) and "dataset" in state and is_stateful(self.dataset)):
            self._load(state, prepared)
            return
        # Before the rest: the state of a dataset is part of which data it is.
        before = copy.deepcopy(self.dataset.state_dict())
        self.dataset.load_state_dict(state["dataset"])
        try:
            prepared.inner.renew_data()
            self._load(state, prepared)
        except BaseException:
            self.dataset.load_state_dict(before)
            prepared.inner.renew_data()
            raise
        current = self._current()
        if current is not None:
            current.inner.renew_workers()

    def _load(self, state: Mapping[str, Any], prepared: _Backing) -> None:
        loader, ranks = prepared.inner, self._ranks
        loader.find_ranks()
        state, follows = self._as_mine(state, prepared)
        takes_seed = (
            not (self._seed_is_given or follows)
            and isinstance(state, Mapping)
            and is_whole(state.get("seed"))
        )
        # Before the first batch of an epoch a seed that nobody gave may still change: each rank
        # may have another one, and they must agree.
        open_seed = takes_seed and state.get("seed_given") is False and _is_at_start(state)
        if open_seed and loader.options.world > 1:
            state = {**state, "seed": loader.options.seed}
        was_given = self._seed_is_given
        if takes_seed and (state["seed"] != loader.options.seed or prepared.follows):
            ranks = copy.copy(ranks)
            if ranks is not None and not open_seed:
                ranks.keep_seed()
            self._seed_is_given = True  # for the plan of the new loader
            loader = self._make_loader(state["seed"], ranks)
        try:
            loader.load_state_dict(state)
        except BaseException:
            self._seed_is_given = was_given
            if loader is not prepared.inner:
                loader.close()
            raise
        self._seed_is_given = was_given
        self._torchs_order_loaded = follows and self._order_is_torchs and not _is_at_start(state)
        if loader is not prepared.inner:
            prepared.inner.close()
            self._ranks = ranks
            self._use(loader)
        if takes_seed and not open_seed:
            self._seed_is_given = True
            if ranks is not None:
                ranks.keep_seed()

    def _as_mine(
        self, state: Mapping[str, Any], prepared: _Backing
    ) -> tuple[Mapping[str, Any], bool]:
        """The checkpoint as this loader reads it, and whether it follows torch's sampler."""
        follows = isinstance(state, Mapping) and state.get("follows_torch") is True
        if not follows or prepared.follows:
            return state, follows
        inner = prepared.inner
        if self._order_is_torchs and not _is_at_start(state):
            refuse_within(f"seed={inner.options.seed}" if self._seed_is_given else "several ranks")
        return {**state, "seed": inner.options.seed, "plan": None}, False

    @property
    def _order_is_torchs(self) -> bool:
        """Whether only torch's sampler knows the order: it is not the sequence of the data."""
        return self._shuffles or self._own_sampler

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, and call ``set_epoch`` of the sampler if it has one."""
        for sampler in (self.sampler, self.batch_sampler):
            set_sampler_epoch = getattr(sampler, "set_epoch", None)
            if set_sampler_epoch is not None:
                set_sampler_epoch(epoch)
        prepared = self._current()
        if prepared is not None:
            prepared.inner.set_epoch(epoch)

    def stats(self) -> Stats:
        """A frozen snapshot of counts and times so far."""
        return self._loader.stats()

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        if self._prepared is not None:
            self._prepared.inner.close()

    def __enter__(self) -> DataLoader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Backing:
    """Penstock's loader behind a DataLoader; see ``Prepared`` in ``penstock.torch.iteration``."""

    keyed = True
    may_go_back = True

    def __init__(
        self, outer: weakref.ref[DataLoader[Any]], inner: Loader, setup: TorchWorkerSetup
    ) -> None:
        self._outer = outer
        self._setup = setup
        self.inner = inner
        self.stream = not inner.pipeline.source.indexed
        self.turn = 0
        self._seed: int | None = None

    @property
    def seed(self) -> int | None:
        return self._seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._seed = self._setup.base_seed = seed

    @property
    def plan(self) -> SamplerPlan | None:
        plan = self.inner.plan
        return plan if isinstance(plan, SamplerPlan) else None

    @property
    def follows(self) -> bool:
        """Whether order and seeds are drawn as torch draws them."""
        outer = self._outer()
        asks = outer is not None and outer._asks_for_own_order
        return self.plan is not None or (self.stream and not asks)

    def another(self) -> _Backing:
        outer = self._outer()
        if outer is None:
            raise RuntimeError("the DataLoader of this loop is gone, and another loop has begun")
        made = outer._make_loader(self.inner.options.seed, copy.copy(outer._ranks))
        return _Backing(self._outer, made, outer._setup)

    def goes_back(self, error: PenstockError) -> bool:
        return isinstance(error, PipelineError)

    def give_up(self, error: PenstockError) -> None:
        outer = self._outer()
        if outer is not None:
            outer._fall_back(str(error))

    def failed(self, error: SampleError) -> BaseException:
        return of_both_kinds(error)


def refuse_within(what: str) -> NoReturn:
    """Refuse a checkpoint within an epoch that only torch's sampler can go on with."""
    raise StateError(
        "the checkpoint was taken within an epoch that torch's sampler has ordered, and this "
        f"loader has {what}: its order is another one. Resume with the arguments it was taken "
        "with, or from a checkpoint taken between epochs. With seed= a loader can resume with "
        "other ranks."
    )


def why_torch(dataset: Any, streaming: bool) -> str:
    """Why only torch's own iterator can read a dataset; empty if Penstock can."""
    kind = type(dataset).__name__
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return f"{kind} is a datapipe, and only torch's own workers can shard these"
    if streaming:
        return ""
    if isinstance(dataset, Mapping):
        return f"{kind} is read by key, not by index"
    if isinstance(dataset, (str, bytes)):
        return f"the dataset is a {kind}"
    try:
        empty = len(dataset) == 0
    except (TypeError, NotImplementedError):
        return f"{kind} has no length"
    return f"{kind} is empty" if empty else ""


class DatasetWatch:
    """Warns if a dataset is changed after the node that prepares its batches has received it.

    The node has a copy of the dataset, so it does not see the change.
    """

    def __init__(self, dataset: Any, share: str) -> None:
        self._dataset = dataset
        self._share = share
        self._first_digest: bytes | None = None
        self._warned = False

    def check(self) -> None:
        """Warn, once, if the dataset is not the same as in the first call."""
        if self._warned:
            return
        try:
            digest = pack(self._dataset, by_value=True).digest()
        except Exception:  # the error is raised where the dataset is sent to the node
            return
        if self._first_digest is None:
            self._first_digest = digest
        elif digest != self._first_digest:
            self._warned = True
            warnings.warn(
                f"the dataset was changed after the first epoch, and share={self._share!r}: the "
                "node continues with the dataset as it was. Make a new DataLoader for the changed "
                "dataset, with another name for share; or give persistent_workers=True if the "
                "change does not matter.",
                UserWarning,
                stacklevel=3,
            )


class _Single:
    """The collate for ``batch_size=None``: delivers the one sample of a batch by itself."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0])


def _plan(
    sampler: Iterable[Any] | None, batch_sampler: Iterable[Any] | None, seed: int
) -> Callable[[int, int, bool], Plan]:
    def make_plan(n: int, size: int, drop_last: bool) -> Plan:
        if batch_sampler is not None:
            return Sampled(batch_sampler, n, seed)
        return Sampled(sampler or (), n, seed, size, drop_last)

    return make_plan


def _is_at_start(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is at the start of an epoch, the first or a later one."""
    cursor = state.get("cursor")
    return isinstance(cursor, Mapping) and cursor.get("position") == cursor.get("batch") == 0


def _start_method(context: Any, dataset: Any) -> ChooseStart:
    """How to start workers: as torch does if nothing is given; also for spawn, as a program."""
    if context is None:
        return StartAsTorch(dataset)
    name = context if isinstance(context, str) else context.get_start_method()
    if name not in ("fork", "spawn", "forkserver"):
        refuse(f"multiprocessing_context is {context!r}; give 'fork', 'spawn' or 'forkserver'.")
    return as_fork if name == "fork" else as_program


class StartAsTorch:
    """Fork where that is the default of ``multiprocessing`` and the workers can read the dataset.

    CUDA alone is no reason against a fork: torch forks then too, and workers that leave CUDA alone
    work. But a fork cannot read a tensor on a CUDA device, so a dataset that holds one is sent to
    worker programs.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> StartMethod:
        why = self.why_not_fork()
        if why:
            _log.info("worker processes are programs of their own: %s", why)
        return "program" if why else "fork"

    def why_not_fork(self) -> str:
        """Why workers are not forked from this process; empty if they are."""
        # To ask for the default would settle it, and the script could not set it any more.
        name = multiprocessing.get_start_method(allow_none=True)
        name = name or multiprocessing.get_all_start_methods()[0]
        if name != "fork":
            return f"the start method of multiprocessing is {name!r}"
        if torch.cuda.is_initialized() and holds_cuda_tensor(self._dataset):
            return "the dataset holds a tensor on a CUDA device, and a fork cannot use CUDA"
        if multiprocessing.current_process().daemon:
            return "this process is daemonic, and multiprocessing lets it have no children"
        return ""


_LOOKED_AT = 1000
"""Most objects of a dataset that are looked at for a tensor on a CUDA device."""


def holds_cuda_tensor(dataset: Any) -> bool:
    """Whether a tensor on a CUDA device is among the attributes of a dataset.

    Attributes, lists, tuples, dicts and the attributes of inner datasets are looked at, breadth
    first, up to a limit: the samples of a large list are alike. No code of the dataset runs: a list
    of its own class may decode its items when it is read, and a mapping may open a file for each.
    """
    waiting: list[Any] = [dataset]
    for looked in range(_LOOKED_AT):
        if looked == len(waiting):
            return False
        value = waiting[looked]
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return True
        elif isinstance(value, dict):
            waiting += itertools.islice(dict.values(value), _LOOKED_AT)
        elif isinstance(value, list):
            waiting += itertools.islice(list.__iter__(value), _LOOKED_AT)
        elif isinstance(value, tuple):
            waiting += itertools.islice(tuple.__iter__(value), _LOOKED_AT)
        elif value is dataset or isinstance(value, torch.utils.data.Dataset):
            waiting += getattr(value, "__dict__", {}).values()
    return False


def _check(
    *,
    streaming: bool,
    shuffles_itself: bool,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: object,
    batch_sampler: object,
    num_workers: int | str,
    shared: bool,
    drop_last: bool,
    timeout: float,
    prefetch_factor: int | None,
    persistent_workers: bool,
) -> None:
    """Refuse arguments that torch refuses, and those that Penstock does not support.

    ``shuffles_itself``: a stream whose own shuffling torch turns on or off.
    """
    if num_workers != "auto" and not _from(0, num_workers):
        refuse(f'num_workers is {num_workers!r}; give a whole number, 0 or more, or "auto".')
    if num_workers == 0 and not shared:
        for name, value in (
            ("prefetch_factor", prefetch_factor),
            ("persistent_workers", persistent_workers or None),
            ("timeout", timeout or None),
        ):
            if value is not None:
                refuse(
                    f"{name}={value!r} is for workers, and num_workers is 0. Give num_workers, or "
                    f"leave out {name}."
                )
    if timeout < 0:
        refuse(f"timeout is {timeout}; give a number of seconds, or 0 for no limit.")
    if prefetch_factor is not None and not _from(0, prefetch_factor):
        refuse(
            f"prefetch_factor is {prefetch_factor!r}; give a number of batches for each worker, a "
            "whole number."
        )
    if streaming:
        for name, given in (
            ("shuffle", bool(shuffle) and not shuffles_itself),
            ("sampler", bool(sampler)),
            ("batch_sampler", batch_sampler is not None),
        ):
            if given:
                refuse(
                    f"{name} on an IterableDataset, which decides its own order. Leave out {name}, "
                    "or give the dataset __len__ and __getitem__.",
                    "iterable-dataset",
                )
    if sampler is not None and shuffle:
        refuse("sampler and shuffle=True both decide the order; give one of them.")
    if batch_sampler is not None and (
        batch_size not in (1, None) or shuffle or sampler is not None or drop_last
    ):
        refuse(
            "batch_sampler makes the batches itself; leave out batch_size, shuffle, sampler and "
            "drop_last."
        )
    if batch_size is None and batch_sampler is None and drop_last:
        refuse("drop_last=True with batch_size=None, which makes no batches; leave out drop_last.")
    if batch_size is not None and not _from(1, batch_size):
        refuse(
            f"batch_size is {batch_size!r}; give a whole number from 1 on, or None to get single "
            "samples."
        )


def _as_int(value: Any) -> Any:
    """A whole number of another type, such as NumPy's, as ``int``; other values as they are."""
    try:
        return int(operator.index(value))  # bool too, as in torch
    except TypeError:
        return value


def _from(least: int, value: object) -> bool:
    """Whether a value is a whole number from ``least`` on."""
    return isinstance(value, int) and is_whole(value) and value >= least


def _check_shared(
    share: str, *, streaming: bool, worker_init_fn: Callable[[int], None] | None
) -> None:
    """Refuse what cannot be the same for every job that shares batches."""
    if streaming:
        refuse(
            f"share={share!r} on an IterableDataset: its samples have no index that jobs could "
            "agree on. Give it __len__ and __getitem__, or leave out share.",
            "iterable-dataset",
        )
    if worker_init_fn is not None:
        refuse(
            f"worker_init_fn with share={share!r}: the workers of the node serve all jobs of the "
            "machine, and cannot be set up for one of them. Leave out worker_init_fn, and set up "
            "what is needed in the dataset, when it first reads a sample."
        )
