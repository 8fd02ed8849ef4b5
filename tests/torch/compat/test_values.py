"""Batches have the values, types and containers that torch's collate makes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch.compat.datasets import Made

Point = namedtuple("Point", "x y")


class Marked(torch.Tensor):  # type: ignore[misc]
    """A subclass of tensors."""


class Row(list[Any]):
    """A list with an attribute, which cannot be made of its items alone."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])
        self.width = 2


class Pair(tuple[Any, ...]):
    """A subclass of tuples."""


def marked(index: int) -> Any:
    return torch.full((2,), float(index)).as_subclass(Marked)


SAMPLES: dict[str, Any] = {
    "float": float,
    "int": int,
    "bool": lambda i: i % 2 == 0,
    "str": str,
    "bytes": lambda i: b"%d" % i,
    "tensor": lambda i: torch.full((2, 3), i),
    "scalar tensor": lambda i: torch.tensor(i),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "half": lambda i: torch.full((2,), i, dtype=torch.float16),
    "subclass": marked,
    "array": lambda i: np.full((2,), i, dtype=np.float32),
    "uint16": lambda i: np.full((2,), i, dtype=np.uint16),
    "numpy scalar": np.float32,
    "numpy int": np.int16,
    "tuple": lambda i: (torch.ones(1) * i, i),
    "list": lambda i: [i, float(i)],
    "dict": lambda i: {"x": torch.ones(1) * i, "n": i},
    "ordered dict": lambda i: OrderedDict(b=i, a=float(i)),
    "default dict": lambda i: defaultdict(list, x=torch.ones(1) * i),
    "user dict": lambda i: UserDict(x=i),
    "named tuple": lambda i: Point(torch.ones(1), i),
    "tuple with text": lambda i: (i, str(i), b"b"),
    "dict with text": lambda i: {"s": str(i), "t": (str(i), i)},
    "named tuple with text": lambda i: Point(str(i), i),
    "list subclass": lambda i: Row(i, str(i)),
    "list subclass inside": lambda i: {"row": Row(torch.ones(1) * i, [i])},
    "tuple subclass": lambda i: Pair([i, float(i)]),
    "list of text": lambda i: [str(i), "b"],
    "nested": lambda i: ({"a": [i, (float(i), "s")]}, [torch.ones(2)]),
    "empty tensor": lambda i: torch.ones(0),
    "non-contiguous": lambda i: torch.arange(6).reshape(2, 3).T,
    "other shapes": lambda i: [torch.ones(i // 2 + 1)],
}


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        assert getattr(one, "width", 0) == getattr(other, "width", 0)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("batch_size", [2, None])
def test_kinds_of_samples(kind: str, batch_size: Any, loader: Any) -> None:
    make = SAMPLES[kind]
    if batch_size is None:
        convert = torch.utils.data._utils.collate.default_convert
        expected = [convert(make(index)) for index in range(4)]
    else:
        collate = torch.utils.data.default_collate
        expected = [collate([make(0), make(1)]), collate([make(2), make(3)])]
    batches = list(loader(Made(make, 4), batch_size=batch_size))
    assert len(batches) == len(expected)
    for batch, right in zip(batches, expected, strict=True):
        same(batch, right)


@pytest.mark.parametrize(
    "kind", ["tuple with text", "nested", "subclass", "bfloat16", "dict", "list subclass"]
)
def test_kinds_of_samples_from_a_worker(kind: str, loader: Any) -> None:
    if loader is torch.utils.data.DataLoader:
        pytest.skip("torch says what is right without a worker")
    make = SAMPLES[kind]
    (batch,) = loader(Made(make, 3), batch_size=3, num_workers=1)
    same(batch, torch.utils.data.default_collate([make(0), make(1), make(2)]))


@pytest.mark.parametrize("value", [None, object()], ids=["None", "object"])
def test_what_torch_cannot_collate_is_a_type_error(value: Any, loader: Any) -> None:
    with pytest.raises(TypeError):
        list(loader(Made(lambda _: value), batch_size=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_single_masked_arrays_keep_their_mask(workers: int, loader: Any) -> None:
    def make(index: int) -> Any:
        return np.ma.array([index, 1], mask=[True, False])

    for sample in loader(Made(make, 2), batch_size=None, num_workers=workers):
        assert isinstance(sample, np.ma.MaskedArray)
        assert sample.mask.tolist() == [True, False]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("workers", [0, 1])
def test_sparse_tensors(workers: int, loader: Any) -> None:
    def make(index: int) -> Any:
        return torch.eye(2).to_sparse() * index

    made = loader(Made(make, 3), batch_size=2, collate_fn=torch.stack, num_workers=workers)
    batches = list(made)
    assert [batch.is_sparse for batch in batches] == [True, True]
    found = [batch.to_dense().diagonal(dim1=1, dim2=2).tolist() for batch in batches]
    assert found == [[[0, 0], [1, 1]], [[2, 2]]]


def test_shapes_that_do_not_stack_are_a_runtime_error(loader: Any) -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        list(loader(Made(lambda i: torch.ones(i + 1)), batch_size=2))


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_collate_function_decides_the_form(batch_size: Any, loader: Any) -> None:
    made = loader(Made(n=2), batch_size=batch_size, collate_fn=lambda x: ("made", x))
    assert list(made) == ([("made", [0.0, 1.0])] if batch_size else [("made", 0.0), ("made", 1.0)])


def test_batches_can_be_changed_in_place_and_kept(loader: Any) -> None:
    kept = []
    for batch in loader(Made(n=6), batch_size=2):
        batch += 1
        kept.append(batch)
    assert [batch.tolist() for batch in kept] == [[1, 2], [3, 4], [5, 6]]
