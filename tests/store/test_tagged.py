"""Values with tags: a newer one takes the place of an older, and stale ones are not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serialize import pack, unpack
from penstock.store import Store, samples
from penstock.store.value import PIECE, frame, pack_key, payload

MB = 1_000_000
LARGE = 3 * PIECE + 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "store", budget=50 * MB)
    yield found
    found.close()


def test_only_a_value_of_the_tag_asked_for_is_there(store: Store) -> None:
    assert store.put_tagged([(1, 4, b"one"), (2, 5, bytes(LARGE)), (3, -1, b"")]) == [True] * 3
    assert store.get_tagged([1, 2, 3, 4], [4, 5, -1, 0]) == [b"one", bytes(LARGE), b"", None]
    assert store.get_tagged([1, 2, 3], [3, 6, 0]) == [None] * 3
    assert store.get_tagged([], []) == []
    assert store.put_tagged([]) == []


def test_a_stale_value_is_no_damage_and_is_not_even_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_tagged([(1, 0, bytes(LARGE))])

    def read(*_: object) -> None:
        raise AssertionError("somebody read a stale value")

    with monkeypatch.context() as patch:
        patch.setattr(samples, "payload", read)
        assert store.get_tagged([1], [1]) == [None]
    assert store.corrupt == 0
    assert store.get_tagged([1], [0]) == [bytes(LARGE)]


@pytest.mark.parametrize(
    ("there", "put", "held", "left"),
    [
        (3, 3, True, b"old"),
        (3, 4, True, b"new"),
        (3, 9, True, b"new"),
        (4, 3, False, b"old"),
        (5, 3, True, b"new"),
        (0, -1, False, b"old"),
    ],
)
def test_a_value_stays_if_its_tag_is_the_same_or_the_next(
    store: Store, there: int, put: int, held: bool, left: bytes
) -> None:
    store.put_tagged([(7, there, b"old")])
    assert store.put_tagged([(7, put, b"new")]) == [held]
    assert store.get(7) == left
    assert store.get_tagged([7], [there if left == b"old" else put]) == [left]
    assert store.full == 0


def test_values_without_a_tag_are_of_no_tag(store: Store) -> None:
    store.put_many([(1, b"plain")])
    assert store.get_tagged([1], [0]) == [None]
    assert store.put_tagged([(1, 0, b"tagged")]) == [True]
    assert store.get_many([1]) == [b"tagged"]
    assert store.put_many([(1, b"plain")]) == [True]
    assert store.get_tagged([1], [0]) == [b"tagged"]
    assert store.corrupt == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete"]),
        st.dictionaries(
            st.integers(0, 4),
            st.tuples(st.integers(0, 3), st.integers(0, 255), st.integers(0, 3 * PIECE)),
        ),
    ),
    max_size=12,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_a_store_behaves_like_a_dict_that_keeps_the_same_and_the_next_tag(
    store: Store, steps: list[tuple[str, dict[int, tuple[int, int, int]]]]
) -> None:
    store.delete_many(range(5))
    model: dict[int, tuple[int, bytes]] = {}
    for what, values in steps:
        if what == "put":
            items = [(key, tag, bytes([fill]) * n) for key, (tag, fill, n) in values.items()]
            held = store.put_tagged(items)
            for key, tag, value in items:
                old = model.get(key, (-9, b""))[0]
                assert held.pop(0) == (old != tag + 1)
                if old not in (tag, tag + 1):
                    model[key] = (tag, value)
        else:
            assert store.delete_many(list(values)) == len(values.keys() & model.keys())
            model = {key: value for key, value in model.items() if key not in values}
        for tag in range(4):
            expected = [
                model[key][1] if model.get(key, (9,))[0] == tag else None for key in range(5)
            ]
            assert store.get_tagged(range(5), [tag] * 5) == expected
    assert len(store) == len(model)
    assert store.corrupt == 0
    store.delete_many(range(5))
    assert store.used == 0  # no piece of anything is left behind


def test_what_is_replaced_makes_room(tmp_path: Path) -> None:
    nbytes = 100_000
    room = 10 * Store.cost(nbytes, tagged=True)
    store = Store(tmp_path / "store", budget=room, overshoot=20_000)
    most = room + 20_000
    assert all(store.put_tagged([(key, 0, bytes(nbytes)) for key in range(10)]))
    for tag in range(1, 30):
        for key in range(10):
            assert store.put_tagged([(key, tag, bytes([tag]) * nbytes)]) == [True]
            assert store.used <= most
    # All at once, too.
    assert all(store.put_tagged([(key, 50, bytes(nbytes)) for key in range(10)]))
    assert store.used <= most
    with pytest.warns(RuntimeWarning, match="past its budget"):
        assert store.put_tagged([(3, 51, bytes(2 * nbytes)), (4, 51, b"small")]) == [False, True]
    assert store.full == 1
    assert store.get_tagged([3, 4], [50, 51]) == [bytes(nbytes), b"small"]
    assert store.put_tagged([(99, 0, bytes(nbytes - 20_000))]) == [True]
    store.destroy()


def test_a_sealed_store_replaces_nothing(store: Store) -> None:
    store.put_tagged([(1, 0, b"one")])
    store.seal()
    assert store.put_tagged([(1, 0, b"one"), (1, 1, b"again"), (2, 0, b"two")]) == [
        True,
        False,
        False,
    ]
    assert store.get_tagged([1], [0]) == [b"one"]


def test_what_is_got_is_the_callers_own(store: Store) -> None:
    for key, value in ((1, b"small"), (2, bytes(LARGE))):
        store.put_tagged([(key, 0, value)])
        store.put_many([(-key, value)])
        for found in (store.get_tagged([key], [0])[0], store.get(-key)):
            assert found is not None
            found[:3] = b"xyz"
        assert store.get(key) == store.get(-key) == value


def test_what_writes_itself_is_put_without_being_made_into_bytes(store: Store) -> None:
    pixels = np.arange(90_000, dtype=np.float32).reshape(300, 300)
    store.put_many([(1, pack((pixels, 7)))])
    store.put_tagged([(2, 3, pack((pixels, 8)))])
    for found, label in ((store.get(1), 7), (store.get_tagged([2], [3])[0], 8)):
        again, seven = unpack(found)
        assert seven == label
        assert again.flags.writeable
        np.testing.assert_array_equal(again, pixels)
    assert store.get(1) == pack((pixels, 7)).tobytes()


def _pieces(store: Store) -> Any:
    here = store._attached()
    assert here is not None
    return here, here._pieces


def test_a_damaged_piece_is_found_out_and_all_of_the_value_dropped(store: Store) -> None:
    value = np.random.default_rng(0).bytes(LARGE)
    here, pieces = _pieces(store)

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
        here.write(lambda transaction, change=change: third(transaction, change))
        if count == 0:
            with pytest.warns(RuntimeWarning, match="damaged bytes for sample 5"):
                assert store.get_tagged([5], [count]) == [None]
        else:
            assert store.get_tagged([5], [count]) == [None]
        assert store.corrupt == count + 1
        assert len(store) == store.used == 0


def test_a_damaged_header_is_replaced(store: Store) -> None:
    store.put_tagged([(5, 3, bytes(LARGE))])
    here, _ = _pieces(store)
    here.write(lambda transaction: transaction.put(pack_key(5), bytes(PIECE)))
    assert store.put_tagged([(5, 3, b"sound")]) == [True]
    assert store.get_tagged([5], [3]) == [b"sound"]
    store.delete_many([5])
    assert store.used == 0


def test_many_rewrites_do_not_grow_the_file_without_bound(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", budget=100 * MB)
    rng = np.random.default_rng(0)
    most = 0
    for turn in range(40):
        for key in rng.permutation(120)[: 120 if turn == 0 else 40].tolist():
            nbytes = int(120_000 * rng.lognormal(0, 0.6))
            assert store.put_tagged([(key, 2 * turn, bytes(nbytes))]) == [True]
            most = max(most, store.used)
    # Values that were not in pieces made it 1.4 times the most it ever held.
    assert (tmp_path / "store" / "data.mdb").stat().st_size < 1.2 * most
    store.destroy()


def test_a_store_from_before_there_were_pieces_is_taken_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", budget=MB, persistent=True)
    store.put_many([(1, b"one")])
    store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=2) as env, env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"pieces", txn=transaction))
    assert store.get(1) == b"one"
    assert store.put_tagged([(2, 0, bytes(LARGE))]) == [True]
    assert store.get_tagged([2], [0]) == [bytes(LARGE)]
    store.close()


@pytest.mark.parametrize("nbytes", [0, 1000, 60_000, PIECE - 24, PIECE - 23, 110_000, 560_000])
def test_the_cost_of_a_tagged_value_is_a_close_upper_estimate(tmp_path: Path, nbytes: int) -> None:
    count = 4000 if nbytes < 2000 else 40_000_000 // nbytes
    store = Store(tmp_path / "store", budget=1 << 30)
    order = np.random.default_rng(0).permutation(count).tolist()
    for start in range(0, count, 20):
        assert all(store.put_tagged([(k, 0, bytes(nbytes)) for k in order[start : start + 20]]))
    estimate = count * Store.cost(nbytes, tagged=True)
    assert store.used <= estimate + 6 * 4096
    assert estimate <= 1.16 * store.used
    store.destroy()


PREAMBLE = """
import sys
from pathlib import Path
from penstock.store import Store
store = Store(Path(sys.argv[1]), budget=200_000_000)
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
                assert found == value(key, tag), "a reader saw something half written"
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
    store = Store(place, budget=200 * MB)
    for key in range(20):
        found = [tag for tag in range(12) if store.get_tagged([key], [tag]) != [None]]
        # A late put never undoes the tag right after its own, and the last ones came last.
        assert len(found) == 1
        assert found[0] >= 10
        assert store.get(key) == value(key, found[0])
    store.destroy()


REPLACE_FOREVER = """
tag = int(sys.argv[2])
while True:
    store.put_tagged([(key, tag, value(key, tag)) for key in range(10)])
    print(tag, flush=True)
    tag += 1
"""


def test_a_writer_killed_while_replacing_leaves_all_old_or_all_new(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", budget=200 * MB)
    for turn in range(4):
        process = _start(tmp_path / "store", REPLACE_FOREVER, 1000 * turn)
        assert process.stdout is not None
        for _ in range(2 + turn):
            last = int(process.stdout.readline())
        process.kill()
        process.communicate()
        tags = range(last, 1000 * (turn + 1))
        [tag] = [tag for tag in tags if store.get_tagged([0], [tag]) != [None]]
        assert store.get_tagged(range(10), [tag] * 10) == [value(key, tag) for key in range(10)]
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
def test_a_tagged_value_with_any_flipped_bit_is_found_out(
    key: int, tag: int, value: bytes, data: st.DataObject
) -> None:
    framed = bytearray(frame(key, value, tag))
    assert payload(key, memoryview(framed)) == value
    place = data.draw(st.integers(0, 8 * len(framed) - 1))
    framed[place // 8] ^= 1 << place % 8
    assert payload(key, memoryview(framed)) is None
