"""Putting a training script back to where it was: models, optimisers, schedules, generators."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Before:
    """What a script's models and generators are now; ``restore`` brings it back, in place.

    What the script counts in variables of its own cannot be put back.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._stateful: list[tuple[Any, Any]] = []
        for module in _living(torch.nn.Module):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(tensor) not in self._tensors:
                    self._tensors[id(tensor)] = (tensor, tensor.detach().clone())
                    grad = tensor.grad if tensor.is_leaf else None
                    self._gradients.append((tensor, None if grad is None else grad.clone()))
        for one in _living(Optimizer, LRScheduler, GradScaler):
            self._stateful.append((one, copy.deepcopy(one.state_dict())))
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        # Has never met a GPU.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, was in self._tensors.values():
                tensor.copy_(was)
            for tensor, gradient in self._gradients:
                tensor.grad = gradient
        for one, state in self._stateful:
            one.load_state_dict(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)  # has never met a GPU


def _living(*kinds: type) -> Iterator[Any]:
    """All objects of these kinds. By their type: asking an object what it is may run its code."""
    return (one for one in gc.get_objects() if issubclass(type(one), kinds))
