"""Metrics for Prometheus: what its own parser reads, under the names that are documented."""

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
from penstock.watch import exporter
from penstock.watch.exposition import CONTENT_TYPE, METRICS, exposition
from penstock.watch.place import LivePlace
from tests.support import ROOT
from tests.watch.snapshots import FULL, STANDING, STATS, snapshot

parser = pytest.importorskip("prometheus_client.parser")

DOCS = ROOT / "docs" / "watch.md"


def samples(text: str) -> dict[str, list[Any]]:
    """What Prometheus' own parser makes of it, by name."""
    found: dict[str, list[Any]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_every_value_is_where_it_belongs() -> None:
    rank = replace(STANDING, rank=1, world=2, share="search-1")
    told = samples(exposition([snapshot(FULL), snapshot(number=1, standing=rank)]))
    (first, second) = told["penstock_samples_total"]
    assert (first.labels, first.value) == ({"loader": "0", "rank": "0"}, 1_000)
    assert second.labels == {"loader": "1", "rank": "1"}
    assert [s.value for s in told["penstock_wait_seconds_total"]] == [2.5, 2.5]
    assert {s.labels["stop"]: s.value for s in told["penstock_stop_seconds_total"]} == {
        "source": 3.0,
        "decode": 9.0,
    }
    assert {s.labels["state"]: s.value for s in told["penstock_queue_batches"]} == {
        "finished": 3,
        "unfinished": 1,
    }
    assert told["penstock_cache_hits_total"][0].labels == {
        "loader": "0",
        "rank": "0",
        "cache": "0",
    }
    assert [s.value for s in told["penstock_echo_factor"]] == [2.0]
    assert [s.value for s in told["penstock_bad_samples_total"]] == [2, 0]
    assert told["penstock_loader_info"][1].labels["share"] == "search-1"


def test_every_metric_is_served_by_its_name_and_type() -> None:
    text = exposition([snapshot(FULL)], pids=True)
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert len(families) == len(METRICS)
    for metric in METRICS:
        # The parser takes the ending of counters for granted.
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        for sample in family.samples:
            assert sample.name == metric.name
            assert set(sample.labels) == {"pid", "loader", "rank", *metric.labels}


def test_names_of_any_kind_are_quoted() -> None:
    name = 'a "quoted"\nname with \\ and é'
    one = snapshot(
        replace(STATS, stages=(StageStats(name, 1, 1.0), StageStats(name, 2, 2.0))),
        standing=replace(STANDING, name=name, batches=None),
    )
    told = samples(exposition([one]))
    assert told["penstock_loader_info"][0].labels["name"] == name
    assert [s.labels["stop"] for s in told["penstock_stop_samples_total"]] == [name, name + " 2"]
    assert "penstock_epoch_batches" not in told
    assert exposition([]) == ""


def test_the_documentation_lists_exactly_what_is_served() -> None:
    rows = re.findall(r"^\| `(penstock_\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    told = [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]
    assert told == [(metric.name, metric.kind, metric.labels) for metric in METRICS]


# Served by a loader.


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fetch(port: int) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return samples(answer.read().decode())


def numbers(**options: Any) -> Loader:
    return ps.from_dataset(np.arange(40.0)).cache("1MB").batch(4).loader(seed=0, **options)


@pytest.mark.parametrize("published", ["0", "1"])
def test_a_loader_serves_all_of_its_process(
    published: str, port: int, live: LivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIVE", published)
    with numbers(workers=2, metrics_port=port) as one, numbers(workers=0) as other:
        assert fetch(port) == {}
        for _ in range(2):
            assert len(list(one)) == 10
        next(iter(other))
        told = fetch(port)
        assert [s.value for s in told["penstock_samples_total"]] == [80, 4]
        assert told["penstock_epoch"][0].value == 2
        hits, misses = told["penstock_cache_hits_total"], told["penstock_cache_misses_total"]
        assert (hits[0].value, misses[0].value) == (40, 40)
        other.close()
        assert len(fetch(port)["penstock_samples_total"]) == 1
    with pytest.raises(OSError, match="refused"):
        fetch(port)


def test_a_port_is_served_until_its_last_loader_is_closed(port: int, live: LivePlace) -> None:
    one, other = (numbers(workers=0, metrics_port=port) for _ in range(2))
    one.close()
    assert fetch(port) == {}
    del other
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        fetch(port)
    with numbers(workers=0, metrics_port=port):  # and it can be had again
        assert fetch(port) == {}


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(live: LivePlace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"in use.*metrics_port={port} \\+ rank"):
            numbers(metrics_port=port)


@pytest.mark.parametrize("port", [0, -1, 65536, "9400", True, 1.5])
def test_a_port_that_is_none_is_refused(port: Any) -> None:
    with pytest.raises(PipelineError, match="metrics_port is"):
        numbers(metrics_port=port)


FORKING = """
import os, signal, sys
import penstock as ps

loader = ps.from_dataset(range(8)).batch(4).loader(workers=0, metrics_port=int(sys.argv[1]))
there, here = os.pipe()
child = os.fork()
if child == 0:
    os.write(here, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(there, 1)  # it is past what happens in a fork first
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_does_not_keep_the_port(port: int, live: LivePlace) -> None:
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


def test_a_loader_that_cannot_be_looked_at_is_left_out(
    port: int, live: LivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers(workers=0, metrics_port=port) as one, numbers(workers=0) as other:
        next(iter(one))
        next(iter(other))
        monkeypatch.setattr(other, "stats", lambda: 1 / 0)
        assert len(fetch(port)["penstock_samples_total"]) == 1
    assert exporter._exporters == {}
