"""Replica numbers: as if counted one by one, whole or in chunks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import Occurrences, replicas

# Few values repeat often and close together; many and far ones take the path without a table.
sequences = st.one_of(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 2000), max_size=60),
    st.lists(st.sampled_from([0, 3, 10**12, 2**62]), max_size=20),
)


def counted(sequence: list[int]) -> list[int]:
    seen: Counter[int] = Counter()
    found = []
    for index in sequence:
        found.append(seen[index])
        seen[index] += 1
    return found


@settings(deadline=None)
@given(sequences)
def test_replicas_are_those_of_counting_one_by_one(sequence: list[int]) -> None:
    found = replicas(np.array(sequence, dtype=np.int64))
    expected = counted(sequence)
    if found is None:
        assert not any(expected)
    else:
        assert found.dtype == np.int64
        assert any(expected)
        assert found.tolist() == expected


@settings(deadline=None)
@given(sequences.filter(lambda s: max(s, default=0) < 10**6), st.data())
def test_counting_in_chunks_is_counting_the_whole(sequence: list[int], data: st.DataObject) -> None:
    seen = Occurrences()
    expected = counted(sequence)
    start = 0
    while start < len(sequence):
        end = start + data.draw(st.integers(1, 20))
        chunk = np.array(sequence[start:end], dtype=np.int64)
        found = seen.count(chunk)
        wanted = expected[start:end]
        assert (None if found is None else found.tolist()) == (wanted if any(wanted) else None)
        start = end


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_repeats_in_almost_nothing(count: int) -> None:
    indices = np.zeros(count, dtype=np.int64)
    assert replicas(indices) is None
    assert Occurrences().count(indices) is None


def test_a_million_draws_are_numbered_right() -> None:
    indices = np.random.default_rng(0).integers(0, 300_000, 1_000_000)
    found = replicas(indices)
    assert found is not None
    counts = np.bincount(indices)
    # Every index has each of the numbers below its count once, in the order of the sequence.
    assert found.sum() == (counts * (counts - 1) // 2).sum()
    assert np.array_equal(np.bincount(indices, found + 1), counts * (counts + 1) // 2)
    last = np.empty(300_000, dtype=np.int64)
    last[indices] = found
    assert np.array_equal(last[counts > 0] + 1, counts[counts > 0])
