"""Predictions for several machines and remote cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import cli
from penstock.commands import what_if as command
from penstock.diagnose.analyze.model import Change, predict
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.what_if import Prices
from tests.support.reports import bound_by, report

WHOLE = 50_000 * 110_000
NOISE = 0.98
"""Runs are simulated sample by sample, so equal ones differ by up to a hundredth or two."""


def test_machines_that_share_read_less_from_storage() -> None:
    one = predict(report(), Change(cache=WHOLE // 4))
    four = predict(report(), Change(cache=WHOLE // 4, machines=4))
    assert (one.bound, four.bound) == ("fetch", "prep")
    assert four.fetch_stall < 0.02
    assert four.speed == pytest.approx(predict(report(), Change(cache=WHOLE)).speed, rel=0.01)
    assert four.all_machines == 4 * four.speed
    # Each machine has a quarter of the samples.
    assert four.epoch == pytest.approx(50_000 / 4 / four.speed)


def test_the_link_carries_what_other_machines_hold() -> None:
    # Of two machines' samples half cross the network: 55,000 bytes of each.
    made = report(compute=1 / 500, storage=10e6)
    slow = predict(made, Change(cache=WHOLE // 2, machines=2, network=20e6))
    assert slow.bound == "network"
    assert slow.speed == pytest.approx(20e6 / 55_000, rel=0.01)
    fast = predict(made, Change(cache=WHOLE // 2, machines=2, network=100e6))
    assert (fast.bound, fast.network) == ("compute", 0.0)


def test_a_machine_with_room_left_keeps_copies_of_what_crosses_the_link() -> None:
    made = report(compute=1 / 500, storage=1e6)
    # With room for four fifths of the data, a fifth of the samples of two machines cross.
    some = predict(made, Change(cache=WHOLE * 4 // 5, machines=2, network=5e6))
    assert some.speed == pytest.approx(5e6 / (0.2 * 110_000), rel=0.01)
    whole = predict(made, Change(cache=WHOLE, machines=2, network=1e3))
    assert (whole.bound, whole.network, whole.sharing) == ("compute", 0.0, 2)


def test_a_slow_network_makes_groups_or_none() -> None:
    few = Change(cache=WHOLE // 8, machines=8, network=60e6)
    assert 1 < predict(report(), few).sharing < 8
    none = Change(cache=WHOLE // 2, machines=8, network=1e3)
    found = predict(report(), none)
    assert found.sharing == 1
    assert found.speed == predict(report(), Change(cache=WHOLE // 2)).speed


def test_a_storage_of_all_machines_is_divided_between_them() -> None:
    own = predict(report(), Change(machines=4))
    shared = predict(report(), Change(machines=4, shared_storage=True))
    assert own.speed == predict(report()).speed
    assert shared.all_machines == pytest.approx(predict(report()).speed, rel=0.02)


def test_remote_cores_prepare_what_their_rows_and_the_link_allow() -> None:
    slow = report(prep=3.8 / 850, storage=100e9, latency=0.0)
    alone = predict(slow)
    helped = predict(slow, Change(remote_cores=4, network=10e9))
    assert helped.speed == pytest.approx(2 * alone.speed, rel=0.07)
    assert helped.remote_share == pytest.approx(0.5, abs=0.07)
    # A prepared sample has 602,112 bytes.
    thin = predict(slow, Change(remote_cores=64, network=602_112 * 100.0))
    assert thin.speed == pytest.approx(alone.speed + 100, rel=0.03)


CHANGES = st.builds(
    Change,
    cache=st.integers(0, WHOLE),
    machines=st.integers(1, 12),
    network=st.floats(1e5, 1e10),
    remote_cores=st.integers(0, 64),
)
REPORTS = st.sampled_from([report(), *map(bound_by, ("prep", "compute"))])


@settings(max_examples=25, deadline=None)
@given(REPORTS, CHANGES, st.integers(1, 8), st.floats(1.0, 10.0), st.integers(0, 32))
def test_more_machines_network_or_cores_never_slow_a_machine_down(
    made: AnalysisReport, change: Change, machines: int, faster: float, cores: int
) -> None:
    speed = predict(made, change).speed
    assert change.network is not None
    for more in (
        replace(change, machines=change.machines + machines),
        replace(change, network=change.network * faster),
        replace(change, remote_cores=change.remote_cores + cores),
    ):
        assert predict(made, more).speed >= NOISE * speed


@settings(max_examples=25, deadline=None)
@given(REPORTS, CHANGES, st.booleans())
def test_no_prediction_exceeds_the_accelerator_and_parts_add_up(
    made: AnalysisReport, change: Change, shared: bool
) -> None:
    found = predict(made, replace(change, shared_storage=shared))
    assert found.speed <= found.ingestion * 1.001
    for part in (found.compute, found.prep, found.fetch, found.network):
        assert part >= -1e-9
    assert found.epoch == pytest.approx(made.setup.samples / change.machines / found.speed)
    assert 1 <= found.sharing <= change.machines


@settings(max_examples=10, deadline=None)
@given(st.integers(0, WHOLE), st.integers(1, 8), st.integers(1, 8))
def test_machines_on_one_storage_are_together_never_slower(
    cache: int, machines: int, more: int
) -> None:
    def speed(count: int) -> float:
        return predict(
            report(), Change(cache=cache, machines=count, shared_storage=True)
        ).all_machines

    assert speed(machines + more) >= NOISE * speed(machines)


# Hosts in network namespaces with slow disks and links, of the benchmark `cluster`: hosts, bytes
# per second of a disk, the cache of a host as a share of the data, and the samples per second that
# were measured. docs/benchmarks.md has them.
MEASURED = [
    (2, 0.5e6, 0.25, 21),
    (2, 0.5e6, 0.50, 309),
    (2, 5.3e6, 0.25, 214),
    (2, 5.3e6, 0.65, 312),
    (4, 0.5e6, 0.25, 620),
    (4, 5.3e6, 0.25, 614),
]


@pytest.mark.parametrize(("hosts", "disk", "share", "measured"), MEASURED)
def test_predictions_agree_with_measured_hosts(
    hosts: int, disk: float, share: float, measured: float
) -> None:
    size = 98_304
    one = report(
        loader="penstock.Loader",
        samples=256,
        batch=8,
        workers=2,
        cores=2,
        kind="node",
        ahead=4,
        piece=8,
        sample_bytes=float(size),
        compute=size / 16e6,
        prep=1e-4,
        scaling={1: 1.0, 2: 2.0},
        storage=disk,
        latency=size / disk,
    )
    change = Change(machines=hosts, network=50e6, cache=int(share * 256 * size))
    assert predict(one, change).all_machines == pytest.approx(measured, rel=0.07)


def test_prices_are_those_of_all_machines() -> None:
    made = report()
    found = predict(made, Change(machines=4))
    prices = Prices(machine=1.0, core=0.1)
    each = prices.epoch(made, Change(), found)
    assert prices.epoch(made, Change(machines=4), found) == pytest.approx(4 * each)


# The command.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    replace(report(), phases=()).save(path)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [("10Gb/s", 1.25e9), ("100Mbit/s", 12.5e6), ("25Gbps", 3.125e9), ("1.2GB/s", 1.2e9)],
)
def test_networks_are_given_in_bits_or_bytes(text: str, found: float) -> None:
    assert command.read_values(text, "--network", command.NETWORK) == pytest.approx((found,))


def test_several_machines_are_a_table_with_the_sum(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machines", "1,2,4", "--network", "10Gb/s", "--cache", "2GB"]
    assert cli.main(["what-if", str(saved), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cache 2.0 GB, network 10 Gb/s"
    assert "all machines" in lines[1]
    found = predict(report(), Change(cache=2 * 10**9, machines=4, network=1.25e9))
    assert lines[4].split()[:3] == ["4", f"{found.speed:,.0f}", f"{found.all_machines:,.0f}"]
    assert lines[-1].startswith("Sharing caches and remote cores need Penstock's loader")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "10Gb/s"], "there is only one machine. Give --machines or --remote-cores"),
        (["--shared-storage"], "there is only one machine. Give --machines"),
        (["--machines", "2", "--network", "fast"], "--network is 'fast'; give bits or bytes"),
        (["--remote-cores=-1"], "--remote-cores is '-1'; give at least 0"),
        (["--machines", "0"], "--machines is '0'; give at least 1"),
    ],
)
def test_wrong_machines_are_refused(
    saved: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["what-if", str(saved), *words]) == 1
    assert message in capsys.readouterr().err
