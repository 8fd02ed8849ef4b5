"""Tagged values in LMDB: stored in pieces, and replaced by newer ones in several processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store import LmdbStore, environment
from penstock.store.value import PIECE, frame, pack_key, payload
from tests.store.reading import get, get_tagged

MB = 1_000_000
LARGE = 3 * PIECE + 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "store", budget=50 * MB)
    yield store
    store.close()


def test_a_value_with_another_tag_is_not_read_and_not_damaged(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_tagged([(1, 0, bytes(LARGE))])

    def read(*_: object) -> None:
        raise AssertionError("a value with another tag was read")

    with monkeypatch.context() as patch:
        patch.setattr(environment, "payload", read)
        assert get_tagged(store, [1], [1]) == [None]
    assert store.corrupt == 0
    assert get_tagged(store, [1], [0]) == [bytes(LARGE)]


def _attached(store: LmdbStore) -> environment.Environment:
    attached = store._attached()
    assert attached is not None
    return attached


def test_a_value_with_a_damaged_piece_is_detected_and_dropped(store: LmdbStore) -> None:
    value = np.random.default_rng(0).bytes(LARGE)
    attached = _attached(store)
    pieces = attached._pieces

    def third(transaction: Any, change: Any) -> None:
        name = pack_key(5) + b"\0\0\0\2"
        found = bytes(transaction.get(name, db=pieces))
        change(transaction, name, found)

    def flip(transaction: Any, name: bytes, found: bytes) -> None:
        transaction.put(name, bytes([found[0] ^ 1]) + found[1:], db=pieces)

    def cut(transaction: Any, name: bytes, found: bytes) -> None:
        transaction.put(name, found[:-1], db=pieces)

    def drop(transaction: Any, name: bytes, found: bytes) -> None:
        transaction.delete(name, db=pieces)

    for count, change in enumerate((flip, cut, drop)):
        assert store.put_tagged([(5, count, value)]) == [True]
        attached.write(partial(third, change=change))
        if count == 0:
            with pytest.warns(RuntimeWarning, match="damaged bytes for sample 5"):
                assert get_tagged(store, [5], [count]) == [None]
        else:
            assert get_tagged(store, [5], [count]) == [None]
        assert store.corrupt == count + 1
        assert len(store) == store.used == 0


def test_a_damaged_header_is_replaced(store: LmdbStore) -> None:
    store.put_tagged([(5, 3, bytes(LARGE))])
    _attached(store).write(lambda transaction: transaction.put(pack_key(5), bytes(PIECE)))
    assert store.put_tagged([(5, 3, b"sound")]) == [True]
    assert get_tagged(store, [5], [3]) == [b"sound"]
    store.delete_many([5])
    assert store.used == 0


def test_repeated_replacement_does_not_grow_the_file_without_limit(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=100 * MB)
    rng = np.random.default_rng(0)
    most = 0
    for turn in range(40):
        for key in rng.permutation(120)[: 120 if turn == 0 else 40].tolist():
            nbytes = int(120_000 * rng.lognormal(0, 0.6))
            assert store.put_tagged([(key, 2 * turn, bytes(nbytes))]) == [True]
            most = max(most, store.used)
    # Without pieces the file grew to 1.4 times the most it ever held.
    assert (tmp_path / "store" / "data.mdb").stat().st_size < 1.2 * most
    store.destroy()


def test_a_store_without_a_database_of_pieces_is_used(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=MB, persistent=True)
    store.put_many([(1, b"one")])
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=2) as env, env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"pieces", txn=transaction))
    assert get(store, 1) == b"one"
    assert store.put_tagged([(2, 0, bytes(LARGE))]) == [True]
    assert get_tagged(store, [2], [0]) == [bytes(LARGE)]
    store.close()


@pytest.mark.parametrize("nbytes", [0, 1000, 60_000, PIECE - 24, PIECE - 23, 110_000, 560_000])
def test_the_cost_of_a_tagged_value_is_a_close_upper_estimate(tmp_path: Path, nbytes: int) -> None:
    count = 4000 if nbytes < 2000 else 40_000_000 // nbytes
    store = LmdbStore(tmp_path / "store", budget=1 << 30)
    order = np.random.default_rng(0).permutation(count).tolist()
    for start in range(0, count, 20):
        assert all(store.put_tagged([(k, 0, bytes(nbytes)) for k in order[start : start + 20]]))
    estimate = count * LmdbStore.cost(nbytes, tagged=True)
    assert store.used <= estimate + 6 * 4096
    assert estimate <= 1.16 * store.used
    store.destroy()


PREAMBLE = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), budget=200_000_000)
def value(key, tag):
    return b"%d/%d," % (key, tag) * (1000 * (1 + (key + tag) % 40))
"""


def value(key: int, tag: int) -> bytes:
    return b"%d/%d," % (key, tag) * (1000 * (1 + (key + tag) % 40))


def _start(place: Path, script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script, str(place), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


REPLACE = """
me = int(sys.argv[2])
for tag in range(12):
    for key in range(20):
        if (key + tag) % 2 == me or tag % 3 == 0:
            store.put_tagged([(key, tag, value(key, tag))])
assert not store.corrupt
"""

READ = """
tags = [-1] * 20
while min(tags) < 9:
    for key in range(20):
        for tag in range(12):
            found = store.get_tagged([key], [tag])[0]
            if found is not None:
                assert found == value(key, tag), "a reader saw a partly written value"
                tags[key] = max(tags[key], tag)
assert not store.corrupt
"""


def test_processes_replace_and_read_at_the_same_time(tmp_path: Path) -> None:
    place = tmp_path / "store"
    running = [_start(place, REPLACE, me) for me in range(2)]
    running += [_start(place, READ) for _ in range(2)]
    for process in running:
        process.communicate()
    assert [process.returncode for process in running] == [0] * 4
    store = LmdbStore(place, budget=200 * MB)
    for key in range(20):
        found = [tag for tag in range(12) if store.get_tagged([key], [tag]) != [None]]
        # A late put never replaces the next tag, and the highest tags were put last.
        assert len(found) == 1
        assert found[0] >= 10
        assert get(store, key) == value(key, found[0])
    store.destroy()


REPLACE_FOREVER = """
tag = int(sys.argv[2])
while True:
    store.put_tagged([(key, tag, value(key, tag)) for key in range(10)])
    print(tag, flush=True)
    tag += 1
"""


def test_a_writer_killed_while_replacing_leaves_all_old_or_all_new(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=200 * MB)
    for turn in range(4):
        process = _start(tmp_path / "store", REPLACE_FOREVER, 1000 * turn)
        assert process.stdout is not None
        for _ in range(2 + turn):
            last = int(process.stdout.readline())
        process.kill()
        process.communicate()
        tags = range(last, 1000 * (turn + 1))
        [tag] = [tag for tag in tags if store.get_tagged([0], [tag]) != [None]]
        assert get_tagged(store, range(10), [tag] * 10) == [value(key, tag) for key in range(10)]
        assert store.corrupt == 0
        assert store.put_tagged([(100 + turn, tag, b"alive")]) == [True]
    store.delete_many(store.keys())
    assert store.used == 0
    store.destroy()


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=200),
    st.data(),
)
def test_any_flipped_bit_in_a_tagged_value_is_detected(
    key: int, tag: int, value: bytes, data: st.DataObject
) -> None:
    framed = bytearray(frame(key, value, tag))
    intact = payload(key, memoryview(framed))
    assert intact is not None
    assert bytes(intact) == value
    place = data.draw(st.integers(0, 8 * len(framed) - 1))
    framed[place // 8] ^= 1 << place % 8
    assert payload(key, memoryview(framed)) is None
