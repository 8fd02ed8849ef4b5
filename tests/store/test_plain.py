"""Plain samples: stored and read without running code, whatever the bytes say."""

from __future__ import annotations

import importlib.util
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.serialize import Packed, pack, unpack
from penstock.store import HeapStore, LmdbStore
from penstock.store.catalogue import on_disk, verify
from penstock.store.plain import NotPlain, pack_plain, pack_sample, unpack_sample

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None

MB = 1_000_000


def never() -> bool:
    return False


def read(frame: Any) -> Any:
    return unpack_sample(frame, never)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
            and one.flags.f_contiguous == other.flags.f_contiguous
        )
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if torch is not None and isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.is_quantized == other.is_quantized
            and _content(one) == _content(other)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one


def _content(tensor: Any) -> bytes:
    # Not contiguous(), which leaves the stride of a tensor of one element as it is.
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


PLAIN: list[Any] = [
    None,
    True,
    0,
    -(1 << 63),
    (1 << 64) - 1,
    1 << 200,
    [1, 1 << 100, -5],
    1.5,
    float("nan"),
    3 + 4j,
    "text",
    "lone surrogate \ud800",
    b"",
    b"bytes" * 50_000,
    (),
    [],
    {},
    ((1, (2, [3, {"four": (5,)}])), {6: b"7", (8, 9): None}),
    [[1, 2], [True, None], list(range(1000))],
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(12).reshape(3, 4)),
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.zeros((0, 5), np.int8),
    np.array(7.5),
    np.array(["a", "bcd", ""]),
    np.array([b"a", b"bcd"]),
    np.array([True, False]),
    np.array(["2020-01-01", "NaT"], "M8[ns]"),
    np.array([3], "m8[25s]"),
    np.arange(3, dtype=">i4"),
    np.array([1, 2], np.float16),
    np.array([1j]),
    np.float64(2.5),
    np.int64(-3),
    np.bool_(True),
    np.str_("cat"),
    np.bytes_(b"cat\0"),
    np.datetime64("2020-01-01"),
    {"image": np.zeros((4, 4, 3), np.uint8), "label": 3, "name": "a.jpg"},
]


@pytest.mark.parametrize("sample", PLAIN, ids=lambda sample: type(sample).__name__)
def test_a_plain_sample_is_read_as_it_was_without_a_pickle(sample: Any) -> None:
    packed = pack_sample(sample)
    assert not packed.pickled
    frame = packed.tobytes()
    assert len(frame) == packed.nbytes
    assert same(read(frame), np.ascontiguousarray(sample) if _strided(sample) else sample)


def _strided(sample: Any) -> bool:
    """Whether it is an array with gaps, which is stored without them."""
    return isinstance(sample, np.ndarray) and not sample.flags.forc


def test_truth_values_of_other_bytes_are_read_as_truth_values() -> None:
    mask = np.array([[0, 255, 1], [2, 0, 128]], np.uint8)
    for sample in (mask.view(bool), mask.T.view(bool), mask[:, ::2].copy().view(bool)):
        packed = pack_sample(sample)
        assert not packed.pickled
        found = read(packed.tobytes())
        assert found.tolist() == sample.tolist()
        assert found.view(np.uint8).max() == 1
    assert mask.max() == 255


def test_a_text_of_impossible_characters_is_pickled() -> None:
    with pytest.raises(NotPlain, match="characters"):
        pack_plain(np.array([0x110000], np.uint32).view("U1"))


class Metres(np.float64):
    """A number of a class of its own."""


DTYPES = ["?", "u1", "<i2", ">i4", "<f2", "<f8", "<c8", "S3", "<U2", ">U1", "<M8[ms]", "<m8[25s]"]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Arrays of any bytes, in the orders in which NumPy keeps them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind == "U" and draw(st.booleans()):
        raw = bytearray(np.array(["ab"] * size, dtype).tobytes()[:size])
    array: Any = np.frombuffer(raw, dtype) if size else np.empty(0, dtype)
    array = array.reshape(shape)
    if draw(st.booleans()):
        array = array.T
    return array[::2] if array.ndim and draw(st.booleans()) else array


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    kinds = [torch.bool, torch.uint8, torch.float32, torch.complex64, torch.bfloat16]
    dtype = draw(st.sampled_from([*kinds, torch.float8_e4m3fn]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    width = torch.empty(0, dtype=dtype).element_size()
    size = int(np.prod(shape)) * width
    raw = draw(st.binary(min_size=size, max_size=size))
    tensor = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    if dtype is torch.complex64:
        tensor = draw(st.sampled_from([tensor, tensor.conj(), tensor.conj().imag]))
    return tensor.T if tensor.dim() == 2 and draw(st.booleans()) else tensor


def _leaves() -> Any:
    keys = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    scalars = arrays().filter(lambda a: a.size and a.dtype.kind != "U").map(lambda a: a.flat[0])
    leaves = keys | st.complex_numbers() | arrays() | scalars | st.just(Metres(2))
    leaves |= st.lists(st.floats()) | st.lists(st.integers()).map(tuple)
    return leaves if torch is None else leaves | tensors()


TREES = st.recursive(
    _leaves(),
    lambda children: (
        st.lists(children)
        | st.lists(children).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans()), children)
    ),
    max_leaves=8,
)


def _normal(node: Any) -> Any:
    """The tree as it is read: arrays without gaps, truth values of the bytes 0 and 1."""
    if isinstance(node, np.ndarray):
        node = np.array(node, order="K" if node.flags.forc else "C")
        return np.asarray(node.view(np.uint8) != 0) if node.dtype == bool else node
    if torch is not None and isinstance(node, torch.Tensor) and node.dtype is torch.bool:
        return node.contiguous().view(torch.uint8) != 0
    if isinstance(node, (list, tuple)):
        return type(node)(map(_normal, node))
    if isinstance(node, dict):
        return {key: _normal(child) for key, child in node.items()}
    return node


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_a_tensor_of_one_element_with_a_stride_is_read_equal() -> None:
    one = torch.tensor([-0.0, 1.0])[::2]
    assert one.stride() == (2,)
    assert same(read(pack_plain(one).tobytes()), one)


@settings(max_examples=120, deadline=None)
@given(TREES)
def test_every_sample_that_is_written_as_plain_is_read_equal(sample: Any) -> None:
    try:
        packed = pack_plain(sample)
    except NotPlain:
        return
    assert same(read(packed.tobytes()), _normal(sample))


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    "sample",
    [
        {1, 2},
        bytearray(b"changes"),
        (1, bytearray(b"inside")),
        OrderedDict(a=1),
        Point(1, 2),
        Path("a"),
        np.array([object()]),
        np.zeros(2, [("x", "i4"), ("y", "f4")]),
        np.zeros(2, "V3"),
        range(3),
        Ellipsis,
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_other_objects_are_pickled_and_say_so(sample: Any) -> None:
    with pytest.raises(NotPlain):
        pack_plain(sample)
    packed = pack_sample(sample)
    assert packed.pickled
    frame = packed.tobytes()
    with pytest.raises(ValueError, match="its store holds no pickles"):
        read(frame)
    assert type(unpack_sample(frame, lambda: True)) is type(sample)


def test_a_tree_that_is_too_deep_is_pickled() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    packed = pack_sample(deep)
    assert packed.pickled
    assert unpack_sample(packed.tobytes(), lambda: True) == deep


needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


@needs_torch
def test_tensors_are_plain() -> None:
    for tensor in (
        torch.arange(6).reshape(2, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.zeros(()),
    ):
        packed = pack_sample((tensor, 1))
        assert not packed.pickled
        found, one = read(packed.tobytes())
        assert (found.dtype, found.shape, one) == (tensor.dtype, tensor.shape, 1)
        assert torch.equal(found, tensor)


@needs_torch
@pytest.mark.parametrize("dtype", ["load", "bool", "quint8"])
def test_a_tensor_of_a_dtype_that_is_never_written_is_an_error(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"no tensor of dtype '{dtype}'"):
        read(_frame(_ext(3, (_described("|u1", [1]), dtype)), b"\x02"))


def test_a_dtype_that_cannot_be_read_is_pickled() -> None:
    with pytest.raises(NotPlain, match="an array of"):
        pack_plain(np.zeros(1, "M8[0s]"))


def test_a_dtype_with_metadata_is_pickled_though_it_equals_one_without() -> None:
    assert not pack_sample(np.zeros(1, "f4")).pickled
    described = np.zeros(1, np.dtype("f4", metadata={"unit": "m"}))
    packed = pack_sample(described)
    assert packed.pickled


@needs_torch
def test_tensors_that_are_computed_when_they_are_read_are_plain() -> None:
    number = torch.tensor([1 + 2j, 3])
    for tensor in (number.conj(), number.conj().imag):
        packed = pack_sample(tensor)
        assert not packed.pickled
        assert torch.equal(read(packed.tobytes()), tensor)
        assert torch.equal(unpack(pack(tensor).tobytes()), tensor)


@needs_torch
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_tensor_of_a_dtype_that_numpy_lacks_is_plain(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    packed = pack_sample(tensor)
    assert not packed.pickled
    for found in (read(packed.tobytes()), unpack(pack(tensor).tobytes())):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


@needs_torch
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_keeps_its_scale() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8)
    packed = pack_sample(tensor)
    assert packed.pickled
    found = unpack_sample(packed.tobytes(), lambda: True)
    assert (found.q_scale(), found.q_zero_point()) == (0.5, 1)
    assert found.int_repr().tolist() == [3, 3, 3]


def test_arrays_are_views_of_the_frame_and_can_be_written() -> None:
    frame = pack_sample((np.arange(1000), "x")).tobytes()
    array, _ = read(frame)
    assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    array[0] = 5


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _ext(code: int, content: Any) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))
    return packed


def _described(dtype: str, shape: list[int], number: int = 0, fortran: int = 0) -> bytes:
    head = struct.pack(f"<IBB{len(shape)}Q", number, fortran, len(shape), *shape)
    return head + dtype.encode()


def _array(dtype: str, shape: list[int], number: int = 0) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(2, _described(dtype, shape, number)))
    return packed


def _frame(blob: bytes, *buffers: bytes) -> bytearray:
    views = [memoryview(buffer) for buffer in buffers]
    return Packed(b"\x01" + blob, views, pickled=False).tobytes()


HOSTILE = [
    _frame(_array("<f4", [1 << 62, 4]), b"1234"),
    _frame(_array("<f4", [2]), b"1234"),
    _frame(_array("<f4", [1], 5), b"1234"),
    _frame(_array("<f4", [2] * 255), b"1234"),
    _frame(_array("|O", [1]), b"12345678"),
    _frame(_array("O", [1]), b"12345678"),
    _frame(_array("<f4,<f4", [1]), b"12345678"),
    _frame(_array("|V8", [1]), b"12345678"),
    _frame(_array("<f3", [1]), b"123"),
    _frame(_array("<U1", [1]), b"\xff\xff\xff\x7f"),
    _frame(_array("|b1", [1]), b"\x02"),
    _frame(_array("<f4", [0, 1 << 62, 1 << 62]), b""),
    _frame(_array("<f4", [1] * 40), b"1234"),
    _frame(_ext(2, [])),
    _frame(_array("<M8[0s]", [1]), b"12345678"),  # NumPy divides by the 0
    _frame(_array("<m8[00s]", [1]), b"12345678"),
    _frame(_ext(4, ["<M8[0s]", b"12345678"])),
    _frame(_ext(4, ["<U4", b"\xff" * 16])),
    _frame(_ext(4, ["|S4", b"1234"])),
    _frame(_ext(4, ["|b1", b"\x02"])),
    _frame(_ext(4, ["<i4", b"12345678"])),
    _frame(_ext(4, ["|O", b"12345678"])),
    _frame(_ext(10, ["to_pil", 1])),
    _frame(_ext(99, [])),
    _frame(msgpack.packb({1: 2}) + b"more"),
    _frame(b"\x81\xd4\x01\x90\x00"),  # a map whose key is a list
    _frame(msgpack.packb(msgpack.ExtType(11, b"\xff\xff\xff\xff")), b"1234"),
    _frame(b"\xdd\xff\xff\xff\xff"),  # an array of 4,294,967,295 items
    _frame(b"\x91" * 100_000),
    bytearray(b"\xff" * 12),
    bytearray(b""),
    bytearray(b"\x01\x00\x00\x00" + b"\xff" * 8 + b"\xff" * 8),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_bytes_are_an_error_and_nothing_else(number: int) -> None:
    with pytest.raises(ValueError, match=r"sample cannot be read|frame|holds no pickles|buffer"):
        read(HOSTILE[number])


def test_lists_nested_without_end_are_an_error() -> None:
    blob = msgpack.packb([])
    for _ in range(2000):
        blob = msgpack.packb(msgpack.ExtType(1, blob))
    with pytest.raises(ValueError, match="deep"):
        read(_frame(blob))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_changed_bytes_are_an_error_or_a_sample(data: st.DataObject) -> None:
    sample = (
        np.arange(20, dtype="<i2").reshape(4, 5),
        {"name": "a", "sizes": [1, 2]},
        np.str_("b"),
    )
    frame = pack_sample(sample).tobytes()
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    with suppress(ValueError):
        read(frame)


def test_a_store_says_whether_it_holds_pickles(tmp_path: Path) -> None:
    store, other = (LmdbStore(tmp_path / "store", MB, "a", persistent=True) for _ in range(2))
    store.put_many([(1, pack_sample((np.arange(3), 1)))])
    assert not store.holds_pickles()
    assert not other.holds_pickles()
    store.put_tagged([(2, 0, pack_sample({1, 2}))])
    assert store.holds_pickles()
    assert other.holds_pickles()
    store.close()
    other.close()
    again = LmdbStore(tmp_path / "store", MB, "a", persistent=True)
    assert again.holds_pickles()
    again.close()
    assert HeapStore(MB).holds_pickles()


def first(value: Any) -> Any:
    return np.full(4, value, np.float32)


def as_set(value: Any) -> Any:
    return {int(value), 1000}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_pickle_smuggled_into_a_store_of_plain_samples_is_not_run(
    tmp_path: Path, kind: Any
) -> None:
    pipeline = (
        ps.from_dataset(np.arange(16), random=False, version="1")
        .map(first, random=False, version="1")
        .cache("1MB", where=str(tmp_path / "kept"))
        .batch(4)
    )

    def run() -> tuple[float, int]:
        with pipeline.loader(workers=1, kind=kind) as loader:
            total = sum(float(batch.sum()) for batch in loader)
            return total, loader.stats().corrupt

    expected, _ = run()
    (place,) = (tmp_path / "kept").iterdir()
    evil = bytes(pack(Evil(tmp_path / "ran")).tobytes())
    assert pickle.dumps(Evil(tmp_path / "ran"))
    store = LmdbStore(place, MB, place.name, persistent=True)
    store.delete_many(range(16))
    assert all(store.put_many([(key, evil) for key in range(16)]))
    store.close()
    assert verify(on_disk([place])[0]).sound
    for action in ("verify", "list"):
        command = [sys.executable, "-m", "penstock", "store", action, "--place", str(place)]
        assert subprocess.run(command, capture_output=True).returncode == 0
    warned = pytest.warns(RuntimeWarning, match="bytes that are not a sample")
    with warned if kind == "threads" else nullcontext():
        total, corrupt = run()
    assert total == expected
    assert corrupt > 0
    assert not (tmp_path / "ran").exists()
    # The samples were put in again.
    assert run() == (expected, 0)


def test_samples_that_are_not_plain_are_kept_too(tmp_path: Path) -> None:
    pipeline = (
        ps.from_dataset(np.arange(16), random=False, version="1")
        .map(as_set, random=False, version="1")
        .cache("1MB", where=str(tmp_path / "kept"))
        .batch(4, collate=list)
    )
    for hits in (0, 16):
        with pipeline.loader(workers=0, shuffle=False) as loader:
            samples = [sample for batch in loader for sample in batch]
            assert samples == [{index, 1000} for index in range(16)]
            assert loader.stats().caches[0].hits == hits
