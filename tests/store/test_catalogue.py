"""What is kept can be found, weighed, proved and removed, and nobody who uses it is hindered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import config
from penstock.errors import StoreError
from penstock.store import Store
from penstock.store.catalogue import Kept, Leftover, Proof, in_memory, on_disk, remove, verify
from penstock.store.listing import aligned, listed, proved, span
from penstock.store.opening import DATA

MB = 1_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def _fill(place: Path, count: int = 20, nbytes: int = 20_000, *, tagged: bool = False) -> None:
    store = Store(place, budget=100 * MB, identity=place.name, persistent=True)
    if tagged:
        assert all(store.put_tagged([(key, 3, bytes(nbytes)) for key in range(count)]))
    else:
        assert all(store.put_many([(key, bytes([key % 251]) * nbytes) for key in range(count)]))
    store.close()


def _only(root: Path) -> Kept:
    (found,) = on_disk([root])
    return found


def _spoil(place: Path, key: int, nbytes: int = 20_000) -> None:
    """Change one byte in the middle of a value that ``_fill`` has put."""
    data = bytearray((place / DATA).read_bytes())
    at = data.index(bytes([key % 251]) * nbytes)
    data[at + nbytes // 2] ^= 0xFF
    (place / DATA).write_bytes(data)


HOLD = """
import sys
from pathlib import Path
from penstock.store import Store
place = Path(sys.argv[1])
store = Store(place, budget=10**8, identity=place.name, persistent=True)
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


def test_a_place_may_be_a_store_itself(root: Path) -> None:
    _fill(root / "aaaa")
    assert on_disk([root / "aaaa"]) == on_disk([root])


def test_the_default_place_is_that_of_disk_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    assert on_disk() == []
    _fill(tmp_path / "stores" / "aaaa")
    assert [one.identity for one in on_disk()] == ["aaaa"]


def test_an_empty_store_is_of_no_kind(root: Path) -> None:
    _fill(root / "aaaa", 0)
    found = _only(root)
    assert (found.samples, found.kind, verify(found)) == (0, "", Proof(0, 0))


def test_a_store_whose_maker_was_killed_early_is_listed(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / DATA).unlink()
    found = _only(root)
    assert (found.samples, verify(found).sound) == (0, True)


def test_looking_is_not_using(root: Path) -> None:
    _fill(root / "aaaa")
    for name in ("state.json", DATA):
        os.utime(root / "aaaa" / name, (1000, 1000))
    first = _only(root)
    assert first.last_use == 1000
    assert verify(first).sound
    assert _only(root) == first
    assert _state(root / "aaaa")["clean"]


def test_what_is_no_store_of_ours_is_not_listed(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "other").mkdir(mode=0o700)
    (root / "other" / DATA).write_bytes(b"somebody's dataset")
    (root / "file").write_text("x")
    (root / "link").symlink_to(root / "aaaa")
    _fill(root / "open")
    (root / "open").chmod(0o755)
    assert [one.identity for one in on_disk([root])] == ["aaaa"]
    with pytest.raises(StoreError, match="not a store of Penstock's"):
        remove(root / "other")
    assert (root / "other" / DATA).exists()


def test_a_store_in_use_says_by_whom_and_is_not_removed(root: Path) -> None:
    _fill(root / "aaaa")
    with _held(root / "aaaa") as process:
        found = _only(root)
        assert (found.in_use, found.users, found.samples) == (True, (process.pid,), 21)
        assert not remove(root / "aaaa")
        assert (root / "aaaa" / DATA).exists()
    assert remove(root / "aaaa")
    assert not (root / "aaaa").exists()


def test_a_store_that_was_looked_at_while_in_use_is_left_clean(root: Path) -> None:
    with _held(root / "aaaa"):
        assert verify(_only(root)).sound
    assert _state(root / "aaaa")["clean"]


def test_what_is_foreign_in_the_directory_of_a_store_stays(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / "notes.txt").write_text("mine")
    assert remove(root / "aaaa")
    assert [path.name for path in (root / "aaaa").iterdir()] == ["notes.txt"]


def test_sound_stores_are_proved_in_steps(root: Path) -> None:
    _fill(root / "aaaa", 150)
    told: list[tuple[int, int]] = []
    assert verify(_only(root), lambda done, total: told.append((done, total))) == Proof(150, 0)
    assert told == [(64, 150), (128, 150), (150, 150)]


@pytest.mark.parametrize("key", [0, 63, 64, 149])
def test_a_damaged_value_is_counted_wherever_it_lies(root: Path, key: int) -> None:
    _fill(root / "aaaa", 150)
    _spoil(root / "aaaa", key)
    assert verify(_only(root)) == Proof(150, 1)
    assert (root / "aaaa" / DATA).exists()


def test_a_damaged_piece_of_a_value_is_found(root: Path) -> None:
    _fill(root / "aaaa", 1, 300_000, tagged=True)
    data = bytearray((root / "aaaa" / DATA).read_bytes())
    # All zeros but for the tree: a page in the midst of the value.
    at = data.index(bytes(60_000)) + 30_000
    data[at] = 1
    (root / "aaaa" / DATA).write_bytes(data)
    assert verify(_only(root)) == Proof(1, 1)


def test_a_store_that_is_written_to_meanwhile_is_proved(root: Path) -> None:
    _fill(root / "aaaa", 150)
    with _held(root / "aaaa") as process:

        def told(done: int, total: int) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{2000 + done}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "put\n"

        proof = verify(_only(root), told)
    assert proof.sound
    assert proof.values >= 151


GROW = """
import sys
from pathlib import Path
from penstock.store import Store
place = Path(sys.argv[1])
store = Store(place, budget=300_000_000, identity=place.name, persistent=True)
assert all(store.put_many([(1000 + key, bytes(1_000_000)) for key in range(120)]))
store.close()
"""


def test_a_store_that_outgrows_the_map_of_who_looks_is_proved(root: Path) -> None:
    place = root / "aaaa"
    small = Store(place, budget=5 * MB, identity="aaaa", persistent=True)
    assert all(small.put_many([(key, bytes(1_000)) for key in range(150)]))
    small.close()
    steps: list[int] = []

    def told(done: int, total: int) -> None:
        if not steps:
            subprocess.run([sys.executable, "-c", GROW, str(place)], check=True)
        steps.append(done)

    assert verify(_only(root), told) == Proof(270, 0)


def test_a_file_that_was_cut_short_is_found_out_and_kills_nobody(root: Path) -> None:
    place = root / "aaaa"
    _fill(place, 150)
    os.truncate(place / DATA, os.path.getsize(place / DATA) // 2)
    found = _only(root)
    assert found.samples is None
    proof = verify(found)
    assert not proof.sound
    assert (proof.wrong != "") == _state(place)["damaged"]


def test_a_file_that_lacks_most_of_itself_is_not_made_longer(root: Path) -> None:
    place = root / "aaaa"
    _fill(place, 40, MB)
    os.truncate(place / DATA, 100_000)
    assert "cut short" in verify(_only(root)).wrong
    assert os.path.getsize(place / DATA) == 100_000


def test_a_file_that_is_no_database_any_more_is_found_out(root: Path) -> None:
    place = root / "aaaa"
    _fill(place)
    (place / DATA).write_bytes(b"nonsense" * 10_000)
    proof = verify(_only(root))
    assert "its index is damaged" in proof.wrong
    assert _state(place)["damaged"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 99}, "it is of format 99"),
        ({"damaged": True}, "its index was found damaged"),
        ({"clean": False, "boot": "another"}, "the machine went down"),
    ],
)
def test_what_will_not_be_used_again_is_told_and_not_read(
    root: Path, change: dict[str, object], reason: str
) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / "state.json").write_text(json.dumps({**_state(root / "aaaa"), **change}))
    found = _only(root)
    assert found.void.startswith(reason)
    assert found.samples is None
    assert verify(found) == Proof(0, 0, found.void)
    assert remove(root / "aaaa")


def test_a_state_that_cannot_be_read_is_told(root: Path) -> None:
    _fill(root / "aaaa")
    (root / "aaaa" / "state.json").write_text("{")
    found = _only(root)
    assert (found.identity, found.void) == ("aaaa", "its state cannot be read")


MEMORY = """
import sys, uuid
from penstock.store import memory_store
store = memory_store(10**8, shared=True)
store.put_many([(key, bytes(10_000)) for key in range(5)])
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_stores_of_the_living_and_leftovers_of_the_dead_are_told_apart(
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


def test_where_nothing_is_in_memory_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(config, "SMALL_SHM", 0)
    assert in_memory() == ([], [])


# As people read it.

KEPT = Kept(
    place=Path("/home/me/.cache/penstock/stores/3f2a9c01be7755aa"),
    where="disk",
    identity="3f2a9c01be7755aa",
    kind="cache",
    samples=48_000,
    nbytes=5_100 * MB,
    last_use=1_000.0,
    in_use=False,
)


def test_the_list_says_where_what_how_much_and_when() -> None:
    memory = Path("/dev/shm/penstock-1000")
    used = Kept(
        memory / "run-7-abc" / "0f", "memory", "0f", "", None, 2 * MB, 9e3, True, (7, 8, 9, 10)
    )
    left = Leftover(memory / "run-5-def", 200 * MB)
    assert listed([KEPT, used], [left], now=1_000.0 + 2 * 86_400) == [
        "on disk, /home/me/.cache/penstock/stores",
        "  fingerprint   kind   samples    size  last use",
        "  3f2a9c01be77  cache   48,000  5.1 GB  2 days ago",
        "",
        "in memory, /dev/shm/penstock-1000",
        "  fingerprint  kind  samples    size  last use",
        "  0f           ?           ?  2.0 MB  now       in use by process 7, 8, 9, ...",
        "",
        "left in memory by dead processes: penstock store clear --all removes it",
        "  /dev/shm/penstock-1000/run-5-def  200.0 MB",
        "",
        "2 stores, 1 left behind, 5.3 GB",
    ]


def test_an_empty_list_says_so() -> None:
    assert listed([], [], 0.0) == ["Nothing is kept."]


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof(48_000, 0), "48,000 values, all sound"),
        (Proof(48_000, 3), "3 of 48,000 values damaged; they are prepared again"),
        (Proof(5, 0, "its index is damaged (x)"), "its index is damaged (x); it is started anew"),
    ],
)
def test_what_verifying_found_is_told(proof: Proof, words: str) -> None:
    assert words in proved(KEPT, proof)


@given(st.floats(0, 1e9))
def test_times_are_told_in_two_units_at_most(seconds: float) -> None:
    assert len(span(seconds).split()) in (2, 4)
    assert span(seconds).startswith(span(seconds, units=1))


@given(st.lists(st.tuples(st.text("ab", max_size=5), st.text("cd", min_size=1)), min_size=1))
def test_columns_stand_below_each_other(rows: list[tuple[str, str]]) -> None:
    width = max(len(first) for first, _ in rows)
    for line, (first, second) in zip(aligned(rows, right=set()), rows, strict=True):
        assert (line[:width].strip(), line[width:].strip()) == (first, second)
