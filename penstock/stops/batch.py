"""The batch stop: makes a batch of samples by stacking, by padding or by a user's collate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.order import Budget
from penstock.tree import as_array, fill, flatten, leaves_like

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Batch:
    """Cuts the order into batches of ``size``; ``collate`` is ``None`` for stacking in place.

    ``budget``: groups samples by their lengths; ``size`` is then about the number of samples in a
    batch.
    """

    size: int
    drop_last: bool = False
    collate: Collate | None = None
    version: str | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise PipelineError(
                f"batch() got size {self.size!r}. Give the number of samples in a batch, a whole "
                "number from 1 on."
            )
        if self.collate is not None and not callable(self.collate):
            raise PipelineError(
                f"batch() got collate={self.collate!r}, which cannot be called. Give a function "
                "that takes a list of samples and returns the batch."
            )

    def fingerprint(self) -> str:
        """Identifies how samples are collated. Raises FingerprintError."""
        how = self.version if self.version is not None else self.collate
        return fingerprint(("batch", how))

    def budget_fingerprint(self) -> str:
        """Identifies which samples are in a batch, besides the order."""
        budget = self.budget
        if budget is None:
            return fingerprint("no budget")
        how = (budget.limit, budget.size, budget.padded, budget.window, budget.too_long)
        return fingerprint(("budget", budget.lengths, how))

    @property
    def described(self) -> str:
        """The size of a batch, for people."""
        if self.budget is None:
            return f"{self.size} samples"
        budget, bounds = self.budget, []
        if budget.limit is not None:
            bounds.append(f"{budget.limit:g} tokens" + (" with padding" if budget.padded else ""))
        if budget.size is not None:
            bounds.append(f"{budget.size} samples")
        return f"at most {' and '.join(bounds)}, of similar length"


class Misfit(ValueError):
    """A sample that does not stack with the others; ``place``: its position among them."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def stack(samples: list[Any]) -> Any:
    """Stack samples field by field, text and bytes as lists. Raises Misfit."""
    return _by_field(samples, _stack_field)


@dataclass(frozen=True)
class Pad:
    """Stack samples whose arrays differ in size, padded with ``value`` at the end of each axis.

    ``lengths``: the batch gets one more field, ``"lengths"`` in dicts and the last one in tuples:
    the length of each sample before padding, along the first axis of its first array.
    """

    value: float = 0
    lengths: bool = False

    def __call__(self, samples: list[Any]) -> Any:
        batch = _by_field(samples, self._pad_field)
        return self._with_lengths(batch, samples) if self.lengths else batch

    def _with_lengths(self, batch: Any, samples: list[Any]) -> Any:
        lengths = np.array([_length(place, sample) for place, sample in enumerate(samples)])
        if isinstance(batch, Mapping):
            if "lengths" in batch:
                raise PipelineError(
                    'batch(lengths=True) adds a field "lengths", and samples have one of that name '
                    "already. Rename theirs with a map, or leave lengths=True out."
                )
            return {**batch, "lengths": lengths}
        return (*batch, lengths) if isinstance(batch, tuple) else (batch, lengths)

    def _pad_field(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        ndim = arrays[0].ndim
        for place, array in enumerate(arrays):
            if array.ndim != ndim:
                raise Misfit(
                    place, f"it has {array.ndim} dimensions, the first of its batch {ndim}"
                )
        shape = tuple(max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True))
        dtype = np.result_type(*arrays)
        out = np.full((len(arrays), *shape), self.value, dtype=dtype)
        for row, array in enumerate(arrays):
            out[row, ...][tuple(slice(0, n) for n in array.shape)] = array
        return out


def _length(place: int, sample: Any) -> int:
    for leaf in flatten(sample)[0]:
        array = None if isinstance(leaf, (str, bytes)) else as_array(leaf)
        if array is not None and array.ndim:
            return int(array.shape[0])
    raise Misfit(place, "it has no array, so lengths=True finds no length")


def _by_field(samples: list[Any], join: Callable[[Sequence[NDArray[Any]]], NDArray[Any]]) -> Any:
    first, skeleton = flatten(samples[0])
    columns: list[list[Any]] = [[leaf] for leaf in first]
    for place, sample in enumerate(samples[1:], start=1):
        try:
            leaves = leaves_like(sample, skeleton)
        except ValueError as error:
            raise Misfit(place, f"it has {error}") from None
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return fill(skeleton, [_join(column, join) for column in columns])


def _join(column: list[Any], join: Callable[[Sequence[NDArray[Any]]], NDArray[Any]]) -> Any:
    if isinstance(column[0], (str, bytes)):
        return column
    arrays = []
    for place, value in enumerate(column):
        array = as_array(value)
        if array is None:
            raise Misfit(
                place, f"a field of type {type(value).__name__} does not stack into an array"
            )
        arrays.append(array)
    return join(arrays)


def _stack_field(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shape = arrays[0].shape
    for place, array in enumerate(arrays):
        if array.shape != shape:
            raise Misfit(place, f"its shape is {array.shape}, the first of its batch has {shape}")
    return np.stack(arrays)
