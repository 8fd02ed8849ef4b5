"""``torch.utils.data.DataLoader``, argument for argument, on Penstock's engine.

It is no subclass of torch's: trainers rebuild subclasses as plain DataLoaders and lose what they
add, and let any other iterable through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.collate import default_convert

from penstock.engine.pools.launch import StartMethod
from penstock.errors import ErrorCode, PipelineError
from penstock.loader import Custom, Loader
from penstock.options import Options
from penstock.order import Sampled
from penstock.order.plan import Plan
from penstock.stats import Stats
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING
from penstock.torch.batches import Tensors, can_pin
from penstock.torch.build import At, Reuse, build
from penstock.torch.sharing import Watched, check_shared
from penstock.torch.worker import Init
from penstock.torch.worker import default_collate as fallback_collate

Collate = Callable[[list[Any]], Any]


class DataLoader:
    """Replaces ``torch.utils.data.DataLoader``: the same arguments, the same batches.

    Beside torch's arguments it takes

    - ``cache``: bytes to keep in memory (``"8GB"``); ``cache_where`` puts them elsewhere,
    - ``seed``: fixes order and augmentation; by default the generator's, or torch's own,
    - ``random``: ``False`` says that the dataset draws nothing, which saves seeding it,
    - ``kind``: ``"threads"`` or ``"processes"`` instead of a choice,
    - ``on_error``: ``"raise"``, ``"skip"`` or ``"substitute"`` for bad samples,
    - ``native``: ``False`` keeps torchvision's own transforms where ``penstock.image`` has the
      same ones (an ``ImageFolder`` is taken apart so that they, and ``cache``, can be used),
    - ``memory``: a bound on the shared memory of batches,
    - ``reuse``: how often a partly transformed sample is used (refurbishing), with ``split``, the
      number of transforms of the ``Compose`` that are done anew every time, or with ``partial``
      and ``final``, two callables; ``reuse_size``, ``reuse_where`` and ``reuse_encode`` say how
      much is kept, where and how,
    - ``echo``: how often everything is used (data echoing), with ``echo_at`` to say where:
      ``"sample"`` (before augmentation), ``"augmented"`` or ``"batch"``; and ``echo_window``,
    - ``share``: a name that the jobs of one search have in common: each batch is then prepared
      once for all of them, by workers of the node's own (``num_workers`` is not used); ``lag``
      says whether they wait for the slowest (``"wait"``) or not (``"detach"``), and
      ``join="start"`` has a job that joins late begin with the first batch all the same,
    - ``metrics_port``: serves what is counted to Prometheus, on this machine's own address.

    Augmentation is keyed by (seed, epoch, sample): batches do not depend on ``num_workers``, and
    ``state_dict`` resumes exactly.

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
        cache: int | str | None = None,
        cache_where: str = "memory",
        seed: int | None = None,
        random: bool | None = None,
        kind: Literal["auto", "threads", "processes"] = "auto",
        on_error: Literal["raise", "skip", "substitute"] = "raise",
        native: bool = True,
        memory: int | str | None = None,
        reuse: int | Literal["auto"] | None = None,
        split: int | None = None,
        partial: Callable[..., Any] | None = None,
        final: Callable[..., Any] | None = None,
        reuse_size: int | str | None = None,
        reuse_where: str = "memory",
        reuse_encode: str = DEFAULT_ENCODING,
        echo: float | Literal["auto"] | None = None,
        echo_at: At = "sample",
        echo_window: int | None = None,
        share: str | None = None,
        lag: Literal["detach", "wait"] = "detach",
        join: Literal["live", "start"] = "live",
        metrics_port: int | None = None,
    ) -> None:
        streaming = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        _check(
            streaming=streaming,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers="auto" if share is not None else num_workers,
            drop_last=drop_last,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._watched: Watched | None = None
        if share is not None:
            check_shared(
                share, streaming=streaming, worker_init_fn=worker_init_fn, in_order=in_order
            )
            if not persistent_workers:
                self._watched = Watched(dataset, share)
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
            if kind == "threads":
                raise PipelineError(
                    'DataLoader: worker_init_fn is for worker processes; leave out kind="threads".'
                )
            kind = "processes"
        rank, world = (0, 1) if streaming else _ranks()
        own_sampler = sampler is not None or batch_sampler is not None
        self._seed_is_given = seed is not None or generator is not None
        if seed is None:
            if generator is not None:
                seed = generator.initial_seed()
            else:
                # Ranks must agree on the order; each has a seed of its own, so none of those.
                seed = 0 if world > 1 and not own_sampler else torch.initial_seed()
            seed %= 2**63
        pipeline = build(
            dataset,
            cache=cache,
            where=cache_where,
            random=random,
            native=native,
            whole=worker_init_fn is not None,
            reuse=Reuse(
                reuse,
                split,
                partial,
                final,
                reuse_size,
                reuse_where,
                reuse_encode,
                echo,
                echo_at,
                echo_window,
            ),
        )
        single = batch_size is None and batch_sampler is None
        collate = self._collate(collate_fn, single)
        pipeline = pipeline.batch(
            1 if single else (batch_size or 1), drop_last=drop_last, collate=collate
        )
        if echo is not None and echo_at == "batch":
            pipeline = pipeline.echo(echo, window=echo_window)
        workers = num_workers if isinstance(num_workers, int) and share is None else 1
        options = Options(
            workers=num_workers,
            kind=kind,
            seed=seed,
            shuffle=bool(shuffle),
            rank=0 if own_sampler else rank,
            world=1 if own_sampler else world,
            prefetch=None if prefetch_factor is None else max(1, prefetch_factor * workers),
            on_error=on_error,
            timeout=timeout or None,
            memory=memory,
            in_order=in_order,
            share=share,
            lag=lag,
            join=join,
            metrics_port=metrics_port,
        )
        pin = can_pin(pin_memory)
        convert: Tensors | None = Tensors(list, pin)
        if collate is not None and not single:
            convert = _Pin() if pin else None
        custom = Custom(
            init=Init(worker_init_fn),
            start="program" if share is not None else _start(multiprocessing_context),
            convert=convert,
            fallback=fallback_collate,
            order_name=type(sampler or batch_sampler).__name__ if own_sampler else "",
            recheck=not persistent_workers,
        )

        def make(seed: int) -> Loader:
            plan = _plan(sampler, batch_sampler, seed) if own_sampler else None
            return Loader(pipeline, replace(options, seed=seed), replace(custom, plan=plan))

        self._make = make
        self._loader = make(seed)

    @staticmethod
    def _collate(collate_fn: Collate | None, single: bool) -> Collate | None:
        if single:
            return _Single(collate_fn or default_convert)
        return None if collate_fn is default_collate else collate_fn

    def __iter__(self) -> Iterator[Any]:
        if self._watched is not None:
            self._watched.look()
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __repr__(self) -> str:
        return repr(self._loader).replace("<Loader", "<DataLoader")

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; see ``Loader.state_dict``."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; see ``Loader.load_state_dict``.

        Where no seed was given, the one of the checkpoint is taken up with it.
        """
        seed = state.get("seed")
        if isinstance(seed, int) and not self._seed_is_given:
            if seed != self._loader.options.seed:
                self._loader.close()
                self._loader = self._make(seed)
            self._seed_is_given = True
        self._loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the sampler is told, if it wants to be."""
        tell = getattr(self.sampler, "set_epoch", None)
        if tell is not None:
            tell(epoch)
        self._loader.set_epoch(epoch)

    def stats(self) -> Stats:
        """A frozen snapshot of what happened so far."""
        return self._loader.stats()

    def close(self) -> None:
        """End the workers."""
        self._loader.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Single:
    """For ``batch_size=None``: a sample is delivered as it is."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0])


class _Pin(Tensors):
    """Pins what a user's collate made, and changes nothing else about it."""

    def __init__(self) -> None:
        super().__init__(tuple, pin=True)

    def __call__(self, value: Any) -> Any:
        return (
            value
            if hasattr(value, "__array__") and not torch.is_tensor(value)
            else (super().__call__(value))
        )


def _plan(
    sampler: Iterable[Any] | None, batch_sampler: Iterable[Any] | None, seed: int
) -> Callable[[int, int, bool], Plan]:
    def make(n: int, size: int, drop_last: bool) -> Plan:
        if batch_sampler is not None:
            return Sampled(batch_sampler, n, seed)
        return Sampled(sampler or (), n, seed, size, drop_last)

    return make


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _start(context: Any) -> StartMethod:
    """Our own worker program stands in for spawn and forkserver; fork is fork."""
    if context is None:
        return "program"
    name = context if isinstance(context, str) else context.get_start_method()
    if name not in ("fork", "spawn", "forkserver"):
        raise PipelineError(
            f"multiprocessing_context is {context!r}; give 'fork', 'spawn' or 'forkserver'."
        )
    return "fork" if name == "fork" else "program"


def _check(
    *,
    streaming: bool,
    batch_size: int | None,
    shuffle: bool | None,
    sampler: object,
    batch_sampler: object,
    num_workers: int | str,
    drop_last: bool,
    timeout: float,
    prefetch_factor: int | None,
    persistent_workers: bool,
    pin_memory_device: str,
) -> None:
    """What torch refuses, and what cannot be honoured here, by name."""

    def refuse(why: str, code: ErrorCode | None = None) -> None:
        raise PipelineError(f"DataLoader: {why}", code=code)

    if num_workers == 0:
        if prefetch_factor is not None:
            refuse("prefetch_factor is for workers, and num_workers is 0.")
        if persistent_workers:
            refuse("persistent_workers=True, and num_workers is 0.")
        if timeout:
            refuse("timeout is for workers, and num_workers is 0.")
    if timeout < 0:
        refuse(f"timeout is {timeout}; give seconds, or 0 for no limit.")
    if prefetch_factor is not None and prefetch_factor < 0:
        refuse(f"prefetch_factor is {prefetch_factor}; give a number of batches a worker.")
    if streaming:
        for name, value in (("shuffle", shuffle), ("sampler", sampler)):
            if value:
                refuse(
                    f"{name} on an IterableDataset, which decides its own order.",
                    "iterable-dataset",
                )
        if batch_sampler is not None:
            refuse(
                "batch_sampler on an IterableDataset, which decides its own order.",
                "iterable-dataset",
            )
    if sampler is not None and shuffle:
        refuse("sampler and shuffle=True exclude each other.")
    if batch_sampler is not None and (
        batch_size not in (1, None) or shuffle or sampler is not None or drop_last
    ):
        refuse("batch_sampler excludes batch_size, shuffle, sampler and drop_last.")
    if batch_size is None and batch_sampler is None and drop_last:
        refuse("batch_size=None makes no batches, so drop_last=True has nothing to drop.")
    if pin_memory_device:
        refuse(
            f"pin_memory_device={pin_memory_device!r} is deprecated in torch and not supported: "
            "pin_memory=True pins for the current accelerator."
        )
