"""What a loader keeps on disk is known with its origin, and goes by policy unless it is in use."""

from __future__ import annotations

import gzip
import io
import logging
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.store.catalogue import StoreInfo, collect, discard, on_disk, verify
from penstock.store.ledger import Ledger
from penstock.store.retention import Policy

OFF = Policy(budget=None, unused=None, age=None, obsolete=None)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.jpg").write_bytes(bytes([number]) * 100)
    return folder


def _length(value: bytes) -> int:
    return len(value)


def _first(value: bytes) -> int:
    return value[0]


def _run(pipeline: ps.Pipeline, epochs: int = 1) -> None:
    with pipeline.batch(3).loader(workers=0) as loader:
        for _ in range(epochs):
            list(loader)


def _cached(photos: Path, function: object = _length) -> ps.Pipeline:
    source = ps.from_folder(photos, classes=False)
    return source.map(function, random=False, name="look").cache("10MB", where="disk")  # type: ignore[arg-type]


def _only(kind: str) -> StoreInfo:
    (found,) = [info for info in on_disk() if info.kind == kind]
    return found


def test_a_disk_cache_knows_what_made_it_and_counts_what_it_gave(photos: Path) -> None:
    _run(_cached(photos), epochs=2)
    _run(_cached(photos))
    found = _only("cache")
    record = found.record
    assert record is not None
    assert record.made.origin == str(photos)
    assert record.made.data == ps.from_folder(photos, classes=False).source.identity()
    assert record.made.made_by == (
        "FolderSource",
        ".map(look)",
        ".cache(10.0 MB, where='disk')",
    )
    assert (record.opened, record.hits) == (2, 12)
    assert [use.hits for use in record.uses] == [6, 6]
    assert all(use.ended is not None for use in record.uses)
    assert record.cost > 0
    assert (found.samples, found.in_use) == (6, False)


def test_operations_are_recorded_with_their_parameters(tmp_path: Path) -> None:
    images = [np.zeros((8, 8, 3), np.uint8)] * 2
    data = ps.from_dataset(images, version="1").map(ps.image.resize(4))
    _run(data.cache("10MB", where=str(tmp_path / "here")))
    record = _only("cache").record
    assert record is not None
    assert record.made.made_by[1] == ".map(resize(size=4))"
    assert record.made.line == ""  # the place of the data is not known


def test_refurbish_below_a_cache_names_it_as_its_parent(photos: Path) -> None:
    pipeline = ps.from_folder(photos, classes=False).cache("10MB", where="disk")
    _run(pipeline.map(_length).refurbish(2, where="disk").map(_twice))
    cache, refurbish = _only("cache"), _only("refurbish")
    assert refurbish.record is not None
    assert refurbish.record.made.parents == (cache.identity,)


def _twice(value: int) -> int:
    return 2 * value


def test_opening_a_store_collects_what_the_policy_says(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _run(_cached(photos))
    old = _only("cache")
    pinned = str(tmp_path / "pinned")
    _run(ps.from_folder(photos, classes=False).cache("10MB", where=pinned))
    kept = next(info for info in on_disk() if str(info.place).startswith(pinned))
    assert kept.record is not None
    Ledger().pin(kept.record.made.key, pinned=True)
    Ledger().set_policy(replace(OFF, budget=0))
    with caplog.at_level(logging.WARNING, logger="penstock.store"):
        _run(_cached(photos, _first))
    assert not old.place.exists()
    assert "over the budget of 0 B" in caplog.text
    left = {info.place for info in on_disk()}
    assert kept.place in left  # it is pinned
    assert len(left) == 2  # and the one that was opened, which was in use


def test_what_another_pipeline_replaced_goes_after_its_time(photos: Path) -> None:
    _run(_cached(photos))
    old = _only("cache")
    for _ in range(2):
        _run(_cached(photos, _first))
    policy = replace(OFF, obsolete=60.0)
    now = old.last_use
    assert collect(policy, now + 30) == []
    (removal,) = collect(policy, now + 90, dry=True)
    assert (removal.info.place, removal.done) == (old.place, False)
    assert old.place.exists()
    (removal,) = collect(policy, now + 90)
    assert removal.done
    assert removal.reason.startswith("replaced by ")
    assert [info.identity for info in on_disk()] != [old.identity]
    assert len(Ledger().records()) == 1


USE = """
import sys
import penstock as ps
data = ps.from_folder(sys.argv[1], classes=False).cache("10MB", where="disk")
loader = data.batch(2).loader(workers=0)
next(iter(loader))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_store_that_a_second_process_uses_stays_until_that_is_killed(photos: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", USE, str(photos)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    found = _only("cache")
    assert (found.in_use, found.users) == (True, (process.pid,))
    everything = replace(OFF, unused=0.0, budget=0)
    assert collect(everything, found.last_use + 1e6) == []
    assert not discard(replace(found, in_use=False))  # as if it was opened after the choice
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    record = _only("cache").record
    assert record is not None
    assert [use.ended for use in record.uses] == [None]
    (removal,) = collect(everything, found.last_use + 1e6)
    assert removal.done
    assert on_disk() == []
    _run(ps.from_folder(photos, classes=False).cache("10MB", where="disk"))
    assert _only("cache").samples == 6


def _write_tar(path: Path, *, compress: bool = False) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number:03d}.bin")
            member.size = 3
            archive.addfile(member, io.BytesIO(bytes([number] * 3)))
    path.write_bytes(gzip.compress(buffer.getvalue()) if compress else buffer.getvalue())


def test_indexes_of_shards_are_one_thing_and_rebuilt_after_a_collection(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _write_tar(tmp_path / f"{name}.tar")
    shards = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for _ in range(2):
        ps.from_tar(shards)
    index = _only("index")
    assert index.record is not None
    assert (index.samples, index.record.opened, index.record.hits) == (2, 2, 1)
    assert index.record.made.origin == str(tmp_path)
    assert verify(index).sound
    assert len(collect(replace(OFF, unused=0.0), index.last_use + 1)) == 1
    assert on_disk() == []
    assert len(ps.from_tar(shards).source) == 8
    (path, *_) = _only("index").record.made.paths  # type: ignore[union-attr]
    path.write_bytes(b"nonsense")
    assert verify(_only("index")).damaged == 1


def test_a_decompressed_copy_is_in_use_while_its_process_lives(tmp_path: Path) -> None:
    _write_tar(tmp_path / "a.tar.gz", compress=True)
    code = (
        "import sys, penstock as ps; ps.from_tar(sys.argv[1]);"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a.tar.gz")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    copy = _only("decompressed")
    assert (copy.in_use, copy.users) == (True, (process.pid,))
    assert not discard(copy)
    process.kill()
    process.communicate()
    assert discard(copy)
    assert not copy.place.exists()


def test_packed_shards_are_listed_and_never_collected(photos: Path, tmp_path: Path) -> None:
    ps.from_folder(photos, classes=False).pack(tmp_path / "packed", workers=0)
    _run(ps.from_tar(tmp_path / "packed").cache("10MB", where="disk"))
    packed = _only("packed")
    assert packed.record is not None
    assert packed.record.made.origin == str(photos)
    assert packed.record.made.versions["penstock"]
    removals = collect(replace(OFF, unused=0.0, budget=0), packed.last_use + 1e6)
    assert [removal.info.kind for removal in removals] == ["cache"]
    assert not discard(packed)
    assert (tmp_path / "packed" / "pack.json").exists()


def test_records_of_what_somebody_removed_by_hand_are_forgotten(
    photos: Path, tmp_path: Path
) -> None:
    import shutil

    _run(_cached(photos))
    shutil.rmtree(_only("cache").place)
    assert on_disk() == []
    assert Ledger().records() == {}
