"""A source that reads a dataset of the user: torch, Hugging Face, a list, an array."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.source.source import Source


class DatasetSource(Source):
    """Any object with ``__len__`` and ``__getitem__``, which returns the samples.

    If it has ``__getitems__``, as torch defines it (a list of indices in, a list of samples out),
    that is called instead. ``threadsafe``: several threads may read it at once; by default true
    for lists, tuples and arrays only. ``random``: it may draw from the global random generators;
    by default true, except for lists, tuples, ranges, arrays, and datasets of torch and Hugging
    Face that only hold data. ``calls``: ``__getitems__`` gets the indices of some samples of a
    batch (``"groups"``); those of a whole batch, and may return anything that the collate function
    takes, as in torch's DataLoader (``"batches"``); or is not called (``"none"``).

    >>> DatasetSource(["a", "b", "c"]).read([2, 0])
    ['c', 'a']
    """

    def __init__(
        self,
        dataset: Any,
        version: str | None = None,
        *,
        threadsafe: bool | None = None,
        random: bool | None = None,
        calls: Literal["groups", "batches", "none"] = "groups",
    ) -> None:
        _check(dataset)
        if len(dataset) == 0:
            raise SourceError(f"The {_kind(dataset)} is empty: it has no samples to read.")
        self.dataset = dataset
        self._version = version
        if threadsafe is None:
            threadsafe = isinstance(dataset, np.ndarray) or type(dataset) in (list, tuple)
        self.random = not holds_data(dataset) if random is None else random
        # Class variables in Source; here they depend on the dataset.
        self.__dict__["threadsafe"] = threadsafe
        self.__dict__["together"] = calls == "batches"
        self._calls = calls
        self.__dict__["runs_user_code"] = type(dataset) not in (np.ndarray, list, tuple, range)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> list[Any]:
        getitems = None if self._calls == "none" else getattr(self.dataset, "__getitems__", None)
        if getitems is None:
            dataset = self.dataset
            return [dataset[int(index)] for index in indices]
        samples = list(getitems([int(index) for index in indices]))
        if len(samples) != len(indices):
            raise SourceError(
                f"{_kind(self.dataset)}.__getitems__ returned {len(samples)} samples for "
                f"{len(indices)} indices; it must return one for each, in the same order."
            )
        return samples

    def read_together(self, indices: list[int]) -> Any:
        return self.dataset.__getitems__(indices)

    def reader(self) -> Callable[[int], Any]:
        if self._calls != "none" and hasattr(self.dataset, "__getitems__"):
            return super().reader()
        return partial(operator.getitem, self.dataset)

    def name(self, index: int) -> str:
        for attribute in ("samples", "imgs"):
            listed = getattr(self.dataset, attribute, None)
            if isinstance(listed, (list, tuple)) and len(listed) == len(self.dataset):
                entry = listed[index]
                first = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
                if isinstance(first, str):
                    return first
        return f"sample {index} of {_kind(self.dataset)}"

    def identity(self) -> str:
        if self._version is not None:
            # One version of two data sets, such as "1" in two scripts, is found out by their size.
            return fingerprint(("dataset", "version", self._version, len(self)))
        return identity_of(self.dataset, None)


def identity_of(dataset: Any, version: str | None) -> str:
    """The identity of a dataset: the user's version of it, its own fingerprint, or that of its
    whole state."""
    if version is not None:
        return fingerprint(("dataset", "version", version))
    # Hugging Face datasets have a fingerprint of their data and of all operations on it.
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str) and own and type(dataset).__module__.partition(".")[0] == "datasets":
        return fingerprint(("dataset", "datasets", own))
    return fingerprint(("dataset", dataset))


def is_iterable_dataset(dataset: object) -> bool:
    """Whether it is a torch IterableDataset, whose ``__getitem__`` only raises an error."""
    kind = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def holds_data(dataset: Any) -> bool:
    """Whether it is known to only hold data: reading it runs no code of the user."""
    kind = type(dataset)
    if isinstance(dataset, np.ndarray) or kind in (list, tuple, range):
        return True
    where = f"{kind.__module__}.{kind.__qualname__}"
    if where == "datasets.arrow_dataset.Dataset":
        # With a custom format, code of the user runs when a sample is read.
        return getattr(dataset, "_format_type", None) != "custom"
    return where in ("torch.utils.data.dataset.TensorDataset", "torch.Tensor")


def _kind(dataset: object) -> str:
    return type(dataset).__name__


def _check(dataset: Any) -> None:
    kind = _kind(dataset)
    if isinstance(dataset, type):
        raise PipelineError(
            f"The dataset is the class {dataset.__name__}; give an instance: {dataset.__name__}()."
        )
    if isinstance(dataset, (str, bytes)):
        raise PipelineError(f"The dataset is {dataset!r}; give the dataset itself, not its name.")
    if isinstance(dataset, Mapping):
        raise PipelineError(
            f"The dataset is a {kind}, which is read by key. Samples are read by index: give "
            "list(d.values()), or one of the splits if it is a dict of datasets."
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if is_iterable_dataset(dataset) or (missing and hasattr(dataset, "__iter__")):
        raise PipelineError(
            f"The dataset, a {kind}, can be iterated but not read by index. Give it __len__ "
            "and __getitem__, or let from_dataset() read it as a stream."
        )
    if missing:
        raise PipelineError(
            f"The dataset, a {kind}, has no {' and no '.join(missing)}. Samples are read by index: "
            "it needs __len__() and __getitem__(index)."
        )
    try:
        len(dataset)
    except TypeError as error:
        raise PipelineError(
            f"len() of the dataset, a {kind}, fails: {error}. Samples are read by index: it needs "
            "__len__() and __getitem__(index)."
        ) from error
