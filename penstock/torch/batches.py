"""Batches as tensors: views of the same shared memory, in the containers torch users expect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.loader import Custom, Loader
from penstock.options import Options
from penstock.pipeline import Pipeline
from penstock.tree import is_namedtuple


class Tensors:
    """Turns the arrays of a batch into tensors that share their memory.

    ``tuples`` makes a container of the fields of a plain tuple: torch's own DataLoader gives
    lists there.
    """

    def __init__(self, tuples: Callable[[list[Any]], Any], pin: bool = False) -> None:
        self._tuples = tuples
        self._pin = pin

    def __call__(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            try:
                value = torch.from_numpy(value)
            except TypeError:  # a type that torch does not have
                return value
            return value.pin_memory() if self._pin else value
        if isinstance(value, torch.Tensor):
            return value.pin_memory() if self._pin else value
        if isinstance(value, Mapping):
            made = {key: self(child) for key, child in value.items()}
            return made if type(value) is dict else _same_kind(value, made)
        if is_namedtuple(value):
            return type(value)(*(self(child) for child in value))
        if type(value) is tuple:
            return self._tuples([self(child) for child in value])
        if type(value) is list:
            return [self(child) for child in value]
        if self._pin and hasattr(value, "pin_memory"):
            return value.pin_memory()
        return value


def _same_kind(like: Any, made: dict[Any, Any]) -> Any:
    try:
        return type(like)(made)
    except TypeError:
        return made


def can_pin(asked: bool) -> bool:
    """Whether batches are copied into pinned memory; without an accelerator it means nothing."""
    if asked and not torch.cuda.is_available():
        warnings.warn(
            "pin_memory=True, but torch sees no CUDA device: batches are not pinned.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return asked


def loader(pipeline: Pipeline, *, pin_memory: bool = False, **options: Any) -> Loader:
    """A pipeline's loader whose batches are tensors; takes what ``Pipeline.loader`` takes.

    >>> import numpy as np
    >>> import penstock as ps
    >>> import penstock.torch
    >>> train = ps.from_dataset(np.arange(4.0)).batch(2)
    >>> next(iter(penstock.torch.loader(train, workers=0, shuffle=False)))
    tensor([0., 1.], dtype=torch.float64)
    """
    convert = Tensors(tuple, can_pin(pin_memory))
    return Loader(pipeline, Options(**options), Custom(convert=convert))
