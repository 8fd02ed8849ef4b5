"""Pinned memory: batches are copied into it by a background thread, ahead of the training loop.

The walk over a batch is the same for every device. What pins one tensor is ``cuda_pin``, which has
never met a GPU: the machines on which Penstock is developed and tested have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.tree import is_namedtuple

PinTensor = Callable[[torch.Tensor], torch.Tensor]


def pin_batches() -> Callable[[Any], Any]:
    """The function that pins a batch. Called in the thread of the training loop."""
    pin = cuda_pin()
    return lambda value: pinned(value, pin)


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
    if isinstance(value, torch.Tensor):
        return pin(value)
    if isinstance(value, Mapping):
        children = {key: pinned(child, pin) for key, child in value.items()}
        return children if type(value) is dict else same_mapping(value, children)
    if is_namedtuple(value):
        return type(value)(*(pinned(child, pin) for child in value))
    if type(value) in (tuple, list):
        return type(value)([pinned(child, pin) for child in value])
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def same_mapping(like: Any, children: dict[Any, Any]) -> Any:
    """A mapping of the same class, or a plain dict if its class cannot be made of a dict."""
    try:
        return type(like)(children)
    except TypeError:
        return children


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
