"""Metrics for Prometheus, read back with its own parser and compared with the documentation."""

from __future__ import annotations

import gc
import re
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PipelineError
from penstock.loader import Loader
from penstock.stats import StageStats
from penstock.watch import metrics
from penstock.watch.cluster_metrics import CLUSTER_METRICS
from penstock.watch.live_directory import LiveDirectory
from penstock.watch.metrics import CONTENT_TYPE, METRICS, exposition
from tests.support import ROOT
from tests.support.clusters import cluster, machine, times
from tests.support.ports import free_port
from tests.support.snapshots import FULL, STANDING, STATS, snapshot

parser = pytest.importorskip("prometheus_client.parser")

DOCS = ROOT / "docs" / "watch.md"


def samples(text: str) -> dict[str, list[Any]]:
    """The samples that Prometheus' own parser reads, by metric name."""
    found: dict[str, list[Any]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_every_value_has_its_name_and_labels() -> None:
    rank = replace(STANDING, rank=1, world=2, share="search-1")
    found = samples(exposition([snapshot(FULL), snapshot(number=1, standing=rank)]))
    (first, second) = found["penstock_samples_total"]
    assert (first.labels, first.value) == ({"loader": "0", "rank": "0"}, 1_000)
    assert second.labels == {"loader": "1", "rank": "1"}
    assert [s.value for s in found["penstock_wait_seconds_total"]] == [2.5, 2.5]
    assert {s.labels["stop"]: s.value for s in found["penstock_stop_seconds_total"]} == {
        "source": 3.0,
        "decode": 9.0,
    }
    assert {s.labels["state"]: s.value for s in found["penstock_queue_batches"]} == {
        "finished": 3,
        "unfinished": 1,
    }
    assert found["penstock_cache_hits_total"][0].labels == {
        "loader": "0",
        "rank": "0",
        "cache": "0",
    }
    assert [s.value for s in found["penstock_echo_factor"]] == [2.0]
    assert {s.labels["machine"]: s.value for s in found["penstock_samples_elsewhere_total"]} == {
        "helper-1": 300,
        "helper-2": 100,
    }
    assert [s.value for s in found["penstock_device_samples_total"]] == [250.0]
    assert [s.value for s in found["penstock_device_threshold"]] == [-2.0]
    assert [s.value for s in found["penstock_bad_samples_total"]] == [2, 0]
    assert found["penstock_loader_info"][1].labels["share"] == "search-1"


def test_every_metric_is_served_by_its_name_and_type() -> None:
    text = exposition([snapshot(FULL)], pids=True)
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert len(families) == len(METRICS)
    for metric in METRICS:
        # The parser removes the ending of counters.
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        for sample in family.samples:
            assert sample.name == metric.name
            assert set(sample.labels) == {"pid", "loader", "rank", *metric.labels}


def test_special_characters_in_names_are_quoted() -> None:
    name = 'a "quoted"\nname with \\ and é'
    one = snapshot(
        replace(STATS, stages=(StageStats(name, 1, 1.0), StageStats(name, 2, 2.0))),
        standing=replace(STANDING, name=name, batches=None),
    )
    found = samples(exposition([one]))
    assert found["penstock_loader_info"][0].labels["name"] == name
    assert [s.labels["stop"] for s in found["penstock_stop_samples_total"]] == [name, name + " 2"]
    assert "penstock_epoch_batches" not in found
    assert exposition([]) == ""


def test_the_documentation_lists_exactly_what_is_served() -> None:
    rows = re.findall(r"^\| `(penstock_\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    ]
    served = [(metric.name, metric.kind, metric.labels) for metric in METRICS]
    served += [(metric.name, metric.kind, metric.labels) for metric in CLUSTER_METRICS]
    assert documented == served


def test_the_machines_of_a_cluster_are_served() -> None:
    status = cluster(
        machine("b", sent=7, received=8, failed=1, hedged_requests=2, times=times(ms2=3, ms100=1)),
        machine("c", state="gone", report=None),
    )
    text = exposition([], cluster=status)
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert len(families) == len(CLUSTER_METRICS)
    for metric in CLUSTER_METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    found = samples(text)
    assert {s.labels["state"]: s.value for s in found["penstock_cluster_machines"]} == {
        "alive": 2,
        "suspected": 0,
        "gone": 1,
    }
    # This machine sends nothing to itself.
    assert [(s.labels["machine"], s.value) for s in found["penstock_cluster_sent_bytes_total"]] == [
        ("b", 7),
        ("c", 0),
    ]
    buckets = {
        s.labels["le"]: s.value
        for s in found["penstock_cluster_request_seconds_bucket"]
        if s.labels["machine"] == "b"
    }
    assert (buckets["0.001"], buckets["0.002"], buckets["0.1"], buckets["+Inf"]) == (0, 3, 4, 4)
    assert found["penstock_cluster_request_seconds_count"][0].value == 4
    places = found["penstock_cluster_found_samples_total"][:3]
    assert [(s.labels["place"], s.value) for s in places] == [
        ("here", 10),
        ("elsewhere", 20),
        ("storage", 5),
    ]


# Served by a loader.


@pytest.fixture
def port() -> int:
    # Loaders of other tests that are garbage, in cycles with exceptions, are still served.
    gc.collect()
    return free_port()


def fetch(port: int) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return samples(answer.read().decode())


def numbers(**options: Any) -> Loader:
    return ps.from_dataset(np.arange(40.0)).cache("1MB").batch(4).loader(seed=0, **options)


@pytest.mark.parametrize("published", ["0", "1"])
def test_a_metrics_port_serves_all_loaders_of_the_process(
    published: str, port: int, live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIVE", published)
    with numbers(workers=2, metrics_port=port) as one, numbers(workers=0) as other:
        assert fetch(port) == {}
        for _ in range(2):
            assert len(list(one)) == 10
        next(iter(other))
        found = fetch(port)
        assert [s.value for s in found["penstock_samples_total"]] == [80, 4]
        assert found["penstock_epoch"][0].value == 2
        hits, misses = found["penstock_cache_hits_total"], found["penstock_cache_misses_total"]
        assert (hits[0].value, misses[0].value) == (40, 40)
        other.close()
        assert len(fetch(port)["penstock_samples_total"]) == 1
    with pytest.raises(OSError, match="refused"):
        fetch(port)


def test_a_port_is_served_until_its_last_loader_is_closed(port: int, live: LiveDirectory) -> None:
    one, other = (numbers(workers=0, metrics_port=port) for _ in range(2))
    one.close()
    assert fetch(port) == {}
    del other
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        fetch(port)
    with numbers(workers=0, metrics_port=port):  # the port is free again
        assert fetch(port) == {}


def test_a_taken_port_is_an_error_that_says_what_to_do(live: LiveDirectory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"in use.*metrics_port={port} \\+ rank"):
            numbers(metrics_port=port)


@pytest.mark.parametrize("port", [0, -1, 65536, "9400", True, 1.5])
def test_an_invalid_port_is_refused(port: Any) -> None:
    with pytest.raises(PipelineError, match="metrics_port is"):
        numbers(metrics_port=port)


FORKING = """
import os, signal, sys
import penstock as ps

loader = ps.from_dataset(range(8)).batch(4).loader(workers=0, metrics_port=int(sys.argv[1]))
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(reading, 1)  # the child has run its after-fork functions
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_does_not_keep_the_port(port: int, live: LiveDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        parent.wait()
        with pytest.raises(OSError, match="refused"):
            fetch(port)
        with numbers(workers=0, metrics_port=port):
            assert fetch(port) == {}


def test_a_loader_whose_statistics_fail_is_left_out(
    port: int, live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers(workers=0, metrics_port=port) as one, numbers(workers=0) as other:
        next(iter(one))
        next(iter(other))
        monkeypatch.setattr(other, "stats", lambda: 1 / 0)
        assert len(fetch(port)["penstock_samples_total"]) == 1
    assert metrics._exporters == {}
