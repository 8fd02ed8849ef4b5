"""Measuring storage: what is read, and what the figures lead to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.storage.server import Conditions, ObjectServer
from penstock import cli
from penstock.diagnose.doctor.report import Finding
from penstock.diagnose.doctor.storage import (
    LARGE,
    PIECE,
    ProbedFile,
    ProbeRead,
    StorageRates,
    advice,
    measured,
)

BUCKET = StorageRates(
    place="s3://bucket/train",
    remote=True,
    files=1000,
    mean=100e3,
    shards=False,
    piece=100e3,
    alone=0.1,
    slowest=1.0,
    many=100e6,
    sequence=None,
    memory=16 << 30,
)
HARD_DISK = replace(
    BUCKET,
    remote=False,
    shards=True,
    piece=PIECE,
    alone=0.01,
    many=15e6,
    sequence=150e6,
    memory=4 * 1000 * PIECE,
)


class Clock:
    """A disk that takes 10 ms for a read, and a second for 100 MB. Reads at once wait together."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[ProbeRead] = []

    def __call__(self) -> float:
        return self.now

    def read(self, parts: Sequence[ProbeRead]) -> int:
        self.asked += parts
        size = sum(part.size for part in parts)
        self.now += 0.01 + size / 100e6
        return size


def named(findings: Sequence[Finding], name: str) -> Finding:
    (found,) = (one for one in findings if one.name == name)
    return found


def test_small_files_are_read_whole_one_by_one_and_then_at_once() -> None:
    clock = Clock()
    files = [ProbedFile(f"{number}", 100_000) for number in range(400)]
    rates = measured("data", files, clock.read, clock=clock)
    assert rates.alone == pytest.approx(0.011)
    assert rates.many == pytest.approx(256 * 1e5 / (0.01 + 0.256))
    assert rates.sequence is None
    assert len({part.name for part in clock.asked}) == 12 + 256  # nothing was read twice


def test_shards_are_read_at_random_in_pieces_and_in_sequence() -> None:
    clock = Clock()
    shards = [ProbedFile(f"{number}.tar", 20 << 20) for number in range(4)]
    rates = measured("data", shards, clock.read, clock=clock)
    assert rates.shards
    assert rates.piece == PIECE
    assert rates.sequence == pytest.approx((20 << 20) / (10 * 0.01 + (20 << 20) / 100e6))
    assert all(part.start + part.size <= 20 << 20 for part in clock.asked)


def test_no_measurement_reads_more_than_its_budget() -> None:
    clock = Clock()
    measured("data", [ProbedFile("one", LARGE - 1)] * 1000, clock.read, clock=clock)
    assert sum(part.size for part in clock.asked) <= (64 << 20) + 12 * LARGE


def test_a_bucket_is_bound_by_latency_and_more_workers_are_no_remedy() -> None:
    found = named(advice(BUCKET), "latency")
    assert found.text == "bound by latency: one reader gets 1% of the rate"
    assert "100 reads at once" in found.why
    assert not any("workers" in fix.command for fix in found.remedies)
    assert "penstock pack" in named(advice(BUCKET), "packing").remedies[0].command


def test_a_disk_with_slow_seeks_gets_a_reservoir_as_large_as_a_quarter_of_memory() -> None:
    found = named(advice(HARD_DISK), "order")
    assert found.text.startswith("reading in sequence is 10.0 times as fast")
    assert found.remedies[0].command == "order=ps.Reservoir(window=1000)"
    assert "1.5 MB" in found.why  # 10 ms at 150 MB/s


def test_a_fast_disk_needs_neither_packing_nor_a_reservoir() -> None:
    fast = replace(HARD_DISK, alone=0.0002, many=600e6, sequence=700e6)
    assert all(finding.remedies == () for finding in advice(fast))
    assert "shuffle freely" in named(advice(fast), "order").text


def test_the_command_measures_a_folder_and_a_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    (tmp_path / "train").mkdir()
    for number in range(20):
        (tmp_path / "train" / f"{number}.jpg").write_bytes(bytes(1000))
    assert cli.main(["doctor", "--storage", str(tmp_path / "train"), "--json"]) == 0
    local = json.loads(capsys.readouterr().out)["storage"]
    assert (local["files"], local["mean"], local["remote"]) == (20, 1000, False)
    with ObjectServer(tmp_path, Conditions(latency=0.05)) as server:
        words = [f"--option={name}={value}" for name, value in server.storage.items()]
        assert cli.main(["doctor", "--storage", server.url("train"), *words, "--json"]) == 0
    remote = json.loads(capsys.readouterr().out)["storage"]
    assert (remote["files"], remote["remote"]) == (20, True)
    assert remote["alone"] >= 0.05  # the server waits that long


def test_a_place_without_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--storage", str(tmp_path)]) != 0
    assert "has no files to read" in capsys.readouterr().err
    assert cli.main(["doctor", "--storage", str(tmp_path / "absent")]) != 0
    assert "is not a folder" in capsys.readouterr().err
