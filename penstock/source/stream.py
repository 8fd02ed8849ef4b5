"""A source of samples that can only be read one after the other."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar

from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.source.dataset import identity_of, is_iterable_dataset
from penstock.source.source import Source

_log = logging.getLogger("penstock.source")


class StreamSource(Source):
    """A torch IterableDataset, another iterable, or a function that makes an iterator.

    Samples cannot be read by index, so the stages below it work on samples in the order in which
    they come. It must start again, with the same samples, each time it is opened. If the dataset or
    its iterator has ``state_dict`` and ``load_state_dict``, a position is saved and restored by
    these; otherwise the samples before it are read again.

    >>> numbers = StreamSource(lambda: iter(range(5)))
    >>> list(numbers.open(skip=3)), list(numbers.open())
    ([3, 4], [0, 1, 2, 3, 4])
    """

    indexed: ClassVar[bool] = False

    def __init__(self, dataset: Any, version: str | None = None) -> None:
        # An IterableDataset of torch that is its own iterator starts again if its class wants to.
        if isinstance(dataset, Iterator) and not is_iterable_dataset(dataset):
            raise PipelineError(
                f"The stream is {dataset!r}, an iterator that can be read only once. Give a "
                "function that returns a new one (lambda: ...), so that each epoch can start from "
                "the first sample."
            )
        if isinstance(dataset, type) or not (hasattr(dataset, "__iter__") or callable(dataset)):
            raise PipelineError(
                f"The stream is {dataset!r}, which can be neither iterated nor called. Give an "
                "iterable, or a function that returns an iterator."
            )
        self.dataset = dataset
        self.value: Any = None
        """The sample that ``read`` gives: a worker puts it there as it comes from the stream."""
        self._version = version
        self._iterator: Any = None
        self._resumed = False
        self._unread: list[Any] = []
        """A copy of the dataset as it was before it was first iterated. Copies of this source, one
        for each worker, share the list."""

    def open(self, skip: int = 0, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """A new iterator over the samples, without the first ``skip``.

        ``state``: what ``state`` returned, to begin after the sample that was the last one then.
        """
        if not self._unread:
            self._unread.append(_copied(self.dataset))
        self._restore_dataset(state)
        if hasattr(self.dataset, "__iter__"):
            samples = iter(self.dataset)
        else:
            made = self.dataset()
            if not hasattr(made, "__iter__"):
                raise PipelineError(
                    f"{self._kind()}() returned {made!r}, which cannot be iterated; it must return "
                    "an iterator over the samples."
                )
            samples = iter(made)
        if state is not None and "iterator" in state:
            samples.load_state_dict(state["iterator"])
        self._iterator = samples
        return islice(samples, skip, None) if skip else samples

    def resume(self, skip: int, state: Mapping[str, Any]) -> Iterator[Any] | None:
        """Like ``open``; ``None`` if the dataset cannot load its own state: open it anew.

        Datasets of Hugging Face return states of shuffled shards that workers cannot load.
        """
        if not hasattr(self.dataset, "_starting_state_dict"):
            return self.open(skip, state)
        try:
            samples = self.open(skip, state)
            first = list(islice(samples, 1))  # only now does such a dataset load the state
        except Exception as error:
            _log.warning(
                "%s.load_state_dict() failed (%s: %s). All samples before are read again.",
                *(self._kind(), type(error).__name__, error),
            )
            return None
        return chain(first, samples)

    def _restore_dataset(self, state: Mapping[str, Any] | None) -> None:
        """Give the dataset its own part of a state, before an iterator is made."""
        dataset, own = self.dataset, None if state is None else state.get("dataset")
        if own is not None:
            self._resumed = True
            dataset.load_state_dict(own)
            # Datasets of Hugging Face ignore a state of another epoch than theirs.
            if isinstance(own, Mapping) and getattr(dataset, "epoch", None) != own.get("epoch"):
                set_epoch = getattr(dataset, "set_epoch", None)
                if set_epoch is not None and "epoch" in own:
                    set_epoch(own["epoch"])
        elif self._resumed:
            self._resumed = False
            if hasattr(dataset, "_starting_state_dict"):
                # Datasets of Hugging Face begin every epoch with the state they were given last.
                dataset.load_state_dict(None)

    def state(self) -> dict[str, Any] | None:
        """The states of the dataset and of the open iterator; ``None`` if they have none."""
        found = {}
        if is_stateful(self._iterator):
            found["iterator"] = self._iterator.state_dict()
        if is_stateful(self.dataset) and self._iterator is not self.dataset:
            found["dataset"] = self.dataset.state_dict()
        return {name: state for name, state in found.items() if state is not None} or None

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [self.value]

    def __len__(self) -> int:
        raise TypeError("a stream has no length that could be relied on; see length()")

    def length(self) -> int | None:
        """The number of samples; ``None`` if the dataset does not know it."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    def name(self, index: int) -> str:
        return f"sample {index} of {self._kind()}"

    def identity(self) -> str:
        if self._version is None and is_stateful(self.dataset):
            # Its attributes have its position, so only its class says which data it is.
            return fingerprint(("stateful dataset", type(self.dataset)))
        # A dataset without a state may keep its position in attributes.
        return identity_of(self._unread[0] if self._unread else self.dataset, self._version)

    def _kind(self) -> str:
        if hasattr(self.dataset, "__iter__"):
            return type(self.dataset).__name__
        return str(getattr(self.dataset, "__qualname__", type(self.dataset).__name__))


_SMALL = 1000
"""Lists and dicts of a dataset are copied up to this length."""


def _copied(dataset: Any) -> Any:
    """A copy of a dataset with its attributes, for its fingerprint; itself where there is none."""
    kind, attributes = type(dataset), getattr(dataset, "__dict__", None)
    if not isinstance(attributes, dict) or hasattr(kind, "__del__"):
        return dataset
    try:
        made = object.__new__(kind)
    except TypeError:
        return dataset
    for name, value in attributes.items():
        small = type(value) in (list, dict, set, deque) and len(value) <= _SMALL
        made.__dict__[name] = copy.copy(value) if small else value
    return made


def is_stateful(thing: Any) -> bool:
    """Whether it saves and restores its position itself (torchdata's ``Stateful`` protocol)."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is read as a stream: it can be iterated, or called, but not indexed.

    A torch IterableDataset is one even if it has ``__len__``: every dataset of torch has
    ``__getitem__``, which only raises an error there.
    """
    if is_iterable_dataset(dataset):
        return True
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return False
    return hasattr(dataset, "__iter__") or (callable(dataset) and not isinstance(dataset, type))
