"""Accelerate: its prepared loaders, and those that skip batches, stay loaders of Penstock.

``accelerate.data_loader`` makes a plain torch DataLoader for each loader that is prepared, with the
sampler of the original inside its own. The original is recognised by that sampler (a stream by
its dataset), and a loader of its class is made instead. Nothing is imported: Accelerate is changed
only if the script has imported it.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch.utils.data

if TYPE_CHECKING:
    from penstock.torch.dataloader import DataLoader

MODULE = "accelerate.data_loader"

_NESTED = 8
"""Samplers inside samplers, and datasets inside datasets, are searched to this depth."""

_known: weakref.WeakValueDictionary[int, DataLoader[Any]] = weakref.WeakValueDictionary()
"""Loaders by the id of what they draw from. A loader keeps that alive, so no id is used twice."""


def _origin(loader: Any) -> Any:
    """The object by which a loader is recognised when it is made anew."""
    if isinstance(loader.__dict__["dataset"], torch.utils.data.IterableDataset):
        return loader.__dict__["dataset"]
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def remember(loader: DataLoader[Any]) -> None:
    """Recognise this loader if Accelerate makes it anew."""
    _known[id(_origin(loader))] = loader


def find(dataset: Any, batch_sampler: Any, sampler: Any) -> DataLoader[Any] | None:
    """The loader of Penstock that a plain loader with these arguments is made from."""
    for start in (batch_sampler, sampler, dataset):
        found = start
        for _ in range(_NESTED):
            if found is None:
                break
            loader = _known.get(id(found))
            if loader is not None and _origin(loader) is found:
                return loader
            inner = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
            found = getattr(found, "dataset", None) if inner is None else inner
    return None


def make_anew(dataset: Any, batch_sampler: Any = None, **given: Any) -> Any:
    """Takes the place of ``DataLoader(...)`` in Accelerate."""
    original = find(dataset, batch_sampler, given.get("sampler"))
    if original is None:
        return torch.utils.data.DataLoader(dataset, batch_sampler=batch_sampler, **given)
    return original.like_this(dataset, batch_sampler=batch_sampler, **given)


def integrate() -> None:
    """Let Accelerate, if it is imported, make loaders of Penstock anew as loaders of Penstock."""
    module: Any = sys.modules.get(MODULE)
    if module is not None and getattr(module, "DataLoader", None) is torch.utils.data.DataLoader:
        module.DataLoader = make_anew
