"""The catalogue finds, measures, verifies and removes stores without disturbing their users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import config
from penstock.errors import StoreError
from penstock.store import LmdbStore
from penstock.store.catalogue import Proof, StoreInfo, discard, in_memory, on_disk, remove, verify
from penstock.store.guard import StoreState
from penstock.store.opening import DATA

MB = 1_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def _fill(place: Path, count: int = 20, nbytes: int = 20_000, *, tagged: bool = False) -> None:
    store = LmdbStore(place, budget=100 * MB, identity=place.name, persistent=True)
    if tagged:
        assert all(store.put_tagged([(key, 3, bytes(nbytes)) for key in range(count)]))
    else:
        assert all(store.put_many([(key, bytes([key % 251]) * nbytes) for key in range(count)]))
    store.close()


def _only(root: Path) -> StoreInfo:
    (info,) = on_disk([root])
    return info


def _spoil(place: Path, key: int, nbytes: int = 20_000) -> None:
    """Change one byte in the middle of a value that ``_fill`` has stored."""
    data = bytearray((place / DATA).read_bytes())
    at = data.index(bytes([key % 251]) * nbytes)
    data[at + nbytes // 2] ^= 0xFF
    (place / DATA).write_bytes(data)


HOLD = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
place = Path(sys.argv[1])
store = LmdbStore(place, budget=10**8, identity=place.name, persistent=True)
store.put_many([(1000, b"held")])
print("ready", flush=True)
for line in sys.stdin:
    store.put_many([(int(line), bytes(50_000))])
    print("put", flush=True)
store.close()
"""


@contextmanager
def _held(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.communicate()
        assert process.returncode == 0


def _state(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / "state.json").read_text())
    return found


def test_stores_are_found_with_what_they_hold(root: Path) -> None:
    _fill(root / "aaaa", 20)
    _fill(root / "bbbb", 30, 100_000, tagged=True)
    one, other = on_disk([root])
    assert (one.identity, one.kind, one.samples) == ("aaaa", "cache", 20)
    assert (other.identity, other.kind, other.samples) == ("bbbb", "refurbish", 30)
    assert 400_000 < one.nbytes < 1_500_000
    assert 3_000_000 < other.nbytes < 4_500_000
    assert not one.in_use
    assert one.void == ""


def test_a_place_may_itself_be_a_store(root: Path) -> None:
    _fill(root / "aaaa")
    assert on_disk([root / "aaaa"]) == on_disk([root])


def test_by_default_the_directory_of_disk_stores_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    assert on_disk() == []
    _fill(tmp_path / "stores" / "aaaa")
    assert [one.identity for one in on_disk()] == ["aaaa"]


def test_an_empty_store_has_no_kind(root: Path) -> None:
    _fill(root / "aaaa", 0)
    found = _only(root)
    assert (found.samples, found.kind, verify(found)) == (0, "", Proof(0, 0))


def test_a_store_whose_creator_was_killed_early_is_found(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / DATA).unlink()
    found = _only(root)
    assert (found.samples, verify(found).sound) == (0, True)


def test_looking_at_a_store_does_not_count_as_use(root: Path) -> None:
    _fill(root / "aaaa")
    for name in ("state.json", DATA):
        os.utime(root / "aaaa" / name, (1000, 1000))
    first = _only(root)
    assert first.last_use == 1000
    assert verify(first).sound
    assert _only(root) == first
    assert _state(root / "aaaa")["clean"]


def test_foreign_directories_are_not_found_and_not_removed(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "other").mkdir(mode=0o700)
    (root / "other" / DATA).write_bytes(b"a dataset")
    (root / "file").write_text("x")
    (root / "link").symlink_to(root / "aaaa")
    _fill(root / "open")
    (root / "open").chmod(0o755)
    assert [one.identity for one in on_disk([root])] == ["aaaa"]
    with pytest.raises(StoreError, match="not a store of Penstock"):
        remove(root / "other")
    assert (root / "other" / DATA).exists()


def test_a_store_that_another_process_has_collected_meanwhile_counts_as_removed(
    root: Path,
) -> None:
    _fill(root / "aaaa")
    info = _only(root)
    assert discard(info)
    assert discard(info)


def test_a_store_in_use_names_its_users_and_is_not_removed(root: Path) -> None:
    _fill(root / "aaaa")
    with _held(root / "aaaa") as process:
        found = _only(root)
        assert (found.in_use, found.users, found.samples) == (True, (process.pid,), 21)
        assert not remove(root / "aaaa")
        assert (root / "aaaa" / DATA).exists()
    assert remove(root / "aaaa")
    assert not (root / "aaaa").exists()


def test_verifying_a_store_in_use_does_not_keep_it_from_being_left_clean(root: Path) -> None:
    with _held(root / "aaaa"):
        assert verify(_only(root)).sound
    assert _state(root / "aaaa")["clean"]


def test_foreign_files_in_the_directory_of_a_store_stay(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / "notes.txt").write_text("mine")
    assert remove(root / "aaaa")
    assert [path.name for path in (root / "aaaa").iterdir()] == ["notes.txt"]


def test_verifying_an_intact_store_reports_its_progress(root: Path) -> None:
    _fill(root / "aaaa", 150)
    steps: list[tuple[int, int]] = []
    assert verify(_only(root), lambda done, total: steps.append((done, total))) == Proof(150, 0)
    assert steps == [(64, 150), (128, 150), (150, 150)]


@pytest.mark.parametrize("key", [0, 63, 64, 149])
def test_a_damaged_value_is_counted_at_any_position(root: Path, key: int) -> None:
    _fill(root / "aaaa", 150)
    _spoil(root / "aaaa", key)
    assert verify(_only(root)) == Proof(150, 1)
    assert (root / "aaaa" / DATA).exists()


def test_a_value_with_a_damaged_piece_is_counted(root: Path) -> None:
    _fill(root / "aaaa", 1, 300_000, tagged=True)
    data = bytearray((root / "aaaa" / DATA).read_bytes())
    # The value is all zeros: a page in the middle of it.
    at = data.index(bytes(60_000)) + 30_000
    data[at] = 1
    (root / "aaaa" / DATA).write_bytes(data)
    assert verify(_only(root)) == Proof(1, 1)


def test_a_store_that_is_written_to_meanwhile_is_verified(root: Path) -> None:
    _fill(root / "aaaa", 150)
    with _held(root / "aaaa") as process:

        def write_more(done: int, total: int) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{2000 + done}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "put\n"

        proof = verify(_only(root), write_more)
    assert proof.sound
    assert proof.values >= 151


GROW = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
place = Path(sys.argv[1])
store = LmdbStore(place, budget=300_000_000, identity=place.name, persistent=True)
assert all(store.put_many([(1000 + key, bytes(1_000_000)) for key in range(120)]))
store.close()
"""


def test_a_store_that_outgrows_the_map_of_its_reader_is_verified(root: Path) -> None:
    place = root / "aaaa"
    small = LmdbStore(place, budget=5 * MB, identity="aaaa", persistent=True)
    assert all(small.put_many([(key, bytes(1_000)) for key in range(150)]))
    small.close()
    steps: list[int] = []

    def grow(done: int, total: int) -> None:
        if not steps:
            subprocess.run([sys.executable, "-c", GROW, str(place)], check=True)
        steps.append(done)

    assert verify(_only(root), grow) == Proof(270, 0)


def test_a_truncated_file_is_detected_and_does_not_kill_the_process(root: Path) -> None:
    place = root / "aaaa"
    _fill(place, 150)
    os.truncate(place / DATA, os.path.getsize(place / DATA) // 2)
    found = _only(root)
    assert found.samples is None
    proof = verify(found)
    assert not proof.sound
    assert (proof.wrong != "") == _state(place)["damaged"]


def test_a_file_truncated_by_much_is_not_extended(root: Path) -> None:
    place = root / "aaaa"
    _fill(place, 40, MB)
    os.truncate(place / DATA, 100_000)
    assert "truncated" in verify(_only(root)).wrong
    assert os.path.getsize(place / DATA) == 100_000


def test_a_file_that_is_not_a_database_is_detected(root: Path) -> None:
    place = root / "aaaa"
    _fill(place)
    (place / DATA).write_bytes(b"nonsense" * 10_000)
    proof = verify(_only(root))
    assert "its index is damaged" in proof.wrong
    assert _state(place)["damaged"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 99}, "it has format 99"),
        ({"damaged": True}, "it was found damaged"),
        ({"clean": False, "boot": "another"}, "the machine went down"),
    ],
)
def test_a_store_that_will_be_emptied_has_a_reason_and_is_not_read(
    root: Path, change: dict[str, Any], reason: str
) -> None:
    _fill(root / "aaaa")
    state = StoreState.parse((root / "aaaa" / "state.json").read_bytes())
    (root / "aaaa" / "state.json").write_text(replace(state, **change).text())
    found = _only(root)
    assert found.void.startswith(reason)
    assert found.samples is None
    assert verify(found) == Proof(0, 0, found.void)
    assert remove(root / "aaaa")


def test_an_unreadable_state_file_is_a_reason_too(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / "state.json").write_text("{")
    found = _only(root)
    assert found.identity == "aaaa"
    assert found.void.startswith("its state file cannot be read (")


MEMORY = """
import sys, uuid
from penstock.store import memory_store
store = memory_store(10**8, shared=True)
store.put_many([(key, bytes(10_000)) for key in range(5)])
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_stores_and_leftovers_of_dead_processes_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(config, "SMALL_SHM", 0)
    code = f"from penstock import config; config.SMALL_SHM = 0\n{MEMORY}"
    dead, alive = (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    )
    try:
        for process in (dead, alive):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        dead.kill()
        dead.communicate()
        (store,), (left,) = in_memory()
        assert (store.where, store.kind, store.samples) == ("memory", "cache", 5)
        assert (store.in_use, store.users) == (True, (alive.pid,))
        assert not remove(store.place)
        assert left.place.name.startswith(f"run-{dead.pid}-")
        assert left.nbytes > 50_000
    finally:
        alive.communicate()


def test_without_memory_stores_none_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(config, "SMALL_SHM", 0)
    assert in_memory() == ([], [])
