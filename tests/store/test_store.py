"""A store keeps bytes by key, and turns whatever goes wrong into a miss."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.store import Store
from penstock.store import environment as environments

MB = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "store", budget=50 * MB)
    yield found
    found.close()


def test_what_is_put_is_got(store: Store) -> None:
    items = [(0, b""), (7, b"seven"), (2**62, b"x" * 200_000), (-3, b"minus"), (8, [b"ei", b"ght"])]
    assert store.put_many(items) == [True] * 5
    assert store.get_many([8, 7, 0, 2**62, -3, 9]) == [
        b"eight",
        b"seven",
        b"",
        b"x" * 200_000,
        b"minus",
        None,
    ]
    assert store.get(7) == b"seven"
    assert store.get(6) is None
    assert len(store) == 5
    assert sorted(store.keys()) == [-3, 0, 7, 8, 2**62]


def test_nothing_asked_is_nothing_answered(store: Store) -> None:
    assert store.get_many([]) == []
    assert store.put_many([]) == []
    assert store.delete_many([]) == 0


def test_an_empty_store_is_true(store: Store) -> None:
    assert len(store) == 0
    assert store


def test_a_key_that_is_there_keeps_its_value(store: Store) -> None:
    assert store.put_many([(1, b"first"), (1, b"again")]) == [True, True]
    assert store.put_many([(1, b"later")]) == [True]
    assert store.get(1) == b"first"


def test_deleting_says_how_many_and_gives_the_room_back(store: Store) -> None:
    store.put_many([(key, bytes(10_000)) for key in range(20)])
    full = store.used
    assert 200_000 <= full <= 20 * Store.cost(10_000) + 8192
    assert store.delete_many([3, 4, 99]) == 2
    assert store.get_many([3, 5]) == [None, bytes(10_000)]
    assert store.delete_many(range(20)) == 18
    assert store.used == 0
    assert len(store) == 0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 9), st.binary(max_size=5000))))
)
def test_a_store_behaves_like_a_dict_that_never_overwrites(
    store: Store, steps: list[tuple[bool, dict[int, bytes]]]
) -> None:
    store.delete_many(range(10))
    model: dict[int, bytes] = {}
    for put, values in steps:
        if put:
            assert all(store.put_many(list(values.items())))
            model = {**values, **model}
        else:
            assert store.delete_many(list(values)) == len(values.keys() & model.keys())
            model = {key: value for key, value in model.items() if key not in values}
        assert store.get_many(range(10)) == [model.get(key) for key in range(10)]
        assert len(store) == len(model)


def test_the_hard_cap_refuses_warns_once_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", budget=100_000, overshoot=60_000)
    with pytest.warns(RuntimeWarning, match=r"reached 160\.0 KB, past its budget of 100\.0 KB"):
        stored = store.put_many([(key, bytes(10_000)) for key in range(20)])
    assert stored == [True] * 12 + [False] * 8
    assert store.put_many([(50, bytes(10_000)), (0, b"known")]) == [False, True]
    assert store.full == 9
    assert store.used <= 160_000
    assert store.put_many([(51, b"small")]) == [True]
    store.close()


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be negative"):
        Store(tmp_path, budget=-1)


def test_a_sealed_store_takes_nothing_more(store: Store) -> None:
    store.put_many([(1, b"one")])
    assert not store.sealed
    store.seal()
    assert store.sealed
    assert store.put_many([(1, b"again"), (2, b"two")]) == [True, False]
    assert store.get_many([1, 2]) == [b"one", None]
    assert store.delete_many([1]) == 1


def test_a_closed_store_opens_again_with_all_it_held(store: Store) -> None:
    store.put_many([(1, b"one")])
    store.close()
    store.close()
    assert store.get(1) == b"one"


def test_a_destroyed_store_is_gone_and_does_not_come_back(tmp_path: Path) -> None:
    store, other = (Store(tmp_path / "a" / "store", budget=MB) for _ in range(2))
    store.put_many([(1, b"one")])
    assert other.get(1) == b"one"
    store.destroy()
    for found in (store, other):
        assert found.get(1) is None
        assert found.put_many([(2, b"two")]) == [False]
        assert found.delete_many([1]) == 0
        assert found.keys() == []
        assert found.used == 0
        found.close()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_destroyed_store_can_be_made_anew(tmp_path: Path) -> None:
    first = Store(tmp_path / "store", budget=MB)
    first.put_many([(1, b"one")])
    first.destroy()
    second = Store(tmp_path / "store", budget=MB)
    assert second.get(1) is None
    assert second.put_many([(1, b"new")]) == [True]
    assert first.get(1) is None
    second.destroy()


def test_destroying_leaves_other_peoples_files_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", budget=MB)
    store.put_many([(1, b"one")])
    (tmp_path / "store" / "notes.txt").write_text("mine")
    store.destroy()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["notes.txt"]
    stranger = Store(tmp_path / "elsewhere", budget=MB)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.mdb").write_text("mine")
    stranger.destroy()
    assert (tmp_path / "elsewhere" / "data.mdb").read_text() == "mine"


def test_stores_of_one_place_share_one_environment(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    one = Store(tmp_path / "store", budget=MB)
    two = Store(tmp_path / "link" / "store", budget=200 * MB)
    one.put_many([(1, b"one")])
    assert two.get(1) == b"one"
    one.close()
    assert two.get(1) == b"one"
    # The map has grown to the larger of the two budgets.
    for start in range(0, 100, 10):
        assert all(two.put_many([(2 + start + i, bytes(MB)) for i in range(10)]))
    assert one.get(2) == bytes(MB)
    two.close()
    one.destroy()


def test_a_store_travels_by_pickle(store: Store) -> None:
    store.put_many([(1, b"one")])
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.place, copy.budget, copy.overshoot) == (
        store.place,
        store.budget,
        store.overshoot,
    )
    assert copy.get(1) == b"one"
    copy.close()
    assert store.get(1) == b"one"


def _in_fork(work: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            code = 0 if work() else 1
        except BaseException:
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_and_writes(store: Store) -> None:
    store.put_many([(1, b"one")])
    for key in (2, 3):
        _in_fork(lambda k=key: store.get(1) == b"one" and store.put_many([(k, b"child")]) == [True])
    assert store.get_many([1, 2, 3]) == [b"one", b"child", b"child"]
    # Closing in a child is the child's own affair.
    _in_fork(lambda: store.get(1) == b"one" and store.close() is None)
    assert store.get(1) == b"one"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_in_the_middle_of_reads_and_writes_disturb_nobody(store: Store) -> None:
    store.put_many([(key, bytes([key]) * 20_000) for key in range(50)])
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for key, found in enumerate(store.get_many(range(50))):
                if found != bytes([key]) * 20_000:
                    wrong.append((key, found))

    def write() -> None:
        key = 1000
        while not stop.is_set():
            store.put_many([(key, bytes(5000))])
            store.delete_many([key])
            key += 1

    threads = [threading.Thread(target=target) for target in (read, read, write)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            _in_fork(lambda: store.get(7) == bytes([7]) * 20_000)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_many_threads_agree(store: Store) -> None:
    def work(seed: int) -> None:
        for key in range(200):
            store.put_many([((key * seed) % 211, b"%d" % ((key * seed) % 211) * 500)])
            found = store.get_many([key, (key * seed) % 211])
            if (found[0] is not None and found[0] != b"%d" % key * 500) or found[1] is None:
                wrong.append(key)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(store.keys()) == {key * seed % 211 for key in range(200) for seed in range(1, 9)}


def test_closing_while_others_read_harms_nobody(store: Store) -> None:
    store.put_many([(key, bytes([key]) * 30_000) for key in range(20)])
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for key, found in enumerate(store.get_many(range(20))):
                # Closed at just this moment is a miss; the next use opens it again.
                if found is not None and found != bytes([key]) * 30_000:
                    wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        store.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.get(3) == bytes([3]) * 30_000


def test_a_full_map_is_a_refusal_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "map_size", 1 << 20)
    store = Store(tmp_path / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="MDB_MAP_FULL.*keeping no more samples") as found:
        stored = [store.put_many([(key, bytes([key]) * 10_000)])[0] for key in range(150)]
    assert len(found) == 1
    assert 50 < sum(stored) < 100
    assert store.full == stored.count(False)
    kept = [key for key, here in enumerate(stored) if here]
    assert store.get_many(kept) == [bytes([key]) * 10_000 for key in kept]
    # Room that is given back can be used again.
    assert store.delete_many(kept[:40]) == 40
    assert store.put_many([(1000, bytes(10_000))]) == [True]
    store.close()


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("commit", 28), lmdb.Error("mdb_put: Input/output error")]
)
def test_an_error_in_writing_never_reaches_training(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(self: environments.Environment, change: Any) -> Any:
        raise error

    store.put_many([(1, b"one")])
    monkeypatch.setattr(environments.Environment, "write", failing)
    with pytest.warns(RuntimeWarning, match="keeping no more samples"):
        assert store.put_many([(2, b"two"), (3, b"three")]) == [False, False]
    assert store.put_many([(4, b"four")]) == [False]
    assert store.full == 3
    assert store.get_many([1, 2]) == [b"one", None]


def test_an_error_in_reading_is_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: environments.Environment, look: Any) -> Any:
        raise lmdb.ReadersFullError("mdb_txn_begin")

    store.put_many([(1, b"one")])
    with monkeypatch.context() as patch:
        patch.setattr(environments.Environment, "read", failing)
        with pytest.warns(RuntimeWarning, match="prepared again"):
            assert store.get_many([1, 2]) == [None, None]
        assert store.get(1) is None
    assert store.get(1) == b"one"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_a_refusal_and_one_warning(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="No space left") as found:
        stored = [
            store.put_many([(key, bytes([key]) * 20_000), (key + 500, b"small")])
            for key in range(120)
        ]
    assert len(found) == 1
    kept = [key for key in range(120) if stored[key] == [True, True]]
    assert 50 < len(kept) < 110
    assert store.get_many(kept) == [bytes([key]) * 20_000 for key in kept]
    # Another thread's first read takes a new place in the reader table, with the disk full.
    threads = [threading.Thread(target=store.get_many, args=(kept,)) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.destroy()


def test_a_disk_full_from_the_start_means_misses_and_one_warning(tiny_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (tiny_disk / "filler").write_bytes(bytes(4 * MB))
    store = Store(tiny_disk / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="cannot be created.*No space left") as found:
        assert store.put_many([(1, b"one")]) == [False]
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(1) is None
    store.destroy()
