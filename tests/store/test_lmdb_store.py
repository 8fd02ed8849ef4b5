"""The LMDB store: several openings of one place, forks, threads, full disks and errors."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from penstock.errors import PipelineError
from penstock.serialize import pack
from penstock.store import LmdbStore
from penstock.store.environment import Environment
from penstock.store.value import Lent
from tests.store.reading import get, get_many

MB = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "store", budget=50 * MB)
    yield store
    store.close()


def test_refused_values_are_counted_and_the_limit_is_named(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=100_000, overshoot=60_000)
    with pytest.warns(RuntimeWarning, match=r"reached 160\.0 KB, past its budget of 100\.0 KB"):
        stored = store.put_many([(key, bytes(10_000)) for key in range(20)])
    assert store.full == stored.count(False) == 8
    assert store.put_many([(50, bytes(10_000)), (0, b"known")]) == [False, True]
    assert store.full == 9
    store.close()


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be negative"):
        LmdbStore(tmp_path, budget=-1)


def test_a_lent_sample_is_refused(store: LmdbStore) -> None:
    lent = Lent({"label": 3}, nbytes=100)
    with pytest.raises(TypeError, match="takes serialised samples only"):
        store.put_many([(1, lent)])
    with pytest.raises(TypeError, match="takes serialised samples only"):
        store.put_tagged([(1, 0, lent)])
    assert len(store) == 0


def test_a_packed_sample_is_stored_as_its_bytes(store: LmdbStore) -> None:
    sample = (np.arange(90_000, dtype=np.float32).reshape(300, 300), 7)
    store.put_many([(1, pack(sample))])
    assert get(store, 1) == bytes(pack(sample).tobytes())


def test_a_closed_store_is_opened_again_by_the_next_use(store: LmdbStore) -> None:
    store.put_many([(1, b"one")])
    store.close()
    store.close()
    assert get(store, 1) == b"one"


def test_destroying_a_store_empties_every_opening_of_its_place(tmp_path: Path) -> None:
    store, other = (LmdbStore(tmp_path / "a" / "store", budget=MB) for _ in range(2))
    store.put_many([(1, b"one")])
    assert get(other, 1) == b"one"
    store.destroy()
    for found in (store, other):
        assert get(found, 1) is None
        assert found.put_many([(2, b"two")]) == [False]
        assert found.delete_many([1]) == 0
        assert found.keys() == []
        assert found.used == 0
        found.close()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_new_store_can_be_made_in_the_place_of_a_destroyed_one(tmp_path: Path) -> None:
    first = LmdbStore(tmp_path / "store", budget=MB)
    first.put_many([(1, b"one")])
    first.destroy()
    second = LmdbStore(tmp_path / "store", budget=MB)
    assert get(second, 1) is None
    assert second.put_many([(1, b"new")]) == [True]
    assert get(first, 1) is None
    second.destroy()


def test_destroying_leaves_foreign_files_alone(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=MB)
    store.put_many([(1, b"one")])
    (tmp_path / "store" / "notes.txt").write_text("mine")
    store.destroy()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["notes.txt"]
    stranger = LmdbStore(tmp_path / "elsewhere", budget=MB)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.mdb").write_text("mine")
    stranger.destroy()
    assert (tmp_path / "elsewhere" / "data.mdb").read_text() == "mine"


def test_stores_in_one_place_share_one_environment(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    one = LmdbStore(tmp_path / "store", budget=MB)
    two = LmdbStore(tmp_path / "link" / "store", budget=200 * MB)
    one.put_many([(1, b"one")])
    assert get(two, 1) == b"one"
    one.close()
    assert get(two, 1) == b"one"
    # The map has grown to the larger of the two budgets.
    for start in range(0, 100, 10):
        assert all(two.put_many([(2 + start + i, bytes(MB)) for i in range(10)]))
    assert get(one, 2) == bytes(MB)
    two.close()
    one.destroy()


def test_a_store_can_be_pickled(store: LmdbStore) -> None:
    store.put_many([(1, b"one")])
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.place, copy.budget, copy.overshoot) == (
        store.place,
        store.budget,
        store.overshoot,
    )
    assert get(copy, 1) == b"one"
    copy.close()
    assert get(store, 1) == b"one"


def _in_fork(work: Callable[[], bool]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            code = 0 if work() else 1
        except BaseException:
            code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_and_writes(store: LmdbStore) -> None:
    store.put_many([(1, b"one")])

    def read_and_write(key: int) -> bool:
        return get(store, 1) == b"one" and store.put_many([(key, b"child")]) == [True]

    def read_and_close() -> bool:
        found = get(store, 1)
        store.close()
        return found == b"one"

    _in_fork(lambda: read_and_write(2))
    _in_fork(lambda: read_and_write(3))
    assert get_many(store, [1, 2, 3]) == [b"one", b"child", b"child"]
    # Closing in a child does not close the parent's environment.
    _in_fork(read_and_close)
    assert get(store, 1) == b"one"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_during_reads_and_writes_disturb_neither_side(store: LmdbStore) -> None:
    store.put_many([(key, bytes([key]) * 20_000) for key in range(50)])
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for key, found in enumerate(get_many(store, range(50))):
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
            _in_fork(lambda: get(store, 7) == bytes([7]) * 20_000)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_while_other_threads_read_does_no_harm(store: LmdbStore) -> None:
    store.put_many([(key, bytes([key]) * 30_000) for key in range(20)])
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for key, found in enumerate(get_many(store, range(20))):
                # A read during the closing is a miss; the next use opens the store again.
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
    assert get(store, 3) == bytes([3]) * 30_000


def test_with_a_full_map_values_are_refused_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LmdbStore, "map_size", 1 << 20)
    store = LmdbStore(tmp_path / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="MDB_MAP_FULL.*no more samples are kept") as found:
        stored = [store.put_many([(key, bytes([key]) * 10_000)])[0] for key in range(150)]
    assert len(found) == 1
    assert 50 < sum(stored) < 100
    assert store.full == stored.count(False)
    kept = [key for key, held in enumerate(stored) if held]
    assert get_many(store, kept) == [bytes([key]) * 10_000 for key in kept]
    # Freed pages can be used again.
    assert store.delete_many(kept[:40]) == 40
    assert store.put_many([(1000, bytes(10_000))]) == [True]
    store.close()


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("commit", 28), lmdb.Error("mdb_put: Input/output error")]
)
def test_an_error_while_writing_is_a_refusal_and_no_exception(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(self: Environment, change: Any) -> Any:
        raise error

    store.put_many([(1, b"one")])
    monkeypatch.setattr(Environment, "write", failing)
    with pytest.warns(RuntimeWarning, match="no more samples are kept"):
        assert store.put_many([(2, b"two"), (3, b"three")]) == [False, False]
    assert store.put_many([(4, b"four")]) == [False]
    assert store.full == 3
    assert get_many(store, [1, 2]) == [b"one", None]


def test_an_error_while_reading_is_a_miss(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Environment, look: Any) -> Any:
        raise lmdb.ReadersFullError("mdb_txn_begin")

    store.put_many([(1, b"one")])
    with monkeypatch.context() as patch:
        patch.setattr(Environment, "read", failing)
        with pytest.warns(RuntimeWarning, match="prepared again"):
            assert get_many(store, [1, 2]) == [None, None]
        assert get(store, 1) is None
    assert get(store, 1) == b"one"


def test_a_full_disk_is_a_refusal_and_one_warning(tiny_disk: Path) -> None:
    store = LmdbStore(tiny_disk / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="No space left") as found:
        stored = [
            store.put_many([(key, bytes([key]) * 20_000), (key + 500, b"small")])
            for key in range(120)
        ]
    assert len(found) == 1
    kept = [key for key in range(120) if stored[key] == [True, True]]
    assert 50 < len(kept) < 110
    assert get_many(store, kept) == [bytes([key]) * 20_000 for key in kept]
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
    store = LmdbStore(tiny_disk / "store", budget=50 * MB)
    with pytest.warns(RuntimeWarning, match="cannot be created.*No space left") as found:
        assert store.put_many([(1, b"one")]) == [False]
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(store, 1) is None
    store.destroy()
