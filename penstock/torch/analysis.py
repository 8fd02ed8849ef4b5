"""Torch scripts as an analysis sees them: the subject of each kind of loader, and the device.

The device copies, synchronises, and lets ranks agree. Lines that need a GPU are marked: they have
never been run on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.sample_files import OpenedFiles
from penstock.diagnose.analyze.subject import StartEpoch
from penstock.loader import Loader
from penstock.torch.dataloader import DataLoader as OwnLoader
from penstock.torch.subject import TorchSubject
from penstock.tree import fill, flatten

COPIES = 5
"""Copies to the device that are timed; the median counts."""


def subject_of(
    loader: Any,
    cache: int | None,
    place: Path,
    iterate: StartEpoch | None = None,
) -> tuple[Any, TorchDevice] | None:
    """The subject and the device of a loader; ``None`` if its class is not known here.

    ``iterate`` is the original ``__iter__`` of the class, if an analysis has replaced it.
    """
    if isinstance(loader, OwnLoader):
        loader = loader._loader
    if isinstance(loader, Loader):
        loader.find_ranks()
        return LoaderSubject(loader, cache, iterate or iter), TorchDevice()
    if isinstance(loader, DataLoader):
        iterate = iterate or DataLoader.__iter__
        return TorchSubject(loader, iterate, OpenedFiles(place), cache), TorchDevice()
    return None


class TorchDevice:
    """The accelerator that the script uses, or the CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or _in_use()
        self.name = _name(self.device)
        self._versions: list[int] | None = None

    def to_device(self, batch: Any) -> Any:
        moved = self._moved(batch)
        self._versions = _versions(moved)
        return moved

    def replayed(self, batch: Any) -> Any:
        # A training loop that writes into its batches must not see its own changes: copy for it.
        if self._versions is not None and _versions(batch) != self._versions:
            self._versions = None
        if self._versions is None:
            return _each(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, batch)
        return batch

    def copy_seconds(self, batch: Any) -> float:
        if self.device.type == "cpu":
            return 0.0
        return self._timed_copies(batch)

    def _timed_copies(self, batch: Any) -> float:
        """The median of some copies. Run with the CPU as the device only."""
        times = []
        for _ in range(COPIES):
            self.sync()
            started = time.perf_counter()
            self._moved(batch)
            self.sync()
            times.append(time.perf_counter() - started)
        return median(times)

    def _moved(self, batch: Any) -> Any:
        # Not only tensors have ``to``: batches of some libraries have it too.
        return _each(lambda leaf: leaf.to(self.device) if hasattr(leaf, "to") else leaf, batch)

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # never run on a GPU

    def agree(self, done: bool) -> bool:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return done
        if torch.distributed.get_world_size() == 1:
            return done
        # NCCL needs a tensor in device memory. Never run on a GPU.
        on = self.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        flag = torch.tensor([int(done)], device=on)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag.item())


def _in_use() -> torch.device:
    """The accelerator if the script uses one already, else the CPU."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():  # never run on a GPU
        kind = accelerator.current_accelerator()
        if kind is not None and (kind.type != "cuda" or torch.cuda.is_initialized()):
            return torch.device(kind.type, accelerator.current_device_index())
    return torch.device("cpu")


def _name(device: torch.device) -> str:
    if device.type == "cuda":  # never run on a GPU
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def _versions(batch: Any) -> list[int]:
    """The version counters of all tensors; writing into a tensor increases its counter."""
    leaves, _ = flatten(batch)
    return [leaf._version for leaf in leaves if torch.is_tensor(leaf) and not leaf.is_inference()]


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with ``function`` applied to each of its leaves."""
    leaves, skeleton = flatten(batch)
    return fill(skeleton, [function(leaf) for leaf in leaves])
