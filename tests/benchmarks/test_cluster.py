"""The benchmark ``cluster``: counts and equal batches on two hosts, its tables and messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main, parse
from benchmarks.cluster import cluster, host_faults
from benchmarks.cluster import run as cluster_run
from benchmarks.cluster.cluster import Outcome, Setting, make_result, steady_rate
from benchmarks.cluster.host_faults import HostFaultOutcome, fault_result, longest_gap
from benchmarks.cluster.job import RankPlan
from benchmarks.cluster.work import CutPhotos, HostDisk, Ledger
from benchmarks.faults.verdict import BatchRecord, Verdict
from benchmarks.harness.hosts import NoHostsError
from penstock.serialize import pack, unpack
from tests.support.hosts import hosts

ITEMS, SIZE, BATCH = 48, 2000, 2


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "a").mkdir(parents=True)
    draws = np.random.default_rng(0)
    for number in range(ITEMS):
        size = SIZE // 2 if number % 2 else 2 * SIZE
        content = draws.integers(0, 256, size, dtype=np.uint8).tobytes()
        (folder / "a" / f"{number:03}.jpg").write_bytes(content)
    return folder


def work(files: Path, share: float = 1.0) -> CutPhotos:
    return CutPhotos(str(files), ITEMS, SIZE, BATCH, share)


# The data.


def test_samples_are_files_cut_to_one_size(files: Path) -> None:
    with work(files).loader(shuffle=False, workers=0) as loader:
        batches = list(loader)
    assert np.concatenate([numbers for _, numbers in batches]).tolist() == list(range(ITEMS))
    paths = sorted((files / "a").iterdir())
    for contents, numbers in batches:
        for content, number in zip(contents, numbers, strict=True):
            kept = paths[number].read_bytes()[:SIZE]
            assert content.tobytes() == kept + bytes(SIZE - len(kept))


def test_a_disk_counts_its_reads_and_follows_its_ledger(files: Path, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", ITEMS)
    with work(files, 0.0).loader(str(tmp_path / "ledger"), workers=0) as loader:
        disk = loader.pipeline.source
    assert isinstance(disk, HostDisk)
    ledger.rate = 1e12
    copy = unpack(pack(disk).tobytes())
    disk.read([3, 5])
    copy.read([5])
    assert np.flatnonzero(ledger.reads()).tolist() == [3, 5]
    assert ledger.reads()[[3, 5]].tolist() == [1, 2]
    assert copy.disk.rate == 1e12
    assert copy.identity() == disk.identity()


def test_the_budget_holds_exactly_the_share_of_the_samples(files: Path, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", ITEMS)
    with work(files, 0.25).loader(str(tmp_path / "ledger"), workers=0) as loader:
        for _ in range(2):
            before = ledger.reads()
            assert sum(len(numbers) for _, numbers in loader) == ITEMS
    assert (ledger.reads() == before).sum() == ITEMS // 4


def test_a_plan_survives_json(files: Path) -> None:
    plan = RankPlan(work(files), 2, 3, 0.1, cluster=True, gates=(1, 2))
    assert RankPlan.from_json(plan.as_json()) == plan


# Tables.


def outcome(**values: Any) -> Outcome:
    usual = {"rate": 100.0, "epoch": 2.56, "reads": 0.0, "network_first": 0, "network": 3e6}
    return Outcome(**{**usual, "total": 256, "twice": 0, "hedged": 0.0, "different": 0, **values})


def test_caches_that_are_one_are_compared_with_local_ones() -> None:
    options = parse(["cluster", "--data", "."])[1]
    pair = Setting(2, "hard disk", 0.65, True)
    local = replace(pair, cluster=False)
    outcomes = {local: [outcome(rate=20.0, epoch=12.8, reads=90.0)], pair: [outcome(rate=300.0)]}
    found = make_result([pair], outcomes, [], options)
    assert found.tables[0].rows == (
        (
            *("2 hosts, hard disk, 65 % each", "12.80", "2.56", "20", "300", "15.00"),
            *("90", "0", "0.0 / 3.0", "0"),
        ),
    )
    assert found.notes == (
        "cluster: 2 hosts, hard disk, 65 % each: 256 reads in the whole run, 0 of 256 samples "
        "more than once",
    )
    assert found.wrong == ()
    outcomes[pair] = [outcome(different=2)]
    [wrong] = make_result([pair], outcomes, [], options).wrong
    assert "2 samples or batches are lost, repeated or differ" in wrong


def test_local_caches_are_measured_when_they_have_met_the_samples() -> None:
    assert Setting(2, "SSD", 1.0, False).warm_up() == 8
    assert 0.75 ** Setting(4, "SSD", 1.0, False).warm_up() <= 0.005
    assert not Setting(2, "SSD", 0.25, True).holds_all
    assert Setting(2, "SSD", 0.5, True).holds_all


def records(*times: float) -> list[BatchRecord]:
    return [BatchRecord(at, 0, (1, 2), "") for at in times]


def test_rates_leave_out_what_was_prepared_before() -> None:
    # Four batches that were ready, then one every half second.
    assert steady_rate(records(0.0, 0.0, 0.0, 0.0, 1.0, 1.5, 2.0)) == 4.0


def test_the_longest_gap_is_one_that_ends_after_the_fault() -> None:
    assert longest_gap(records(0.0, 5.0, 6.0, 8.0, 9.0), since=5.5) == 2.0
    assert longest_gap(records(0.0, 5.0), since=6.0) is None


def test_a_sample_that_a_fault_loses_makes_the_result_invalid() -> None:
    options = parse(["cluster", "--data", "."])[1]
    good = HostFaultOutcome(Verdict(samples=96), 0.05, 0.06)
    bad = HostFaultOutcome(Verdict(samples=95, lost=1), 0.25, None)
    found = fault_result({"none": [good], "node": [bad]}, options)
    assert [row[1:] for row in found.tables[0].rows] == [
        ("96", "0", "0", "0", "50", "60"),
        ("95", "1", "0", "0", "250", ""),
    ]
    assert found.wrong == (
        "cluster: node: 1 samples lost, 0 repeated, 0 batches differ from those of the loader "
        "alone",
    )


def test_a_fault_that_cannot_be_provoked_here_is_a_note_and_no_row() -> None:
    skipped = HostFaultOutcome(skipped="Ray is not installed")
    found = fault_result({"ray-head": [skipped]}, parse(["cluster", "--data", "."])[1])
    assert (found.tables[0].rows, found.wrong) == ((), ())
    assert found.notes == ("cluster: ray-head was not run: Ray is not installed",)


# The command.


def test_a_machine_without_namespaces_is_told_why(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(count: int) -> None:
        raise NoHostsError("only root may make network namespaces")

    monkeypatch.setattr(cluster, "hosts", none)
    monkeypatch.setattr(host_faults, "hosts", none)
    for more in ([], ["--only-faults"]):
        with pytest.raises(SystemExit, match="only root may make network namespaces"):
            main(["cluster", "--data", str(files), "--items", str(ITEMS), *more])


def test_too_few_files_are_an_error_before_any_run(files: Path) -> None:
    with pytest.raises(SystemExit, match=f"has {ITEMS} JPEG files; --items is 256"):
        main(["cluster", "--data", str(files)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "1"], "from 2 to 250"),
        (["--disks", "tape"], "there is no disk 'tape'"),
        (["--shares", "1.5"], "not a share"),
        (["--only-faults", "fire"], "there is no fault 'fire'"),
    ],
)
def test_wrong_options_are_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["cluster", "--data", ".", *words])
    assert message in capsys.readouterr().err


# Real hosts.


PATIENT = """
import penstock.cluster.divided_cache as divided_cache
import penstock.cluster.holdings as holdings
import penstock.cluster.membership as membership
import penstock.cluster.partition as partition

for name in ("FIRST_DELAY", "LEAST_DELAY", "MOST_DELAY"):
    setattr(partition, name, 60.0)
for module in (holdings, partition, divided_cache):
    module.PROMISE = 60.0
membership.LIMIT = 60.0
"""
"""Code for the processes of the hosts: on a busy machine none must count another as slow."""


@pytest.fixture
def small(files: Path) -> list[str]:
    """The smallest run, with a factor that makes disks and links no bottleneck."""
    pytest.importorskip("pyarrow.flight")
    with hosts(1):  # skips the test where hosts cannot be made
        pass
    words = ["cluster", "--data", str(files), "--items", str(ITEMS), "--size", str(SIZE)]
    return [*words, "--batch", str(BATCH), "--rounds", "1", "--hosts", "2", "--factor", "10"]


def test_two_hosts_read_each_sample_once_and_get_the_batches_of_the_loader_alone(
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PATIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kept = tmp_path / "found.json"
    more = ["--disks", "SSD", "--shares", "0.65", "--epochs", "2", "--json", str(kept)]
    ended = main([*small, *more])
    assert ended == 0, capsys.readouterr().out
    data = json.loads(kept.read_text())["data"]["cluster"]["2 hosts, SSD, 65 % each"]
    [one], [local] = data["cluster"], data["local"]
    assert (one["different"], local["different"]) == (0, 0)
    assert (one["reads"], one["hedged"], one["network_first"]) == (0.0, 0.0, 0)
    assert (one["total"], one["twice"]) == (ITEMS, 0)
    assert one["network"] > 0
    assert local["network"] == 0
    assert local["reads"] > 0


def test_a_node_that_is_killed_loses_no_sample(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "found.json"
    ended = main([*small, "--only-faults", "node,reset", "--json", str(kept)])
    assert ended == 0, capsys.readouterr().out
    found = json.loads(kept.read_text())["data"]["cluster, faults"]
    assert list(found) == ["none", "node", "reset"]
    for outcomes in found.values():
        [seen] = outcomes
        assert seen["verdict"] == {
            "samples": host_faults.EPOCHS * ITEMS,
            "lost": 0,
            "repeated": 0,
            "different": 0,
        }


def test_a_rank_that_fails_is_reported(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_run, "PORT", 1 << 20)
    assert main([*small, "--disks", "SSD", "--shares", "1", "--epochs", "1"]) == 1
    assert "rank" in capsys.readouterr().out
