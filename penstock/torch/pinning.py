"""Pinned memory: batches are copied into it by a background thread, ahead of the training loop.

The walk over a batch is the same for every device. What pins one tensor is ``cuda_pin``, which has
never met a GPU: the machines on which Penstock is developed and tested have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from penstock.order import BatchKeys
from penstock.tree import each_leaf

PinTensor = Callable[[torch.Tensor], torch.Tensor]


class Pinning:
    """Pins batches; the ``Background`` of a loader (see ``engine/ahead.py``).

    Tensors over registered memory are pinned already, and stay as they are. Made in the thread of
    the training loop.
    """

    def __init__(self) -> None:
        self._pin = cuda_pin()

    def convert(self, value: Any, keys: BatchKeys | None = None) -> Any:
        return pinned(value, self._pin)

    def settle(self) -> None:
        """Nothing: pinning copies at once."""

    def hand_out(self, converted: Any) -> Any:
        return converted

    def close(self) -> None:
        """Nothing: all is pinned."""


def cuda_pin() -> PinTensor:
    """Pins a tensor for the device that is the current one of this thread."""
    device = torch.cuda.current_device()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        # The current device belongs to a thread. Without this the background thread would take
        # memory of the first device in every rank.
        torch.cuda.set_device(device)
        return tensor.pin_memory()

    return pin


def pinned(value: Any, pin: PinTensor) -> Any:
    """A batch whose tensors, and objects with a method ``pin_memory``, are pinned."""

    def leaf(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return found if found.is_pinned() else pin(found)
        return found.pin_memory() if hasattr(found, "pin_memory") else found

    return each_leaf(value, leaf)


def can_pin(pin_memory: bool) -> bool:
    """Whether to pin batches. Warns if pinning was asked for and there is no CUDA device."""
    if pin_memory and not torch.cuda.is_available():
        warnings.warn(
            "pin_memory=True, but torch sees no CUDA device: batches are not pinned.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return pin_memory
