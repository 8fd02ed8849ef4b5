"""Streams start from the first sample at each opening, and refuse exhausted iterators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from penstock.errors import FingerprintError, PipelineError
from penstock.source import StreamSource


class Lines:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[str]:
        return (f"line {i}" for i in range(self.count))


class Counted(Lines):
    def __len__(self) -> int:
        return self.count


def test_each_opening_starts_from_the_first_sample() -> None:
    source = StreamSource(Lines(3))
    assert list(source.open()) == list(source.open()) == ["line 0", "line 1", "line 2"]
    assert list(source.open(skip=2)) == ["line 2"]
    assert list(source.open(skip=9)) == []


def test_a_function_may_return_the_iterator() -> None:
    source = StreamSource(lambda: (i * i for i in range(4)))
    assert list(source.open(1)) == [1, 4, 9]
    assert list(source.open()) == [0, 1, 4, 9]
    assert source.length() is None
    with pytest.raises(PipelineError, match="returned 3, which cannot be iterated"):
        StreamSource(lambda: 3).open()


def test_the_length_is_that_of_the_dataset_if_it_has_one() -> None:
    assert StreamSource(Counted(3)).length() == 3
    assert StreamSource(Lines(3)).length() is None


def test_torch_iterable_datasets_are_streams() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return iter(range(5))

    source = StreamSource(Stream())
    assert list(source.open(3)) == [3, 4]
    assert source.length() is None
    assert source.name(2) == "sample 2 of Stream"


def test_hugging_face_streams_are_streams() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [1, 2, 3]}).to_iterable_dataset()
    source = StreamSource(data, version="1")
    assert list(source.open(1)) == [{"x": 2}, {"x": 3}]
    assert source.length() is None


def test_an_iterator_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(PipelineError, match="read only once"):
        StreamSource(i for i in range(3))
    for wrong in (3, Lines):
        with pytest.raises(PipelineError, match="neither iterated nor called"):
            StreamSource(wrong)


def test_identity_is_that_of_the_dataset_or_its_version() -> None:
    assert StreamSource(Lines(3)).identity() == StreamSource(Lines(3)).identity()
    assert StreamSource(Lines(3)).identity() != StreamSource(Lines(4)).identity()
    lines = Lines(3)
    lines.live = iter([])  # type: ignore[attr-defined]
    with pytest.raises(FingerprintError, match="attribute 'live'"):
        StreamSource(lines).identity()
    assert StreamSource(lines, "1").identity() != StreamSource(lines, "2").identity()


def test_it_can_be_pickled() -> None:
    source = cloudpickle.loads(cloudpickle.dumps(StreamSource(Lines(3), "1")))
    assert list(source.open(2)) == ["line 2"]
    assert source.identity() == StreamSource(Lines(3), "1").identity()
