"""Parts of several files decoded in one call, and the keys that identify files."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.errors import PipelineError, SourceError
from penstock.image import kernel
from penstock.image.kernel import RegionRequest
from tests.support.jpegs import encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

GOOD = [encode(picture(40, 56, seed), kind) for seed, kind in enumerate(("420", "444", "422"))]
DAMAGED = GOOD[0][: len(GOOD[0]) // 2]
NO_JPEG = b"no picture" * 100


def request(data: bytes, **options: Any) -> RegionRequest:
    return RegionRequest(data, (4, 8, 32, 40), np.zeros((16, 16, 3), np.uint8), **options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*GOOD, DAMAGED, NO_JPEG]), max_size=9), st.booleans())
def test_each_request_has_the_same_outcome_as_alone(files: list[bytes], flip: bool) -> None:
    requests = [request(data, flip=flip) for data in files]
    found = kernel.regions(requests, [b""] * len(files))
    assert len(found) == len(files)
    for one, outcome in zip(requests, found, strict=True):
        if one.data is DAMAGED:
            assert isinstance(outcome, SourceError)
            assert "Premature end" in str(outcome)
        elif one.data is NO_JPEG:
            assert isinstance(outcome, kernel.Unsupported)
        else:
            alone = request(one.data, flip=flip)
            assert outcome == kernel.region(*alone, entries=b"")
            np.testing.assert_array_equal(one.out, alone.out)
            assert one.out.any()


def test_a_box_outside_its_picture_is_an_error_of_that_request_only() -> None:
    outside = RegionRequest(GOOD[1], (0, 0, 99, 8), np.zeros((8, 8, 3), np.uint8))
    first, second = kernel.regions([outside, request(GOOD[0])])
    assert isinstance(first, PipelineError)
    assert "(0, 0, 99, 8)" in str(first)
    assert second is None


def test_arrays_that_do_not_fit_are_refused_before_anything_is_decoded() -> None:
    good = request(GOOD[0])
    wrong = RegionRequest(GOOD[0], (0, 0, 8, 8), np.zeros((8, 8), np.uint8))
    with pytest.raises(PipelineError, match=r"shape \(8, 8\)"):
        kernel.regions([good, wrong])
    assert not good.out.any()


@pytest.mark.parametrize("asked", [[], [()], ((), ()), ([],), (1,), 1])
def test_the_compiled_module_takes_tuples_of_tuples(asked: Any) -> None:
    with pytest.raises(TypeError):
        kernel.compiled().regions(asked)


@pytest.mark.parametrize("asked", [[], "names", ("fine", 3), 1])
def test_the_compiled_module_reads_a_tuple_of_paths(asked: Any) -> None:
    with pytest.raises(TypeError):
        kernel.compiled().read_files(asked)


def test_no_references_are_leaked() -> None:
    files = [*GOOD, DAMAGED, NO_JPEG]
    requests = [request(data) for data in files]
    table = np.zeros((3, 256), np.float32)
    floats = np.zeros((3, 16, 16), np.float32)
    requests.append(RegionRequest(GOOD[0], (0, 0, 8, 8), floats, table=table))

    def counts() -> list[int]:
        gc.collect()
        watched = [table, floats, *files, *(one.out for one in requests)]
        return [sys.getrefcount(one) for one in watched]

    before = counts()
    for _ in range(5):
        kernel.regions(requests)
        with pytest.raises(PipelineError):
            kernel.regions([*requests, RegionRequest(GOOD[0], (0, 0, 8, 8), table)])
    assert counts() == before


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.data())
def test_any_changed_bit_or_length_gives_another_key(content: bytes, data: st.DataObject) -> None:
    key = kernel.key(content)
    assert len(key) == 16
    assert kernel.key(memoryview(bytearray(content))) == key
    assert kernel.key(content + b"\0") != key
    assert kernel.key(b"\0" + content) != key
    if content:
        assert kernel.key(content[:-1]) != key
        changed = bytearray(content)
        changed[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert kernel.key(changed) != key


def test_keys_of_data_that_differ_little_look_random() -> None:
    base = np.random.default_rng(0).bytes(4_000)
    keys = [kernel.key(base)]
    for bit in range(0, 32_000, 16):
        changed = bytearray(base)
        changed[bit // 8] ^= 1 << bit % 8
        keys.append(kernel.key(changed))
    bits = np.unpackbits(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 16), axis=1)
    # Each bit is set in half of the keys, and a change of one bit changes half of the key.
    assert len(set(keys)) == len(keys)
    np.testing.assert_allclose(bits.mean(axis=0), 0.5, atol=0.06)
    flipped = (bits[1:] != bits[0]).mean(axis=1)
    assert 0.25 < flipped.min() < flipped.max() < 0.75
    # Neither half follows from the other.
    both = np.corrcoef(bits.T) - np.eye(128)
    assert np.abs(both).max() < 0.15


def test_swapped_parts_and_repetitions_have_different_keys() -> None:
    parts = [bytes([value]) * 8 for value in range(16)]
    contents = [b"".join(parts[i:] + parts[:i]) for i in range(16)]
    contents += [b"\0" * length for length in range(300)]
    contents += [parts[3] * times for times in range(1, 40)]
    assert len({kernel.key(content) for content in contents}) == len(contents)
