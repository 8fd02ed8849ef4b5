"""The benchmarks ``storage`` and ``oneaccess``."""

from __future__ import annotations

import struct
from argparse import Namespace
from pathlib import Path

import pytest

import penstock as ps
from benchmarks.storage import objects, oneaccess, storage
from benchmarks.storage.mds_writer import write_mds
from benchmarks.storage.oneaccess import Device, SlowDevice
from benchmarks.storage.readers import Stored, one_epoch, penstock_files
from tests.support.jpegs import encode, picture

MB = 1_000_000


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    root = tmp_path / "photographs"
    for label in ("a", "b"):
        (root / label).mkdir(parents=True)
        for number in range(3):
            (root / label / f"{number}.jpg").write_bytes(encode(picture(40, 50, number)))
    return root


def test_all_forms_of_the_data_have_the_same_samples(photographs: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    samples, size = storage.make_data(photographs, root, copies=2)
    assert samples == 12
    assert size == sum(file.stat().st_size for file in (root / "files").rglob("*.jpg"))
    files = ps.from_folder(root / "files").source
    expected = sorted(files.read(range(samples)))
    assert sorted(ps.from_tar(root / "tar").source.read(range(samples))) == expected
    found = ps.from_mds(root / "mds").source.read(range(samples))
    assert sorted((row["image"], row["label"]) for row in found) == expected


def test_an_epoch_is_counted_whole_and_can_end_early(photographs: Path) -> None:
    root = photographs.parent / "data"
    samples, size = storage.make_data(photographs, root, copies=2)
    stored = Stored(root, samples, batch=4, workers=1)
    whole = one_epoch(penstock_files, stored, seconds=1e9)
    assert (whole["samples"], whole["bytes"]) == (samples, size)
    assert one_epoch(penstock_files, stored, seconds=0.0)["samples"] == 4


def test_a_wrong_epoch_of_ours_is_reported() -> None:
    runs = {"Penstock, tar": [{"samples": 12.0, "bytes": 99.0}]}
    (line,) = storage._mistakes(storage.CONDITIONS[0], runs, 12, 100)
    assert "gave 12 samples and 99 bytes instead of 12 and 100" in line


def test_mds_shards_end_at_their_limit(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", [(bytes(100), 1)] * 5, limit=200)
    shards = sorted((tmp_path / "mds").glob("*.mds"))
    assert [struct.unpack("<I", shard.read_bytes()[:4])[0] for shard in shards] == [2, 2, 1]


def device(found: Device) -> tuple[SlowDevice, list[float]]:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return SlowDevice(found, clock=lambda: now[0], sleep=sleep), now


def test_a_disk_seeks_only_between_data_that_does_not_follow() -> None:
    disk, now = device(Device("disk", 0.01, 100 * MB))
    disk.take([(5, MB), (6, MB), (7, MB)])
    assert now[0] == pytest.approx(0.01 + 0.03)
    disk.take([(2, MB)])
    assert now[0] == pytest.approx(0.01 + 0.03 + 0.02)
    assert disk.busy == pytest.approx(now[0])


def test_what_was_asked_for_ahead_arrives_meanwhile() -> None:
    disk, now = device(Device("disk", 0.01, 100 * MB))
    disk.ask([(0, MB), (1, MB)])
    now[0] = 1.0
    disk.take([(0, MB), (1, MB)])
    assert now[0] == 1.0


def test_a_device_that_serves_reads_side_by_side_hides_its_latency() -> None:
    network, now = device(Device("network", 0.01, 100 * MB, side_by_side=64))
    network.take([(2 * number, MB // 10) for number in range(100)])
    assert now[0] == pytest.approx(0.01 + 100 * 0.001)


def test_both_tables_are_made(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    instant = Device("instant", 0.0, 1e12)
    monkeypatch.setattr(oneaccess, "DEVICES", (instant,))
    options = Namespace(data=photographs, rounds=1, batch=2, workers=1, link=100.0)
    second, third = oneaccess.run(options).tables
    assert [row[0] for row in second.rows] == ["instant"]
    apart, shared = (int(row[2]) for row in third.rows[:2])
    assert apart >= 2 * oneaccess.EPOCHS * 6
    assert shared < apart


def test_a_large_bucket_is_listed_in_the_first_run_only() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    options = Namespace(count=2500, shards=3, latency=0.0, workers=1)
    table = objects.run(options).tables[0]
    assert [row[1:3] for row in table.rows] == [
        ("2,500", "3"),
        ("2,500", "0"),
        ("", ""),
        ("300", "1"),
        ("300", "0"),
        ("", ""),
    ]
