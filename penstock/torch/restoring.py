"""Restores the state of a training script: models, optimisers, schedules, random generators."""

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


class SavedTraining:
    """A copy of the state of all models, optimisers and generators; ``restore`` puts it back.

    Variables of the script itself, such as a step counter, are not restored.
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
        for stateful in _living(Optimizer, LRScheduler, GradScaler):
            self._stateful.append((stateful, copy.deepcopy(stateful.state_dict())))
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        # Never run on a GPU.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in self._tensors.values():
                tensor.copy_(saved)
            for tensor, gradient in self._gradients:
                tensor.grad = gradient
        for stateful, state in self._stateful:
            stateful.load_state_dict(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)  # never run on a GPU


def _living(*kinds: type) -> Iterator[Any]:
    """All living objects of these classes.

    Compares ``type(value)``: ``isinstance`` may run code of the object.
    """
    return (value for value in gc.get_objects() if issubclass(type(value), kinds))
