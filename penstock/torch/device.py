"""Where torch's steps are done, for an analysis: moving a batch there, waiting, agreeing.

The lines that need a GPU are marked; they have never met one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from penstock.tree import fill, flatten

COPIES = 5


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

    def again(self, batch: Any) -> Any:
        """A loop that writes into its batches must not find what it wrote: it gets copies."""
        if self._versions is not None and _versions(batch) != self._versions:
            self._versions = None
        if self._versions is None:
            return _each(lambda one: one.clone() if torch.is_tensor(one) else one, batch)
        return batch

    def copying(self, batch: Any) -> float:
        if self.device.type == "cpu":
            return 0.0
        return self._timed_copies(batch)

    def _timed_copies(self, batch: Any) -> float:
        """Has been run with the CPU as the device only."""
        found = []
        for _ in range(COPIES):
            self.sync()
            started = time.perf_counter()
            self._moved(batch)
            self.sync()
            found.append(time.perf_counter() - started)
        return median(found)

    def _moved(self, batch: Any) -> Any:
        # Tensors can be moved, and so can the batches of some libraries.
        return _each(lambda one: one.to(self.device) if hasattr(one, "to") else one, batch)

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # has never met a GPU

    def agree(self, over: bool) -> bool:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return over
        if torch.distributed.get_world_size() == 1:
            return over
        # NCCL speaks with the device's memory only; that line has never met a GPU.
        on = self.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        said = torch.tensor([int(over)], device=on)
        torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN)
        return bool(said.item())


def _in_use() -> torch.device:
    """The accelerator, if the script has begun to use one."""
    found = getattr(torch, "accelerator", None)
    if found is not None and found.is_available():  # has never met a GPU
        kind = found.current_accelerator()
        if kind is not None and (kind.type != "cuda" or torch.cuda.is_initialized()):
            return torch.device(kind.type, found.current_device_index())
    return torch.device("cpu")


def _name(device: torch.device) -> str:
    if device.type == "cuda":  # has never met a GPU
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def _versions(batch: Any) -> list[int]:
    found: list[int] = []

    def look(one: Any) -> Any:
        if torch.is_tensor(one) and not one.is_inference():
            found.append(one._version)
        return one

    _each(look, batch)
    return found


def _each(do: Callable[[Any], Any], batch: Any) -> Any:
    leaves, skeleton = flatten(batch)
    return fill(skeleton, [do(one) for one in leaves])
