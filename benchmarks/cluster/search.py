"""A search on two hosts (``share=`` with ``cluster=``), compared with one preparation per host.

Hosts are network namespaces on this machine, with one worker each and one job each. Photographs are
decoded, cropped and flipped. The link is limited; the hosts measure it, and choose whether a batch
is sent or prepared on both.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.work import SEED, jpeg_files
from benchmarks.harness.alone import ROOT
from benchmarks.harness.hosts import Host, hosts
from benchmarks.harness.measure import Spread, progress, turns
from benchmarks.harness.processes import POLL_INTERVAL, die_with_parent, end_node, wait_until
from benchmarks.harness.report import Result, Table

PORT = 7411
LINKS = (0.1, 2.5)
"""Gb/s of the links."""

SIDE, BATCH = 224, 32
PATIENCE = 180.0


@dataclass(frozen=True)
class SearchOutcome:
    """``rate``: batches per second of a job, the mean of both. ``prepared`` and ``received``: of
    both nodes while they were measured. ``choice``: what the first node decided for the link."""

    rate: float
    prepared: int
    received: int
    again: int
    choice: str
    different: int


def pipeline(data: str, items: int) -> Any:
    import penstock as ps

    files = jpeg_files(data)[:items]
    made = ps.from_files(files, list(range(len(files)))).map(ps.image.decode())
    made = made.map(ps.image.random_resized_crop(SIDE)).map(ps.image.random_flip())
    return made.batch(BATCH, drop_last=True)


def digest_of(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for column in batch:
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def search(options: Namespace) -> Result:
    """The table: one row for each link."""
    settings = [(link, spans) for link in LINKS for spans in (False, True)]
    outcomes: dict[tuple[float, bool], list[SearchOutcome]] = {one: [] for one in settings}
    with pipeline(str(options.data), options.items).loader(seed=SEED, workers=1) as alone:
        expected = [digest_of(batch) for _ in range(1 + options.epochs) for batch in alone]
    for number, order in turns(len(settings), options.rounds):
        for link, spans in (settings[place] for place in order):
            kind = "share= and cluster=" if spans else "share= on each host"
            progress(f"search: round {number + 1} of {options.rounds}: {link} Gb/s, {kind}")
            with hosts(2) as machines:
                outcome = measure(machines, link, spans, options, expected)
            outcomes[link, spans].append(outcome)
            progress(f"  {outcome}")
    return make_result(outcomes, options)


def measure(
    machines: Sequence[Host], link: float, spans: bool, options: Namespace, expected: list[str]
) -> SearchOutcome:
    from penstock.cluster.secrets import make_secrets

    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="search-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        make_secrets(place / "secrets")
        try:
            for number, host in enumerate(machines):
                host.limit(f"{1e9 * link:.0f}bit")
                processes.append(start(host, number, machines, place, spans, options))
            reports = [place / f"report-{number}" for number in range(2)]

            def check() -> None:
                for process in processes:
                    if process.poll():
                        raise SystemExit(f"search: a job ended with {process.returncode}")

            wait_until(
                lambda: all(path.exists() for path in reports),
                check,
                PATIENCE,
                "the jobs of the search did not end",
            )
            found = [json.loads(path.read_text()) for path in reports]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for number in range(2):
                end_node(place / f"node-{number}")
    spans_of = [one["span"] or {} for one in found]
    links = [one for span in spans_of for one in span.get("links", {}).values()]
    return SearchOutcome(
        rate=float(np.mean([one["rate"] for one in found])),
        prepared=sum(one["prepared"] for one in found),
        received=sum(span.get("received", 0) for span in spans_of),
        again=sum(span.get("again", 0) + span.get("local", 0) for span in spans_of),
        choice=", ".join(sorted({one["trouble"] or "received" for one in links})) or "prepared",
        different=sum(one["digests"] != expected for one in found),
    )


def start(
    host: Host,
    number: int,
    machines: Sequence[Host],
    place: Path,
    spans: bool,
    options: Namespace,
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PENSTOCK_RUNTIME_DIR": str(place / f"node-{number}"),
        "PENSTOCK_CLUSTER": f"{machines[0].address}:{PORT}",
        "PENSTOCK_CLUSTER_ADDRESS": f"{host.address}:{PORT}",
        "PENSTOCK_CLUSTER_SECRET": str(place / "secrets"),
        "PENSTOCK_NODE_WORKERS": "1",
        "PENSTOCK_NODE_IDLE": "2",
    }
    words = [sys.executable, "-m", "benchmarks.cluster.search", str(options.data)]
    words += [str(options.items), str(options.epochs), str(number), str(place), str(int(spans))]
    return host.start(*words, cwd=ROOT, env=environment, start_new_session=True)


def make_result(
    outcomes: dict[tuple[float, bool], list[SearchOutcome]], options: Namespace
) -> Result:
    rows, wrong = [], []
    for link in LINKS:
        local, one = outcomes[link, False], outcomes[link, True]
        ratio = Spread.of([a.rate / b.rate for a, b in zip(one, local, strict=True)]).median
        wrong += [
            f"search: {link} Gb/s: batches differ from those of a loader alone"
            for outcome in (*local, *one)
            if outcome.different
        ]
        rows.append(
            (
                f"{link:g} Gb/s",
                f"{Spread.of([run.rate for run in local]).median:.1f}",
                f"{Spread.of([run.rate for run in one]).median:.1f}",
                f"{ratio:.2f}",
                f"{local[-1].prepared}",
                f"{one[-1].prepared} / {one[-1].received} / {one[-1].again}",
                one[-1].choice,
            )
        )
    title = (
        f"cluster: a search on 2 hosts with one worker each: batches of {BATCH} photographs of "
        f"{SIDE} x {SIDE}, {3 * BATCH * SIDE * SIDE / 1e6:.1f} MB"
    )
    heads = (
        "link",
        "batches/s a job, share= on each host",
        "batches/s a job, share= and cluster=",
        "ratio",
        "prepared, share= on each host",
        "prepared / received / prepared although of the other, share= and cluster=",
        "choice at the end",
    )
    data = {
        f"{link:g} Gb/s, {'spanning' if spans else 'local'}": [asdict(run) for run in runs]
        for (link, spans), runs in outcomes.items()
    }
    return Result((Table(title, heads, tuple(rows)),), (), tuple(wrong), {"search": data})


def job(data: str, items: int, epochs: int, number: int, place: Path, spans: bool) -> None:
    """One job: an epoch to warm up, then the measured ones."""
    from penstock.node.client import request_status

    def group() -> dict[str, Any]:
        status = request_status()
        return {} if status is None or not status["groups"] else status["groups"][0]

    def meet(what: str) -> None:
        (place / f"{what}-{number}").touch()
        while not (place / f"{what}-{1 - number}").exists():
            time.sleep(POLL_INTERVAL)

    cluster = {"cluster": "auto"} if spans else {}
    digests = []
    with pipeline(data, items).loader(seed=SEED, share="search", **cluster) as loader:
        digests += [digest_of(batch) for batch in loader]
        while spans and len((group().get("span") or {}).get("machines", [])) < 2:
            time.sleep(POLL_INTERVAL)
        meet("warm")
        before, began = group()["prepared"], time.monotonic()
        warm = len(digests)
        for _ in range(epochs):
            digests += [digest_of(batch) for batch in loader]
        rate = (len(digests) - warm) / (time.monotonic() - began)
        found = group()
        meet("measured")
    report = {"rate": rate, "prepared": found["prepared"] - before}
    report |= {"span": found.get("span"), "digests": digests}
    partial = place / f"partial-{number}"
    partial.write_text(json.dumps(report))
    partial.rename(place / f"report-{number}")


if __name__ == "__main__":
    die_with_parent()
    items, epochs, number = (int(word) for word in sys.argv[2:5])
    job(sys.argv[1], items, epochs, number, Path(sys.argv[5]), sys.argv[6] == "1")
