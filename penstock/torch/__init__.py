"""Penstock for PyTorch: a drop-in DataLoader, and loaders whose batches are tensors.

torch is imported when ``DataLoader`` or ``loader`` is first used. Importing this package alone does
not import it, so that worker processes can use ``penstock.torch.worker`` without torch.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError

if TYPE_CHECKING:
    from penstock.torch.batches import loader
    from penstock.torch.dataloader import DataLoader

__all__ = ["DataLoader", "loader"]

_HOMES = {"DataLoader": "penstock.torch.dataloader", "loader": "penstock.torch.batches"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.torch' has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError.of("penstock.torch", "PyTorch", "torch")
    with _collection_paused():
        return getattr(importlib.import_module(_HOMES[name]), name)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause garbage collection: modules make little garbage, and after ``import torch`` a full
    collection is due, which takes a third of the time of importing the drop-in."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
