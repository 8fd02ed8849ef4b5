"""Several processes use one LMDB store, and any of them may be killed at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.store import LmdbStore
from tests.store.reading import get, get_many

MB = 1_000_000

PREAMBLE = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), budget=200_000_000)
def value(key):
    return b"%d," % key * (100 + key % 3000)
"""


def value(key: int) -> bytes:
    return b"%d," % key * (100 + key % 3000)


def _start(place: Path, script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script, str(place), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


WRITE = """
me = int(sys.argv[2])
for start in range(0, 600, 5):
    keys = [k if k % 3 else k // 3 for k in range(600 * me + start, 600 * me + start + 5)]
    assert all(store.put_many([(k, value(k)) for k in keys]))
"""

READ = """
seen = 0
while seen < int(sys.argv[2]):
    keys = store.keys()
    found = store.get_many(keys)
    assert found == [value(k) for k in keys], "a reader saw a partly written value"
    seen = len(keys)
"""


def test_readers_and_writers_in_several_processes_agree(tmp_path: Path) -> None:
    place = tmp_path / "store"
    expected = {k if k % 3 else k // 3 for k in range(1800)}
    writers = [_start(place, WRITE, me) for me in range(3)]
    readers = [_start(place, READ, len(expected)) for _ in range(2)]
    for process in writers + readers:
        process.communicate()
    assert [process.returncode for process in writers + readers] == [0] * 5
    store = LmdbStore(place, budget=200 * MB)
    assert set(store.keys()) == expected
    assert all(get(store, key) == value(key) for key in expected)
    store.destroy()


WRITE_FOREVER = """
start = int(sys.argv[2])
while True:
    store.put_many([(k, value(k)) for k in range(start, start + 20)])
    store.delete_many(list(range(start, start + 10)))
    start += 20
    print(start, flush=True)
"""


def test_a_writer_killed_in_the_middle_leaves_a_sound_store(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=200 * MB)
    for turn in range(5):
        process = _start(tmp_path / "store", WRITE_FOREVER, 100_000 * turn)
        for _ in range(3 + turn):
            assert _line(process)
        _kill(process)
        everything = store.keys()
        keys = [key for key in everything if key >= 0]
        assert get_many(store, keys) == [value(key) for key in keys]
        assert len([key for key in keys if key >= 100_000 * turn]) >= 30
        # The lock of a dead writer is free, and the bytes in use are counted correctly.
        assert store.put_many([(-1 - turn, b"alive")]) == [True]
        assert store.used >= sum(len(value(key)) for key in keys)
    assert get_many(store, [-1, -5]) == [b"alive", b"alive"]
    store.delete_many(store.keys())
    assert store.used == 0
    store.destroy()


READ_FOREVER = """
def look(transaction):
    print("reading", flush=True)
    sys.stdin.read()

store._attached().read(look)
"""


def test_a_killed_reader_pins_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LmdbStore, "map_size", 4 << 20)
    store = LmdbStore(tmp_path / "store", budget=200 * MB)
    store.put_many([(0, bytes(MB))])
    reader = _start(tmp_path / "store", READ_FOREVER)
    assert _line(reader) == "reading\n"
    _kill(reader)
    for key in range(1, 30):
        assert store.delete_many([key - 1]) == 1
        assert store.put_many([(key, bytes(MB))]) == [True]
    store.destroy()


def test_a_seal_holds_in_every_process(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=200 * MB)
    store.put_many([(1, b"one")])
    other = _start(
        tmp_path / "store",
        """
print(store.put_many([(2, b"two")]), store.sealed, flush=True)
sys.stdin.readline()
print(store.put_many([(3, b"three"), (1, b"one")]), store.sealed, store.full, flush=True)
store.seal()
""",
    )
    assert _line(other) == "[True] False\n"
    store.seal()
    output, _ = other.communicate("\n")
    assert output == "[False, True] True 0\n"
    assert get_many(store, [1, 2, 3]) == [b"one", b"two", None]
    fresh = LmdbStore(tmp_path / "store", budget=200 * MB)
    assert fresh.sealed
    fresh.close()
    store.destroy()


def test_a_store_grown_by_a_process_with_a_larger_budget_can_be_read(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", budget=MB)
    store.put_many([(1, b"one")])
    other = _start(
        tmp_path / "store",
        """
for start in range(2, 102, 10):
    assert all(store.put_many([(k, bytes(1_000_000)) for k in range(start, start + 10)]))
""",
    )
    other.communicate()
    assert other.returncode == 0
    assert (tmp_path / "store" / "data.mdb").stat().st_size > store.map_size
    assert get_many(store, [1, 101]) == [b"one", bytes(MB)]
    with pytest.warns(RuntimeWarning, match="past its budget"):
        assert store.put_many([(200, b"small")]) == [False]
    store.destroy()


def test_a_store_destroyed_by_another_process_can_still_be_read_where_it_is_open(
    tmp_path: Path,
) -> None:
    store = LmdbStore(tmp_path / "store", budget=MB)
    store.put_many([(1, b"one")])
    other = _start(tmp_path / "store", "store.get_many([1])\nstore.destroy()\n")
    other.communicate()
    assert other.returncode == 0
    assert not (tmp_path / "store").exists()
    assert get(store, 1) == b"one"
    store.close()
    assert not (tmp_path / "store").exists()
