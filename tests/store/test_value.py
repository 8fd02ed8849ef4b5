"""A stored value has a checksum that detects any damage, and a cost known beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store import LmdbStore, cost
from penstock.store.value import frame, pack_key, payload, unpack_key

keys = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def content(key: int, framed: bytes | bytearray | memoryview) -> bytes | None:
    """The payload as bytes; ``None`` if it is damaged."""
    value = payload(key, memoryview(framed))
    return None if value is None else bytes(value)


@given(keys, st.lists(st.binary(max_size=200)))
def test_a_framed_value_is_read_back_unchanged(key: int, parts: list[bytes]) -> None:
    framed = frame(key, parts)
    assert content(key, framed) == b"".join(parts)
    assert framed == frame(key, b"".join(parts))
    assert unpack_key(pack_key(key)) == key


@given(keys, st.binary(max_size=200), st.data())
def test_any_flipped_bit_is_detected(key: int, value: bytes, data: st.DataObject) -> None:
    framed = bytearray(frame(key, value))
    place = data.draw(st.integers(0, 8 * len(framed) - 1))
    framed[place // 8] ^= 1 << place % 8
    assert payload(key, memoryview(framed)) is None


@given(keys, keys, st.binary(min_size=1, max_size=50))
def test_an_intact_value_under_a_wrong_key_is_detected(key: int, other: int, value: bytes) -> None:
    expected = value if key == other else None
    assert content(other, frame(key, value)) == expected


@given(keys, st.binary(max_size=50), st.data())
def test_a_truncated_value_is_detected(key: int, value: bytes, data: st.DataObject) -> None:
    framed = frame(key, value)
    cut = data.draw(st.integers(0, len(framed) - 1))
    assert payload(key, memoryview(framed)[:cut]) is None


def test_parts_may_be_any_buffers() -> None:
    pixels = np.arange(12, dtype=np.float32).reshape(3, 4)
    framed = frame(3, [bytearray(b"head"), pixels.data])
    assert content(3, framed) == b"head" + pixels.tobytes()


def _occupied(place: Path, nbytes: int, order: list[int]) -> int:
    store = LmdbStore(place, budget=1 << 30)
    value = bytes(nbytes)
    # A training run stores a few samples per transaction, and each one rewrites its tree path.
    for start in range(0, len(order), 50):
        assert all(store.put_many([(key, value) for key in order[start : start + 50]]))
    used = store.used
    file = (place / "data.mdb").stat().st_size
    store.destroy()
    # The file also has the records, and the pages that the last transactions freed.
    assert used <= file <= 1.1 * used + 1_000_000
    return used


SMALL = [10, 100, 400, 900, 1200]
LARGE = [2007, 3000, 4064, 4065, 20_000, 110_000]


@pytest.mark.parametrize("nbytes", SMALL + LARGE)
def test_the_cost_is_a_close_upper_estimate_for_keys_in_random_order(
    tmp_path: Path, nbytes: int
) -> None:
    count = 8000 if nbytes < 2000 else 1000
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    used = _occupied(tmp_path / "store", nbytes, shuffled)
    estimate = count * cost(nbytes)
    assert used <= estimate + 3 * 4096
    assert estimate <= 1.13 * used


@pytest.mark.parametrize("nbytes", [*SMALL, 1500, 2006, *LARGE])
def test_keys_in_order_cost_no_more_than_estimated(tmp_path: Path, nbytes: int) -> None:
    count = 2000 if nbytes < 5000 else 300
    assert _occupied(tmp_path / "store", nbytes, list(range(count))) <= (
        count * cost(nbytes) + 3 * 4096
    )


@given(st.integers(0, 10**7), st.sampled_from([4096, 16384, 32768]))
def test_the_cost_covers_the_bytes_themselves(nbytes: int, page: int) -> None:
    assert nbytes < cost(nbytes, page) < 2.2 * nbytes + 2.2 * page
