"""The options of a loader, checked when they are given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock import config
from penstock.errors import PipelineError
from penstock.order import Order, Sequential, Shuffled

Kind = Literal["auto", "threads", "processes", "crew"]
"""The kinds of workers that can be asked for."""


CLUSTER_SHARE = "cluster"
"""The ``share`` of a loader with ``cluster`` and without a ``share`` of the user. Loaders with it
share batches if they prepare the same."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``Pipeline.loader``, checked. The torch adapter also sets ``in_order``."""

    workers: int | Literal["auto"] = "auto"
    kind: Kind = "auto"
    seed: int = 0
    shuffle: bool = True
    order: Order | None = None
    rank: int = 0
    world: int = 1
    tail: Literal["pad", "drop"] = "pad"
    # None: four batches ahead, one in preparation and three to bridge the slowest of a few
    # hundred. A batch that is collated as a whole occupies a worker, so then two per worker.
    prefetch: int | None = None
    # "auto": by the cost of samples and the number of workers, see engine/schedule.py.
    tiny_batch: int | Literal["auto"] = "auto"
    on_error: Literal["raise", "skip", "substitute"] = "raise"
    timeout: float | None = None
    # None: half of the machine's memory. A training loop that holds more batches is a mistake.
    memory: int | str | None = None
    in_order: bool = True
    share: str | None = None
    lag: Literal["detach", "wait"] = "detach"
    join: Literal["live", "start"] = "live"
    cluster: str | None = None
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        if self.workers != "auto" and (not is_whole(self.workers) or self.workers < 0):
            raise PipelineError(
                f'workers is {self.workers!r}; give a whole number, 0 or more, or "auto".'
            )
        _one_of("kind", self.kind, get_args(Kind))
        _one_of("on_error", self.on_error, ("raise", "skip", "substitute"))
        _one_of("tail", self.tail, ("pad", "drop"))
        if not is_whole(self.seed):
            raise PipelineError(f"seed is {self.seed!r}; give a whole number.")
        if self.prefetch is not None and (not is_whole(self.prefetch) or self.prefetch < 1):
            raise PipelineError(
                f"prefetch is {self.prefetch!r}; give a number of batches, 1 or more, or None."
            )
        if self.tiny_batch != "auto" and (not is_whole(self.tiny_batch) or self.tiny_batch < 1):
            raise PipelineError(
                f"tiny_batch is {self.tiny_batch!r}; give a number of samples, 1 or more, or "
                '"auto".'
            )
        if self.timeout is not None and not self.timeout > 0:
            raise PipelineError(
                f"timeout is {self.timeout!r}; give a number of seconds above 0, or None for no "
                "limit."
            )
        if self.order is not None and not isinstance(self.order, Order):
            raise PipelineError(
                f"order is {self.order!r}, which has no method indices(n, seed, epoch). Give an "
                "object that has it, such as Weighted(...), or None."
            )
        if self.memory is not None:
            config.size(self.memory, "memory")
        _one_of("lag", self.lag, ("detach", "wait"))
        _one_of("join", self.join, ("live", "start"))
        for name, value, default in (("lag", self.lag, "detach"), ("join", self.join, "live")):
            if self.share is None and value != default:
                raise PipelineError(
                    f"{name}={value!r} has no effect without share: it is for jobs that share "
                    f"batches. Give share, a name for the jobs, or leave out {name}."
                )
        if self.share is not None and (not isinstance(self.share, str) or not self.share):
            raise PipelineError(
                f"share is {self.share!r}; give a name, the same in all jobs that share batches."
            )
        if self.cluster is not None and (not isinstance(self.cluster, str) or not self.cluster):
            raise PipelineError(
                f'cluster is {self.cluster!r}; give "auto", or the addresses of machines, such as '
                '"10.0.0.1:7411,10.0.0.2:7411".'
            )
        if self.cluster is not None and self.share is None:
            # The node of this machine prepares the batches, as for jobs that share.
            object.__setattr__(self, "share", CLUSTER_SHARE)
        if self.share is not None and not self.in_order:
            raise PipelineError(
                f"in_order=False with share={self.share!r}: jobs that share batches take them in "
                "order. Leave out one of the two."
            )
        port = self.metrics_port
        if port is not None and (not is_whole(port) or not 0 < port < 65536):
            raise PipelineError(f"metrics_port is {port!r}; give a port from 1 to 65535, or None.")

    def without_share(self) -> Options:
        """The options of a loader that shares its batches with no other job."""
        return replace(self, share=None, cluster=None, lag="detach", join="live")

    def check_stream(self) -> None:
        """Raise an error for options that a stream cannot have."""
        if self.on_error == "substitute":
            raise PipelineError(
                'on_error="substitute" on a stream: a stream has no random access, so there is no '
                'other sample to take instead. Give on_error="skip".'
            )
        if self.world > 1 or self.order is not None:
            option = "order" if self.order is not None else f"world={self.world}"
            raise PipelineError(
                f"{option} on a stream: a stream has its own order and cannot be divided over "
                "ranks. Divide it where it is made, or give the dataset __len__ and __getitem__."
            )

    @property
    def chosen_order(self) -> Order:
        """The ``order`` given, or the one that ``shuffle`` stands for."""
        if self.order is not None:
            return self.order
        return Shuffled() if self.shuffle else Sequential()

    @property
    def memory_budget(self) -> int:
        """Bytes of shared memory that batches may take."""
        return config.memory() // 2 if self.memory is None else config.size(self.memory, "memory")


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PipelineError(f"{name} is {value!r}; give one of {', '.join(map(repr, allowed))}.")
