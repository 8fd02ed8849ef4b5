"""Damage to the files of a store costs time, never a run: no exception, no signal, no wrong sample.

Runs happen in processes of their own, because damage that is not noticed kills the process.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.store import LmdbStore
from penstock.store.environment import readable
from penstock.store.guard import Guard
from tests.store import damaged_run
from tests.store.reading import get, get_many

MB = 1_000_000

USE = """
import sys, warnings
from pathlib import Path
from typing import Any
from penstock.store import LmdbStore
warnings.simplefilter("always")
store = LmdbStore(Path(sys.argv[1]), budget=10**8, identity="photos", persistent=True)
for key in range(40):
    store.put_many([(key, bytes([key]) * (50 if key % 2 else 9000))])
print("ready", flush=True)
for line in sys.stdin:
    found = store.get_many(range(40))
    right = [(None, bytes([k]) * (50 if k % 2 else 9000)) for k in range(40)]
    wrong = [k for k, v in enumerate(found) if v not in right[k]]
    put = store.put_many([(100 + k, bytes(9000)) for k in range(20)])
    store.delete_many(range(0, 40, 2))
    print(wrong, all(put), flush=True)
store.close()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "store"


@pytest.fixture
def user(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store open, and uses it for each line it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-c", USE, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.communicate()


def use(process: subprocess.Popen[str]) -> str:
    """What a user of the store finds: wrong values, and whether it could put new ones in."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("use\n")
    process.stdin.flush()
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> tuple[int, int]:
    """The exit status of a user of the store, and how many warnings it gave."""
    _, errors = process.communicate()
    assert "Traceback" not in errors
    return process.returncode, errors.count("RuntimeWarning")


def _store(place: Path) -> LmdbStore:
    return LmdbStore(place, budget=100 * MB, identity="photos", persistent=True)


def _spoil_index(path: Path) -> None:
    """Point every entry of every page of the index elsewhere."""
    data = bytearray(path.read_bytes())
    for page in range(2 * 4096, len(data), 4096):
        if data[page + 10] in (1, 2):
            data[page + 16 : page + 40] = b"\xf0\xff" * 12
    with open(path, "r+b") as file:
        file.write(data)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _halve(path: Path) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def _zero(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


IN_USE = {
    "data truncated to nothing": ("data.mdb", _empty),
    "data truncated to half": ("data.mdb", _halve),
    "data zeroed": ("data.mdb", _zero),
    "index spoiled": ("data.mdb", _spoil_index),
    "lock truncated": ("lock.mdb", _empty),
    "lock zeroed": ("lock.mdb", _zero),
}


@pytest.mark.parametrize("name", IN_USE)
def test_a_store_damaged_in_use_means_misses_and_one_warning(
    place: Path, user: subprocess.Popen[str], name: str
) -> None:
    file, change = IN_USE[name]
    assert use(user) == "[] True\n"
    damaged_run.wait_for_next_tick(place / "data.mdb")
    change(place / file)
    assert use(user) == "[] False\n"
    assert use(user) == "[] False\n"
    assert end(user) == (0, 1)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="was emptied"):
        assert store.put_many([(1, b"new")]) == [True]
    store.close()


REMOVED: dict[str, Callable[[Path], object]] = {
    "state.json": lambda path: path.write_text("{"),
    "data.mdb": Path.unlink,
    "lock.mdb": Path.unlink,
    "guard": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_process_that_opens_a_damaged_store_in_use_has_misses(
    place: Path, user: subprocess.Popen[str], name: str
) -> None:
    REMOVED[name](place / name)
    store = _store(place)
    with pytest.warns(RuntimeWarning, match=r"cannot be opened .*made anew") as found:
        assert get(store, 1) is None
    assert len(found) == 1
    assert store.put_many([(1, b"new")]) == [False]
    store.open()
    store.close()
    # The process that had it open before goes on.
    assert use(user).startswith("[] ")
    assert end(user) == (0, 0)


def test_a_store_without_its_state_file_in_use_does_not_hang_others(
    place: Path, user: subprocess.Popen[str]
) -> None:
    (place / "state.json").unlink()
    store = _store(place)
    with pytest.warns(RuntimeWarning, match="state file was changed"):
        assert get(store, 1) is None
    assert end(user) == (0, 0)
    again = _store(place)
    with pytest.warns(RuntimeWarning, match="was emptied: its state file is missing"):
        assert again.put_many([(1, b"new")]) == [True]
    again.close()


@pytest.mark.parametrize(
    "state",
    ["", "null", "[]", "{}", '{"format": "3"}', '{"format": true}', "\x00" * 100, '"' * 100_000],
)
def test_any_junk_in_the_state_file_is_a_store_made_anew(place: Path, state: str) -> None:
    store = _store(place)
    store.put_many([(1, b"one")])
    store.close()
    (place / "state.json").write_text(state)
    with pytest.warns(RuntimeWarning, match="was emptied") as found:
        store.open()
    assert len(found) == 1
    assert store.put_many([(1, b"new")]) == [True]
    store.close()


def test_a_changed_state_file_is_not_taken_for_another_store(place: Path) -> None:
    store = _store(place)
    store.put_many([(1, b"one")])
    store.close()
    state = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps({**state, "identity": "phetos"}))
    with pytest.warns(RuntimeWarning, match="its checksum is wrong"):
        store.open()
    store.close()


def test_a_pipe_in_the_place_of_the_state_file_does_not_hang(place: Path) -> None:
    store = _store(place)
    store.put_many([(1, b"one")])
    store.close()
    (place / "state.json").unlink()
    os.mkfifo(place / "state.json")
    with pytest.warns(RuntimeWarning, match="its state file cannot be read"):
        store.open()
    assert store.put_many([(1, b"new")]) == [True]
    store.close()


def test_damage_to_values_in_use_is_a_miss_of_these_values_only(place: Path) -> None:
    store = _store(place)
    values = [bytes([key]) * 9000 for key in range(1, 21)]
    assert all(store.put_many(list(enumerate(values))))
    damaged_run.wait_for_next_tick(place / "data.mdb")
    at = (place / "data.mdb").read_bytes().index(values[7][:5000])
    with open(place / "data.mdb", "r+b") as file:
        file.seek(at + 10)
        file.write(b"damage")
    with pytest.warns(RuntimeWarning, match="damaged bytes for sample 7"):
        assert get_many(store, range(20)) == [*values[:7], None, *values[8:]]
    assert store.put_many([(7, values[7])]) == [True]
    assert get(store, 7) == values[7]
    store.close()


def test_a_damaged_first_page_of_a_value_does_not_free_other_pages(place: Path) -> None:
    store = _store(place)
    values = [bytes([key]) * 9000 for key in range(1, 21)]
    assert all(store.put_many(list(enumerate(values))))
    store.close()
    data = bytearray((place / "data.mdb").read_bytes())
    # Pages of the index may have remains of values in their free space.
    page = next(
        page
        for page in range(0, len(data), 4096)
        if data[page + 10] == 4 and values[7][:4000] in data[page : page + 4096]
    )
    data[page + 12] = 200
    (place / "data.mdb").write_bytes(data)
    store = _store(place)
    assert get_many(store, range(20)) == values
    with pytest.warns(RuntimeWarning, match="first page of a value is damaged.*made anew"):
        assert store.delete_many([7]) == 0
    store.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_on_a_damaged_cache_gives_the_right_samples(
    tmp_path: Path, kind: str, seed: int
) -> None:
    rounds = 25 if kind == "threads" else 8
    run = subprocess.run(
        [sys.executable, damaged_run.__file__, str(tmp_path), kind, str(seed), str(rounds)],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (run.returncode, run.stdout.count("right\n")) == (0, rounds), run.stdout + run.stderr


def _spoil_samples(place: Path) -> None:
    """Have LMDB look for samples behind the end of the file, unnoticed by a look at its times.

    A failing disk or memory does so. Only the pages of the samples' own index are changed.
    """
    path = place / "data.mdb"
    data = bytearray(path.read_bytes())
    assert len(data) < 0xFFF0
    for page in range(2 * 4096, len(data), 4096):
        if data[page + 10] == 2 and b"samples" not in data[page : page + 4096]:
            data[page + 16 : page + 100] = b"\xf0\xff" * 42
    with open(path, "r+b") as file:
        file.write(data)
    guard = Guard(place)
    record = guard.read_record()
    assert record is not None
    guard.write_record(record._replace(changed=path.stat().st_ctime_ns))
    guard.abandon()


def _draw(value: int, rng: np.random.Generator) -> int:
    rng.random()
    return value


@pytest.mark.parametrize("stop", ["cache", "refurbish"])
def test_a_store_that_kills_workers_is_given_up_and_training_goes_on(
    tmp_path: Path, stop: str
) -> None:
    numbers = ps.from_dataset(np.arange(40), random=False, version="1")
    kept = (
        numbers.cache("1MB", where=str(tmp_path / "kept"))
        if stop == "cache"
        else numbers.map(_draw, version="1")
        .refurbish(10, size="1MB", where=str(tmp_path / "kept"))
        .map(_draw)
    )
    # Few tasks write few times, so that the file stays smaller than what _spoil_samples can name.
    options: Any = {"workers": 2, "kind": "processes", "shuffle": False, "tiny_batch": 20}
    with kept.batch(20).loader(**options) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(40))
        (place,) = (tmp_path / "kept").iterdir()
        _spoil_samples(place)
        with pytest.warns(RuntimeWarning, match=r"index is damaged.*prepared again.*made anew"):
            assert np.concatenate(list(loader)).tolist() == list(range(40))
        assert loader.stats().retries > 0
        assert np.concatenate(list(loader)).tolist() == list(range(40))
    with (
        pytest.warns(RuntimeWarning, match="was emptied: it was found damaged"),
        kept.batch(20).loader(**options) as loader,
    ):
        assert np.concatenate(list(loader)).tolist() == list(range(40))


def test_what_one_user_finds_damaged_all_users_give_up(
    place: Path, user: subprocess.Popen[str]
) -> None:
    assert use(user) == "[] True\n"
    store = _store(place)
    store.check(range(40))
    assert get(store, 101) == bytes(9000)
    assert store._environment is not None
    store._environment.lose()
    assert use(user) == "[] False\n"
    assert end(user) == (0, 1)
    store.close()


def test_memory_that_cannot_be_read_is_found_without_touching_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * 4096))
    with (
        open(tmp_path / "file", "r+b") as file,
        mmap.mmap(file.fileno(), 8 * 4096) as mapped,
        memoryview(mapped) as view,
    ):
        assert readable(view)
        os.truncate(tmp_path / "file", 5 * 4096)
        with view[: 5 * 4096] as left:
            assert readable(left)
        assert not readable(view)
