"""Two nodes in this process with jobs of one group: who prepares and who receives which batch."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cluster import membership, service, spanning
from penstock.cluster.secrets import make_secrets
from penstock.cluster.spanning import PeerLink, Spanning
from penstock.errors import ClusterError
from penstock.node import span, state
from penstock.node.directory import NodeDirectory
from penstock.node.group import Group
from penstock.node.service import Service
from tests.support.ports import free_port

SAMPLES, BATCH = 52, 8
LENGTH = -(-SAMPLES // BATCH)
LIMIT = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TwoNodes:
    """Two nodes in threads, each with its own directory, in one cluster."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self._patch = monkeypatch
        make_secrets(place / "secret")
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[Service] = []
        self._loaders: list[Any] = []
        self._claims: list[int] = []
        self._threads: list[threading.Thread] = []
        self.prepared: Counter[tuple[str, int, int]] = Counter()
        """By part, epoch and number: how often a batch was prepared on any node."""
        for number in range(2):
            directory = NodeDirectory(place / f"node-{number}")
            directory.create()
            claim = directory.claim()
            assert claim is not None
            node = Service(directory, workers=2, staging=1 << 26, idle=LIMIT)
            node.listen()
            self._claims.append(claim)
            self.nodes.append(node)
            self._threads.append(threading.Thread(target=node.run))
            self._threads[-1].start()

    def loader(self, number: int, pipeline: ps.Pipeline, **options: Any) -> Any:
        """A loader on one of the nodes that has taken its first batch, and that batch."""
        self._patch.setenv("PENSTOCK_RUNTIME_DIR", str(self.place / f"node-{number}"))
        self._patch.setenv("PENSTOCK_CLUSTER", self.address)
        own = self.address if number == 0 else "127.0.0.1:0"
        self._patch.setenv("PENSTOCK_CLUSTER_ADDRESS", own)
        self._patch.setenv("PENSTOCK_CLUSTER_SECRET", str(self.place / "secret"))
        options = {"seed": 4, "share": "search", "cluster": "auto", **options}
        loader = pipeline.loader(**options)
        self._loaders.append(loader)
        batches = iter(loader)
        return loader, batches, next(batches)

    def group(self, number: int) -> Group:
        [group] = self.nodes[number].groups.values()
        return group

    def spans(self) -> list[dict[str, Any]]:
        found = []
        for number in range(2):
            group = self.group(number)
            assert group.span is not None
            with group.lock:
                found.append(group.span.status())
        return found

    def met(self) -> bool:
        return all(len(found["machines"]) == 2 for found in self.spans())

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()
        for node, thread, claim in zip(self.nodes, self._threads, self._claims, strict=True):
            node._ending = True
            thread.join()
            os.close(claim)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    # On a busy machine everything may take seconds; that must not change who prepares what.
    for name in ("FIRST_DELAY", "LEAST_DELAY", "MOST_DELAY"):
        monkeypatch.setattr(spanning, name, 10 * LIMIT)
    for name in ("CALL", "TRANSFER"):
        monkeypatch.setattr(service, name, LIMIT)
    monkeypatch.setattr(spanning, "MEASURED", 1 << 60)
    monkeypatch.setattr(membership, "LIMIT", LIMIT)
    monkeypatch.setattr(span, "WAIT", LIMIT)
    # A node that has not heard of the other's position keeps what the other will ask for.
    monkeypatch.setattr(state, "GATHER", 10 * LIMIT)

    def judge(self: Spanning, machine: str, peer: PeerLink, now: float) -> None:
        peer.trust()

    monkeypatch.setattr(Spanning, "_judge", judge)
    place = Path(f"/tmp/penstock-test-{os.getpid()}-span")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        made = TwoNodes(place, monkeypatch)
    except ClusterError as error:
        shutil.rmtree(place)
        pytest.skip(str(error))
    counting, lock = Spanning.prepared, threading.Lock()

    def prepared(self: Spanning, name: Any, *measured: Any) -> bool:
        with lock:
            made.prepared[name[:3]] += 1
        return counting(self, name, *measured)

    monkeypatch.setattr(Spanning, "prepared", prepared)
    yield made
    made.close()
    shutil.rmtree(place, ignore_errors=True)


def plain(batch: Any) -> Any:
    """A batch as lists, with the types of its arrays."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return [plain(value) for value in batch]
    return (str(batch.dtype), batch.tolist()) if isinstance(batch, np.ndarray) else batch


class Rows:
    """Samples with two arrays and a text."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 2), index, np.float32), {"name": f"n{index}", "odd": index % 2 == 1}


def stacked(samples: Any) -> Any:
    return {"first": np.array([pixels[0, 0] for pixels, _ in samples]), "count": len(samples)}


Named = namedtuple("Named", "pixels number")


def named(sample: Any) -> Any:
    pixels, other = sample
    return Named(pixels, other["odd"])


def run(nodes: TwoNodes, pipelines: list[ps.Pipeline], epochs: int, **options: Any) -> list[Any]:
    """The batches of a job on each node. They meet after the first batch of the first epoch."""
    started = [nodes.loader(n, pipeline, **options) for n, pipeline in enumerate(pipelines)]
    wait_until(nodes.met)
    found: list[Any] = [None, None]

    def take(number: int) -> None:
        loader, batches, first = started[number]
        taken = [plain(first), *(plain(batch) for batch in batches)]
        for _ in range(epochs - 1):
            taken += [plain(batch) for batch in loader]
        found[number] = taken

    threads = [threading.Thread(target=take, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def alone(pipeline: ps.Pipeline, epochs: int) -> list[Any]:
    with pipeline.loader(seed=4, workers=0) as loader:
        return [plain(batch) for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("kind", ["rows", "collated"])
def test_each_batch_is_prepared_once_on_two_nodes_and_equals_that_of_a_loader_alone(
    nodes: TwoNodes, kind: str
) -> None:
    data = ps.from_dataset(Rows(), version="1")
    pipeline = data.batch(BATCH) if kind == "rows" else data.batch(BATCH, collate=stacked)
    expected = alone(pipeline, 3)
    assert run(nodes, [pipeline, pipeline], 3) == [expected, expected]
    # Jobs want up to eight batches ahead, so each node may have prepared the first ones of the
    # second epoch before the nodes met.
    later = {name: count for name, count in nodes.prepared.items() if name[1] == 2}
    assert len(later) == LENGTH
    assert set(later.values()) == {1}
    # The last ones, which belong to an epoch that nobody takes, may still be on their way.
    wait_until(lambda: _sent(nodes) == _received(nodes))
    assert min(_received(nodes)) > 0
    assert [found["again"] for found in nodes.spans()] == [0, 0]


def _sent(nodes: TwoNodes) -> list[int]:
    return [found["sent"] for found in nodes.spans()]


def _received(nodes: TwoNodes) -> list[int]:
    """What each node has received of the other, in the order of ``_sent``."""
    return [found["received"] for found in reversed(nodes.spans())]


def test_batches_that_need_a_pickle_are_prepared_on_each_node_with_one_warning(
    nodes: TwoNodes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.node")
    pipeline = ps.from_dataset(Rows(), version="1").map(named, random=False).batch(BATCH)
    expected = alone(pipeline, 2)
    assert run(nodes, [pipeline, pipeline], 2) == [expected, expected]
    assert [found["received"] for found in nodes.spans()] == [0, 0]
    assert not any(found["sendable"] for found in nodes.spans())
    warnings = [one for one in caplog.records if "not plain data" in one.getMessage()]
    assert len(warnings) == 2  # one for each node


def test_a_group_of_the_same_name_with_another_pipeline_stays_separate(nodes: TwoNodes) -> None:
    pipelines = [ps.from_dataset(np.arange(SAMPLES) + n).batch(BATCH) for n in range(2)]
    started = [nodes.loader(n, pipeline) for n, pipeline in enumerate(pipelines)]
    wait_until(lambda: all(len(found["separate"]) == 1 for found in nodes.spans()))
    assert [len(found["machines"]) for found in nodes.spans()] == [1, 1]
    for number, (_, batches, first) in enumerate(started):
        assert [plain(first), *map(plain, batches)] == alone(pipelines[number], 1)
    assert [found["received"] for found in nodes.spans()] == [0, 0]


def test_a_batch_size_that_divides_that_of_the_other_node_uses_its_batches(nodes: TwoNodes) -> None:
    data = ps.from_dataset(Rows(), version="1")
    large, small = data.batch(2 * BATCH), data.batch(BATCH)
    # The second node must know of the group on the first when its job joins.
    nodes.loader(1, small, share="other")
    nodes.loader(0, large)
    wait_until(lambda: _knows(nodes, 1, "search"))
    _, batches, first = nodes.loader(1, small)
    assert nodes.nodes[1].groups["search"].unit == 2 * BATCH
    taken = [plain(first), *(plain(batch) for batch in batches)]
    assert taken == alone(small, 1)


def test_a_job_that_joins_late_begins_where_those_of_the_other_node_are_and_misses_nothing(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "GATHER", 0.0)  # batches are not kept for jobs that may join
    pipeline = ps.from_dataset(Rows(), version="1").batch(BATCH)
    expected = alone(pipeline, 2)
    epochs = expected[:LENGTH], expected[LENGTH:]
    nodes.loader(1, pipeline, share="other")
    loader, batches, first = nodes.loader(0, pipeline)
    taken = [plain(first), *(plain(next(batches)) for _ in range(3))]
    wait_until(lambda: _reached(nodes) >= 2)
    wait_until(lambda: _knows(nodes, 1, "search"))
    reached = _reached(nodes)
    late, late_batches, late_first = nodes.loader(1, pipeline)
    found = [plain(late_first), *(plain(batch) for batch in late_batches)]
    at = epochs[0].index(found[0])
    # Meanwhile the first node may have dropped another batch.
    assert at >= reached
    assert found == epochs[0][at:] + epochs[0][:at]
    assert taken + [plain(batch) for batch in batches] == epochs[0]
    # The next epoch: every batch once, wherever it begins.
    again = [plain(batch) for batch in late]
    assert sorted(map(str, again)) == sorted(map(str, epochs[1]))
    assert sorted(str(plain(batch)) for batch in loader) == sorted(map(str, epochs[1]))


def _reached(nodes: TwoNodes) -> int:
    """The first batch of the first epoch that the first node still keeps."""
    group = nodes.nodes[0].groups["search"]
    with group.lock:
        [part] = {member.part for member in group.state.members.values()}
        return group.state.reached(part, 0)


def _knows(nodes: TwoNodes, number: int, name: str) -> bool:
    cluster, other = nodes.nodes[number].cluster, nodes.nodes[1 - number].groups.get(name)
    if cluster is None or other is None or other.span is None:
        return False
    return cluster.unit_of(other.span.name, other.span.content) is not None
