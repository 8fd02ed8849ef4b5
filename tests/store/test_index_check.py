"""The check of an LMDB index: intact files pass, and a file that passes cannot crash LMDB."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.store import LmdbStore
from penstock.store.index_check import IndexDamage, check_index
from penstock.store.opening import PIECES, SAMPLES

DATABASES = {SAMPLES: True, PIECES: False}
MB = 1_000_000


def check(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return check_index(fd, DATABASES)
    finally:
        os.close(fd)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("nbytes", [10, 300, 1500, 5000, 200_000])
def test_every_state_of_an_intact_store_passes(tmp_path: Path, nbytes: int, tagged: bool) -> None:
    rng = random.Random(nbytes)
    store = LmdbStore(tmp_path / "store", budget=500 * MB)
    last = 0
    for turn in range(20):
        keys = rng.sample(range(1000), rng.randrange(1, 60))
        values = [bytes(rng.randrange(nbytes)) for _ in keys]
        if tagged:
            # A key twice in one transaction, with a smaller value the second time.
            items = [(key, 2 * turn, value) for key, value in zip(keys, values, strict=True)]
            store.put_tagged([*items, (keys[0], 2 * turn + 5, b"small")])
        else:
            store.put_many(list(zip(keys, values, strict=True)))
        store.delete_many(rng.sample(range(1000), 100))
        number = check(tmp_path / "store" / "data.mdb")
        assert number >= last
        last = number
    store.destroy()


def _filled(place: Path, rng: random.Random) -> Path:
    store = LmdbStore(place, budget=100 * MB)
    store.put_many([(key, bytes([key % 251]) * rng.randrange(3000)) for key in range(150)])
    store.put_tagged([(key, 2, bytes(rng.randrange(150_000))) for key in range(500, 510)])
    store.delete_many(range(0, 150, 3))
    store.close()
    return place / "data.mdb"


TRY = """
import sys, lmdb
with lmdb.open(sys.argv[1], max_dbs=2, map_size=1 << 28, create=False, lock=False) as env:
    for name, integers in ((b"samples", True), (b"pieces", False)):
        database = env.open_db(name, integerkey=integers, create=False)
        with env.begin(db=database) as transaction:
            keys = [bytes(key) for key, _ in transaction.cursor()]
        with env.begin(db=database, write=True) as transaction:
            for key in keys:
                assert transaction.get(key) is not None
            for number in range(300):
                key = (10_000 + number).to_bytes(8, "little")
                transaction.put(key, bytes(40 * (number % 9)))
"""


def test_lmdb_reads_and_changes_whatever_passes_the_check(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = _filled(tmp_path / "store", rng)
    intact = path.read_bytes()
    pages = [at for at in range(0, len(intact), 4096) if intact[at + 10] in (1, 2, 8)]
    found = passed = 0
    for _ in range(400):
        data = bytearray(intact)
        for _ in range(rng.choice((1, 1, 3))):
            page = rng.choice(pages)
            # Most of what matters is at the beginning of a page.
            at = page + (rng.randrange(160) if rng.random() < 0.7 else rng.randrange(4096))
            data[at] = rng.randrange(256)
        path.write_bytes(data)
        try:
            check(path)
        except IndexDamage:
            found += 1
            continue
        if bytes(data) == intact:
            continue
        passed += 1
        if passed <= 12:  # each takes a process
            subprocess.run([sys.executable, "-c", TRY, str(path.parent)], check=True)
    # Many of the changes are in pages that are free, or in values.
    assert found > 20
    assert passed > 12


@pytest.mark.parametrize("nbytes", [0, 10, 150, 4096, 4200, 8192, 20_000])
def test_a_file_that_is_too_short_is_damage(tmp_path: Path, nbytes: int) -> None:
    path = _filled(tmp_path / "store", random.Random(1))
    os.truncate(path, nbytes)
    with pytest.raises(IndexDamage):
        check(path)
