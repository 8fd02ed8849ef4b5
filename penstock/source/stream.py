"""A source of samples that can only be read one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from penstock.errors import PipelineError
from penstock.source.dataset import identity_of, is_iterable_dataset
from penstock.source.source import Source


class StreamSource(Source):
    """A torch IterableDataset, another iterable, or a function that makes an iterator.

    Samples cannot be read by index, so the stages below it work on samples in the order in which
    they come. It must start again, with the same samples, each time it is opened.

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

    def open(self, skip: int = 0) -> Iterator[Any]:
        """A new iterator over the samples, without the first ``skip``."""
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
        return islice(samples, skip, None) if skip else samples

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
        return identity_of(self.dataset, self._version)

    def _kind(self) -> str:
        if hasattr(self.dataset, "__iter__"):
            return type(self.dataset).__name__
        return str(getattr(self.dataset, "__qualname__", type(self.dataset).__name__))


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
