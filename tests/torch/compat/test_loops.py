"""Several loops at once, loops that are left, and exceptions."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.torch.compat.datasets import LongStream, Made, OwnIterator, Stream, samples, values

WORKERS = pytest.mark.parametrize("workers", [0, 1])


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(Made(n=5), 0), (Stream(5), 0), (Made(n=5), 1)],
    ids=["map", "stream", "worker"],
)
def test_two_loops_at_once(dataset: Any, workers: int, loader: Any) -> None:
    made = loader(dataset, batch_size=2, num_workers=workers)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(made, made, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]


def test_nested_loops(loader: Any) -> None:
    made = loader(Made(n=3))
    seen = [(a.item(), [b.item() for b in made]) for a in made]
    assert seen == [(0.0, [0.0, 1.0, 2.0]), (1.0, [0.0, 1.0, 2.0]), (2.0, [0.0, 1.0, 2.0])]


def test_loops_at_once_draw_their_own_order(loader: Any) -> None:
    def seen(kind: Any) -> Any:
        torch.manual_seed(0)
        made = kind(Made(), batch_size=3, shuffle=True)
        one, other = iter(made), iter(made)
        return [(next(one).tolist(), next(other).tolist()) for _ in range(4)]

    assert seen(loader) == seen(torch.utils.data.DataLoader)


@WORKERS
def test_a_loop_may_be_left(workers: int, loader: Any) -> None:
    made = loader(Made(n=6), num_workers=workers)
    for _ in range(2):
        assert values(itertools.islice(made, 2)) == [[0], [1]]
    assert len(values(made)) == 6


def test_an_iterator_outlives_its_loader(loader: Any) -> None:
    epoch = iter(loader(Made(n=3)))
    gc.collect()
    assert values(epoch) == [[0], [1], [2]]


def test_an_iterator_that_is_over_stays_over(loader: Any) -> None:
    epoch = iter(loader(Made(n=1)))
    assert len(epoch) == 1
    assert values(epoch) == [[0]]
    for _ in range(2):
        assert next(epoch, "over") == "over"


class Failed(Exception):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


class Numbered(Exception):
    """Cannot be made without an argument."""

    def __new__(cls, number: int) -> Numbered:
        made = super().__new__(cls, number)
        made.number = number
        return made

    number: int


# Functions: an exception that a dataset keeps would keep the loader by its traceback.
ERRORS: dict[str, Callable[[], Exception]] = {
    "FileNotFoundError": lambda: FileNotFoundError(2, "no such file", "x.jpg"),
    "KeyError": lambda: KeyError("k"),
    "ValueError": lambda: ValueError("text"),
    "RuntimeError": lambda: RuntimeError("text"),
    "own": lambda: Failed("text", 3),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
    "ZeroDivisionError": lambda: ZeroDivisionError(),
    "NotImplementedError": lambda: NotImplementedError(),
    "MemoryError": lambda: MemoryError("no memory"),
    "with arguments": lambda: Numbered(3),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_the_datasets_own_exception_is_caught_and_the_loop_goes_on(kind: str, loader: Any) -> None:
    made = ERRORS[kind]

    def make(index: int) -> int:
        if index in (0, 3):
            raise made()
        return index

    epoch, seen = iter(loader(Made(make, 5))), list[Any]()
    while True:
        try:
            seen.append(next(epoch).item())
        except StopIteration:
            break
        except type(made()):
            seen.append("failed")
    assert seen == ["failed", 1, 2, "failed", 4]


def test_exceptions_in_a_worker(loader: Any) -> None:
    def make(index: int) -> int:
        if index == 1:
            raise FileNotFoundError(2, "no such file", "x.jpg")
        return index

    epoch = iter(loader(Made(make, 4), num_workers=1))
    assert next(epoch).item() == 0
    with pytest.raises(FileNotFoundError):
        next(epoch)
    assert values(epoch) == [[2], [3]]


def test_exceptions_of_a_collate_function_and_of_a_stream(loader: Any) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("collate")

    with pytest.raises(LookupError, match="collate"):
        next(iter(loader(Made(), collate_fn=fail)))

    class Broken(Stream):
        def __iter__(self) -> Any:
            yield 1
            raise LookupError("stream")

    epoch = iter(loader(Broken()))
    assert next(epoch).item() == 1
    with pytest.raises(LookupError, match="stream"):
        next(epoch)
    assert next(epoch, "over") == "over"


def test_an_exception_of_a_sampler(loader: Any) -> None:
    def indices() -> Any:
        yield 0
        raise LookupError("sampler")

    class Sampler:
        def __iter__(self) -> Any:
            return indices()

    epoch = iter(loader(Made(), sampler=Sampler()))
    assert next(epoch).item() == 0
    with pytest.raises(LookupError, match="sampler"):
        next(epoch)


# Streams.


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_streams(batch_size: Any, loader: Any) -> None:
    made = loader(LongStream(5), batch_size=batch_size)
    delivered = values(made)
    assert (delivered if batch_size is None else samples(made)) == [0, 1, 2, 3, 4]
    assert len(made) == len(delivered)


def test_a_stream_without_a_length(loader: Any) -> None:
    with pytest.raises(TypeError):
        len(loader(Stream()))


@pytest.mark.parametrize("restarts", [True, False])
def test_a_stream_that_is_its_own_iterator(restarts: bool, loader: Any) -> None:
    made = loader(OwnIterator(5, restarts), batch_size=2)
    assert values(made) == [[1, 2], [3, 4], [5]]
    assert values(made) == ([[1, 2], [3, 4], [5]] if restarts else [])


def test_a_stream_longer_than_its_length_is_a_warning(loader: Any) -> None:
    class Short(Stream):
        def __len__(self) -> int:
            return 2

    made = loader(Short(3))
    assert len(made) == 2
    with pytest.warns(UserWarning, match="reported to be 2"):
        assert len(values(made)) == 3


def test_samplers_without_a_length(loader: Any) -> None:
    class Sampler:
        def __iter__(self) -> Any:
            return iter([1, 2])

    made = loader(Made(), sampler=Sampler())
    assert values(made) == [[1], [2]]
    with pytest.raises(TypeError):
        len(made)
