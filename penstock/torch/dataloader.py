"""The drop-in for ``torch.utils.data.DataLoader``: the same arguments, on Penstock's engine.

It is not a subclass of torch's. Trainers rebuild subclasses as plain DataLoaders, which drops what
the subclass adds; they pass any other iterable through unchanged.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_convert

from penstock.engine.pools.launch import ChooseStart, StartMethod, as_fork, as_program
from penstock.loader import Custom, Loader, Ranks
from penstock.operation import Operation
from penstock.options import CLUSTER_SHARE, Kind, Options, is_whole
from penstock.order import Sampled
from penstock.order.plan import Plan
from penstock.serialize import pack
from penstock.source import is_stream
from penstock.stats import Stats
from penstock.stops.batch import Collate
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING
from penstock.torch.batches import Tensors
from penstock.torch.dataset import EchoPlace, ReuseOptions, add_echo, build_pipeline, refuse
from penstock.torch.delivering import delivering
from penstock.torch.ranks import (
    SHARED_SEED,
    RankFinder,
    Undivided,
    given_rank,
    of_sampler,
    of_stream,
)
from penstock.torch.worker import TorchWorkerSetup
from penstock.torch.worker import default_collate as fallback_collate

_log = logging.getLogger("penstock.torch")


class DataLoader:
    """Replaces ``torch.utils.data.DataLoader``: the same arguments, the same batches.

    In addition to torch's arguments it takes:

    - ``device``: deliver batches to this device, such as ``"cuda"``, ahead of the loop. The last
      transform is done there if it is ``Normalize`` and ``native`` applies, with the same values;
      ``device_normalize=False`` leaves it to the workers.
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
        if cluster is not None and share is None:
            share = CLUSTER_SHARE
        _check(
            streaming=streaming,
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
            pin_memory_device=pin_memory_device,
        )
        if cache is None and cache_where != "memory":
            refuse(
                f"cache_where={cache_where!r} has no effect without cache. Give cache, such as "
                'cache="8GB", or leave out cache_where.'
            )
        self._dataset_watch: DatasetWatch | None = None
        if share is not None:
            _check_shared(share, streaming=streaming, worker_init_fn=worker_init_fn)
            if not persistent_workers:
                self._dataset_watch = DatasetWatch(dataset, share)
        self.dataset = dataset
        self.batch_size = None if batch_sampler is not None else batch_size
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.collate_fn = collate_fn or (default_convert if batch_size is None else default_collate)
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.generator = generator
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.in_order = in_order

        if worker_init_fn is not None and num_workers != 0:
            if kind in ("threads", "crew"):
                refuse(
                    "worker_init_fn is for worker processes with one thread; leave out "
                    f'kind="{kind}".'
                )
            kind = "processes"
        own_sampler = sampler is not None or batch_sampler is not None
        given = given_rank(rank, world)
        if given is not None and given[1] != 1 and own_sampler:
            refuse(
                f"world={world} with a sampler, which decides itself which samples a rank gets. "
                "Leave out rank and world, or the sampler."
            )
        self._seed_is_given = seed is not None or generator is not None
        if seed is None:
            seed = torch.initial_seed() if generator is None else generator.initial_seed()
            seed %= 2**63
        if given is not None and given[1] != 1 and not self._seed_is_given:
            seed = SHARED_SEED
        self._ranks: RankFinder | Undivided | None = None
        if given is None:
            if streaming:
                self._ranks = of_stream(dataset)
            elif own_sampler:
                self._ranks = of_sampler(sampler if batch_sampler is None else batch_sampler)
            else:
                self._ranks = RankFinder(seedless=not self._seed_is_given)
        own_rank, own_world = given or (0, 1)
        reuse_options = ReuseOptions(
            reuse=reuse,
            split=split,
            partial=partial,
            final=final,
            reuse_size=reuse_size,
            reuse_where=reuse_where,
            reuse_encode=reuse_encode,
            echo=echo,
            echo_at=echo_at,
            echo_window=echo_window,
        )
        pipeline = build_pipeline(
            dataset,
            cache=cache,
            cache_where=cache_where,
            random=random,
            native=native,
            whole=worker_init_fn is not None,
            options=reuse_options,
        )
        single = batch_size is None and batch_sampler is None
        collate = self._collate(collate_fn, single)
        # None: single samples, or a batch_sampler, which decides the size of each batch.
        size = 1 if batch_size is None else batch_size
        pipeline = pipeline.batch(size, drop_last=drop_last, collate=collate)
        if reuse_options.echoes("batch"):
            pipeline = add_echo(pipeline, reuse_options)
        workers = num_workers if isinstance(num_workers, int) and share is None else 1
        options = Options(
            workers=num_workers,
            kind=kind,
            seed=seed,
            shuffle=bool(shuffle),
            rank=own_rank,
            world=own_world,
            prefetch=None if prefetch_factor is None else max(1, prefetch_factor * workers),
            tiny_batch=tiny_batch,
            on_error=on_error,
            timeout=timeout or None,
            memory=memory,
            in_order=in_order,
            share=share,
            lag=lag,
            join=join,
            cluster=cluster,
            metrics_port=metrics_port,
        )
        # What a user's collate made stays as it is.
        convert = Tensors(list) if collate is None or single else None
        self._start = as_program if share is not None else _start_method(multiprocessing_context)
        custom = Custom(
            init=TorchWorkerSetup(worker_init_fn),
            start=self._start,
            convert=convert,
            fallback=fallback_collate,
            order_name=type(sampler or batch_sampler).__name__ if own_sampler else "",
            recheck=not persistent_workers,
            deliver=delivering(device, pin_memory=pin_memory, normalize=device_normalize),
        )

        def make_loader(seed: int, ranks: Ranks | None) -> Loader:
            plan = _plan(sampler, batch_sampler, seed) if own_sampler else None
            own = replace(custom, plan=plan, ranks=ranks)
            return Loader(pipeline, replace(options, seed=seed), own)

        self._make_loader = make_loader
        self._loader = make_loader(seed, self._ranks)

    @staticmethod
    def _collate(collate_fn: Collate | None, single: bool) -> Collate | None:
        if single:
            return _Single(collate_fn or default_convert)
        return None if collate_fn is default_collate else collate_fn

    def __iter__(self) -> Iterator[Any]:
        if self._dataset_watch is not None:
            self._dataset_watch.check()
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __repr__(self) -> str:
        text = repr(self._loader).replace("<Loader", "<DataLoader")
        if self._start is _start_as_torch and self._loader.choice.own_processes:
            why = why_not_fork()
            if why:
                return f"{text.removesuffix('>')}, not forked: {why}>"
        return text

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint; see ``Loader.state_dict``."""
        return {**self._loader.state_dict(), "seed_given": self._seed_is_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; see ``Loader.load_state_dict``.

        A loader that was made without a seed takes the seed of the checkpoint. One of several ranks
        takes it only within an epoch: a new epoch has the seed that all ranks without one share. If
        the checkpoint does not belong to this loader, an error is raised and the loader stays as it
        was.
        """
        loader, ranks = self._loader, self._ranks
        loader.find_ranks()
        takes_seed = (
            not self._seed_is_given and isinstance(state, Mapping) and is_whole(state.get("seed"))
        )
        # Before the first batch of an epoch a seed that nobody gave may still change: each rank
        # may have another one, and they must agree.
        open_seed = takes_seed and state.get("seed_given") is False and _is_at_start(state)
        if open_seed and loader.options.world > 1:
            state = {**state, "seed": loader.options.seed}
        if takes_seed and state["seed"] != loader.options.seed:
            ranks = copy.copy(ranks)
            if ranks is not None and not open_seed:
                ranks.keep_seed()
            loader = self._make_loader(state["seed"], ranks)
        try:
            loader.load_state_dict(state)
        except BaseException:
            if loader is not self._loader:
                loader.close()
            raise
        if loader is not self._loader:
            self._loader.close()
            self._loader, self._ranks = loader, ranks
        if takes_seed and not open_seed:
            self._seed_is_given = True
            if ranks is not None:
                ranks.keep_seed()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, and call ``set_epoch`` of the sampler if it has one."""
        set_sampler_epoch = getattr(self.sampler, "set_epoch", None)
        if set_sampler_epoch is not None:
            set_sampler_epoch(epoch)
        self._loader.set_epoch(epoch)

    def stats(self) -> Stats:
        """A frozen snapshot of counts and times so far."""
        return self._loader.stats()

    def close(self) -> None:
        """End the workers."""
        self._loader.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _start_method(context: Any) -> ChooseStart:
    """How to start workers: as torch does if nothing is given; also for spawn, as a program."""
    if context is None:
        return _start_as_torch
    name = context if isinstance(context, str) else context.get_start_method()
    if name not in ("fork", "spawn", "forkserver"):
        refuse(f"multiprocessing_context is {context!r}; give 'fork', 'spawn' or 'forkserver'.")
    return as_fork if name == "fork" else as_program


def _start_as_torch() -> StartMethod:
    """Fork where that is the default of ``multiprocessing`` and safe."""
    why = why_not_fork()
    if why:
        _log.info("worker processes are programs of their own: %s", why)
    return "program" if why else "fork"


def why_not_fork() -> str:
    """Why workers are not forked from this process; empty if they are."""
    # To ask for the default would settle it, and the script could not set it any more.
    name = multiprocessing.get_start_method(allow_none=True)
    name = name or multiprocessing.get_all_start_methods()[0]
    if name != "fork":
        return f"the start method of multiprocessing is {name!r}"
    if torch.cuda.is_initialized():
        return "CUDA is initialised in this process, and a fork of it cannot use CUDA"
    if multiprocessing.current_process().daemon:
        return "this process is daemonic, and multiprocessing lets it have no children"
    return ""


def _check(
    *,
    streaming: bool,
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
    pin_memory_device: str,
) -> None:
    """Refuse arguments that torch refuses, and those that Penstock does not support."""
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
            ("shuffle", bool(shuffle)),
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
    if pin_memory_device:
        refuse(
            f"pin_memory_device={pin_memory_device!r} is deprecated in torch and not supported "
            "here. Leave it out: pin_memory=True pins for the current accelerator."
        )


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
