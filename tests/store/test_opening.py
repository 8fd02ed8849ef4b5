"""Opening an LMDB store: after crashes, reboots and damage, and next to other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.errors import StoreError
from penstock.store import LmdbStore
from tests.store.reading import get, get_many

MB = 1_000_000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


def _store(place: Path, identity: str = "photos") -> LmdbStore:
    return LmdbStore(place, budget=100 * MB, identity=identity, persistent=True)


def _fill(place: Path, count: int = 20, nbytes: int = 20_000) -> list[bytes]:
    values = [bytes([key % 251]) * nbytes for key in range(count)]
    store = _store(place)
    assert all(store.put_many(list(enumerate(values))))
    store.close()
    return values


def _state(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "state.json").read_text())
    return found


def _reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.opening.boot_id", lambda: "another boot")


HOLD = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), budget=10**8, identity="photos", persistent=True)
store.put_many([(int(sys.argv[2]), b"held")])
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def _hold(place: Path, key: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place), str(key)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_persistent_store_outlives_its_process(place: Path) -> None:
    _hold(place, 5).communicate()
    store = _store(place)
    assert get(store, 5) == b"held"
    store.close()
    assert _state(place)["clean"]


def test_a_store_that_is_not_closed_is_closed_at_exit(place: Path) -> None:
    script = HOLD.replace("sys.stdin.read()", "").replace("store.close()", "")
    subprocess.run([sys.executable, "-c", script, str(place), "5"], check=True)
    assert _state(place)["clean"]


def test_a_store_closed_cleanly_survives_a_reboot(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _fill(place)
    _reboot(monkeypatch)
    store = _store(place)
    assert get_many(store, range(20)) == values
    assert _state(place)["boot"] == "another boot"
    assert not _state(place)["clean"]
    store.close()


def test_a_store_of_a_killed_process_is_kept_within_the_boot(place: Path) -> None:
    process = _hold(place, 5)
    process.kill()
    process.communicate()
    assert not _state(place)["clean"]
    store = _store(place)
    assert get(store, 5) == b"held"
    store.close()


def test_a_store_that_was_open_when_the_machine_went_down_is_emptied(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _hold(place, 5)
    process.kill()
    process.communicate()
    _reboot(monkeypatch)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="machine went down") as found:
        assert get(store, 5) is None
    assert len(found) == 1
    assert store.put_many([(6, b"new")]) == [True]
    store.close()
    assert get(_store(place), 6) == b"new"


def test_only_the_last_to_leave_declares_a_store_clean(place: Path) -> None:
    first, second = _hold(place, 1), _hold(place, 2)
    store = _store(place)
    assert get_many(store, [1, 2]) == [b"held", b"held"]
    store.close()
    assert not _state(place)["clean"]
    first.communicate()
    assert not _state(place)["clean"]
    second.communicate()
    assert _state(place)["clean"]


def test_processes_that_leave_at_once_leave_the_store_clean(place: Path) -> None:
    for _ in range(3):
        processes = [_hold(place, key) for key in range(4)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait() for process in processes] == [0] * 4
        for process in processes:
            assert process.stdout is not None
            process.stdout.close()
        assert _state(place)["clean"]


def test_another_identity_is_refused_and_both_are_named(place: Path) -> None:
    _fill(place)
    with pytest.raises(StoreError, match=r"'photos'.*'songs'.*Remove it"):
        _store(place, "songs").open()
    store = _store(place)
    assert get(store, 0) is not None
    with pytest.raises(StoreError, match=r"'photos'.*'songs'"):
        _store(place, "songs").open()
    process = _hold(place, 100)
    store.close()
    with pytest.raises(StoreError, match=r"'photos'.*'songs'"):
        _store(place, "songs").open()
    process.communicate()
    assert get(store, 0) == bytes(20_000)
    store.close()


def test_a_foreign_database_means_misses_and_is_left_alone(place: Path) -> None:
    place.mkdir(parents=True, mode=0o700)
    with lmdb.open(str(place)) as env, env.begin(write=True) as transaction:
        transaction.put(b"mine", b"precious")
    for _ in range(2):
        store = _store(place)
        with pytest.warns(RuntimeWarning, match="does not recognise as its own.*Choose another"):
            store.open()
        assert get(store, 1) is None
        assert store.put_many([(1, b"one")]) == [False]
        store.close()
    with lmdb.open(str(place)) as env, env.begin() as transaction:
        assert transaction.get(b"mine") == b"precious"


def test_only_its_user_can_open_a_store(place: Path) -> None:
    _fill(place)
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}


def test_a_place_open_to_others_is_refused(place: Path) -> None:
    place.mkdir(parents=True)
    place.chmod(0o750)
    with pytest.raises(StoreError, match=r"mode 0750.*chmod 700"):
        _store(place).open()
    place.chmod(0o700)
    store = _store(place)
    assert store.put_many([(1, b"one")]) == [True]
    store.close()


def test_a_directory_of_another_user_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(place)
    user = os.getuid()
    monkeypatch.setattr("penstock.host.private_dir.os.getuid", lambda: user + 1)
    with pytest.raises(StoreError, match=f"belongs to user {user}"):
        _store(place).open()


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="is a symbolic link"):
        _store(tmp_path / "link").open()
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="there is a file in its place"):
            _store(wrong).open()


def _flip(place: Path, pattern: bytes) -> None:
    data = bytearray((place / "data.mdb").read_bytes())
    found = data.find(pattern)
    assert found >= 0
    data[found + 10] ^= 0x40
    (place / "data.mdb").write_bytes(data)


def test_a_damaged_value_is_a_miss_and_is_dropped_and_counted(place: Path) -> None:
    values = _fill(place)
    _flip(place, values[3][:5000])
    _flip(place, values[4][:5000])
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="damaged bytes for sample 3") as found:
        assert get_many(store, range(20)) == [*values[:3], None, None, *values[5:]]
    assert len(found) == 1
    assert get(store, 3) is None
    assert store.corrupt == 2
    assert len(store) == 18
    assert store.put_many([(3, values[3])]) == [True]
    assert get(store, 3) == values[3]
    store.close()


@pytest.mark.parametrize("nbytes", [100, 4096, 8192, 3 * 4096, 300_000])
def test_a_truncated_store_gives_misses_and_no_crash(place: Path, nbytes: int) -> None:
    _fill(place)
    os.truncate(place / "data.mdb", nbytes)
    # In a process of its own: reading past the end of a mapped file kills the process.
    script = """
import sys, warnings
from pathlib import Path
from penstock.store import LmdbStore
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    store = LmdbStore(Path(sys.argv[1]), budget=10**8, identity="photos", persistent=True)
    found = list(enumerate(store.get_many(range(20))))
    wrong = [k for k, v in found if v not in (None, bytes([k]) * 20000)]
    taken = store.put_many([(100 + k, b"new" * 5000) for k in range(20)])
    store.close()
print(wrong, all(taken), len(caught))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(place)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[] True 1\n"
    store = _store(place)
    assert get_many(store, range(100, 120)) == [b"new" * 5000] * 20
    store.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_store_that_lmdb_cannot_open_is_emptied(place: Path, persistent: bool) -> None:
    _fill(place)
    with open(place / "data.mdb", "r+b") as file:
        file.write(os.urandom(8192))
    store = LmdbStore(place, budget=MB, identity="photos", persistent=persistent)
    with pytest.warns(RuntimeWarning, match="was emptied: its index is damaged"):
        assert get(store, 0) is None
    assert store.put_many([(0, b"new")]) == [True]
    store.close()
    assert get(store, 0) == b"new"
    store.close()


def _clear_leaves(place: Path, *, of_samples_only: bool) -> None:
    data = bytearray((place / "data.mdb").read_bytes())
    leaf = 0x02
    for page in range(2 * 4096, len(data), 4096):
        records = b"samples" in data[page : page + 4096]
        if data[page + 10] == leaf and not (of_samples_only and records):
            data[page : page + 4096] = bytes(4096)
    (place / "data.mdb").write_bytes(data)


def test_a_store_with_a_damaged_index_is_emptied(place: Path) -> None:
    _fill(place, count=2000, nbytes=10)
    _clear_leaves(place, of_samples_only=True)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="was emptied: its index is damaged") as found:
        assert get_many(store, range(20)) == [None] * 20
    assert len(found) == 1
    assert store.put_many([(1, b"new")]) == [True]
    store.close()
    store = _store(place)
    assert get(store, 1) == b"new"
    store.close()


def test_an_index_damaged_in_use_means_misses_and_a_new_store_for_the_next_run(
    place: Path,
) -> None:
    _fill(place, count=2000, nbytes=10)
    store = _store(place)
    assert get(store, 5) is not None
    _clear_leaves(place, of_samples_only=True)
    with pytest.warns(RuntimeWarning, match="made anew when it is next opened") as found:
        assert get_many(store, range(20)) == [None] * 20
    assert len(found) == 1
    assert store.put_many([(1, b"new")]) == [False]
    assert store.delete_many([1]) == 0
    store.close()
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="was emptied: it was found damaged"):
        assert store.put_many([(1, b"new")]) == [True]
    assert get(store, 1) == b"new"
    store.close()


def test_a_store_whose_own_records_are_damaged_is_emptied(place: Path) -> None:
    _fill(place)
    _clear_leaves(place, of_samples_only=False)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="was emptied: its index is damaged"):
        assert get(store, 1) is None
    assert store.put_many([(1, b"new")]) == [True]
    store.close()


def test_a_store_whose_creator_was_killed_early_is_usable(place: Path) -> None:
    _fill(place)
    (place / "data.mdb").unlink()
    lmdb.open(str(place)).close()
    store = _store(place)
    assert get(store, 1) is None
    assert store.put_many([(1, b"new")]) == [True]
    store.close()


@pytest.mark.parametrize("state", ["{", "[]", '{"identity": "photos", "boot": "", "odd": 1}'])
def test_a_store_with_an_unreadable_state_file_is_emptied(place: Path, state: str) -> None:
    _fill(place)
    (place / "state.json").write_text(state)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="its state file cannot be read"):
        assert get(store, 0) is None
    store.close()


def test_a_store_of_another_format_is_emptied(place: Path) -> None:
    _fill(place)
    (place / "state.json").write_text(json.dumps({**_state(place), "format": 99}))
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="has format 99"):
        assert get(store, 0) is None
    store.close()


def test_a_store_in_use_by_another_version_means_misses(place: Path) -> None:
    process = _hold(place, 1)
    (place / "state.json").write_text(json.dumps({**_state(place), "format": 99}))
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="another version of Penstock uses it"):
        store.open()
    assert get(store, 1) is None
    assert store.put_many([(2, b"two")]) == [False]
    process.communicate()


def test_opening_and_closing_in_several_processes_loses_nothing(place: Path) -> None:
    script = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
me = int(sys.argv[2])
for turn in range(25):
    store = LmdbStore(Path(sys.argv[1]), budget=10**8, identity="photos", persistent=True)
    assert store.put_many([(1000 * me + turn, b"%d" % me)]) == [True]
    assert store.get_many([1000 * me + i for i in range(turn + 1)]) == [b"%d" % me] * (turn + 1)
    store.close()
"""
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", script, str(place), str(me)])
        for me in range(3)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    store = _store(place)
    assert len(store) == 75
    store.close()


def test_a_transaction_left_open_does_not_keep_a_process_from_ending(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.environment._PATIENCE", 0.01)
    store = _store(place)
    store.put_many([(1, b"one")])
    environment = store._environment
    assert environment is not None
    environment.read(lambda transaction: store.close())
    assert not _state(place)["clean"]
    environment._env.close()


def _read_until_interrupted(store: LmdbStore, timer: threading.Timer) -> None:
    timer.start()
    while True:
        store.get_many(range(20))


def test_ctrl_c_while_reading_leaves_the_store_usable(place: Path) -> None:
    store = _store(place)
    store.put_many([(key, bytes(50_000)) for key in range(20)])
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(50):
        timer = threading.Timer(0.001, lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            _read_until_interrupted(store, timer)
        timer.join()
    assert get(store, 1) == bytes(50_000)
    store.close()
