"""The pool with workers of other machines: its batches have the same bits, whatever they do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cluster import lending, remote_pool
from penstock.cluster.lending import Lender
from penstock.cluster.protocol import RemoteTask, decode, encode, integers
from penstock.cluster.remote_pool import RemotePool, describe
from penstock.cluster.transport import (
    PeerDeadly,
    PeerFailed,
    PeerFault,
    PeerLacks,
    PeerLost,
    PeerNonsense,
    PeerSlow,
    RemoteRows,
)
from penstock.engine.build import Assembly, Recipe
from penstock.engine.keepers import Keepers
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.runner import Runner, Work, WorkerInfo
from penstock.errors import ClusterError
from penstock.keyed import Keys
from penstock.options import Options
from penstock.order.plan import BatchKeys
from penstock.pipeline import Pipeline
from penstock.stops.batch import stack
from tests.support.contract import noise, plain

LIMIT = 120.0
"""Seconds after which a test gives up. Nothing here takes more than a moment on an idle machine."""


def slowly(value: Any) -> Any:
    time.sleep(2e-3)
    return value


class Published:
    """A recipe that every machine has."""

    def __init__(self) -> None:
        self.withdrawn = 0
        self.ways = 1

    def publish(self) -> str:
        if not self.ways:
            raise ClusterError("the directory cannot be written")
        return "a.b"

    def missing(self) -> bool:
        return False

    def withdraw(self) -> None:
        self.withdrawn += 1


class Helper:
    """A machine that prepares rows in the calling thread, as its node would.

    ``spoil``: called with each answer that is no rehearsal; it may change or delay it, or raise.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self.machines = [Lender("helper", 1, 2)]
        self.calls: Counter[str] = Counter()
        self.spoil: Callable[[RemoteRows], RemoteRows] = lambda rows: rows

    def lenders(self) -> list[Lender]:
        return self.machines

    def ask_rows(self, machine: str, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        task = decode(encode(task), RemoteTask)
        replicas = None if task.replicas is None else integers(task.replicas).tolist()
        keys = Keys(task.epoch, integers(task.indices).tolist(), replicas)
        with self._lock:
            rows = self._prepare(keys)
            self.calls[machine] += 1
            rehearsal = self.calls[machine] == 1
        yield rows if rehearsal else self.spoil(rows)

    def _prepare(self, keys: Keys) -> RemoteRows:
        runner = Runner(self._work, WorkerInfo(0, 1, 5, process=False))
        layout, _ = runner.probe(keys)
        assert layout is not None
        columns = layout.new_columns(len(keys))
        report = runner.rows(keys, columns, layout, 0)
        objects = {str(number): values for number, values in report.objects.items()}
        facts = {"layout": describe(layout), "busy": report.busy, "idle": 2.0}
        facts |= {"tally": report.tally, "objects": objects}
        leaves = [column.reshape(-1).view("u1").data for column in columns if column is not None]
        return RemoteRows(0, len(keys), leaves, facts)


SAMPLES = 96


def batches_of(epoch: int) -> list[BatchKeys]:
    order = np.random.default_rng(epoch).permutation(SAMPLES)
    return [BatchKeys(epoch, number, order[8 * number :][:8], None) for number in range(12)]


def number_pairs() -> Pipeline:
    pairs = [(np.full((2, 3), i, dtype=np.float32), i) for i in range(SAMPLES)]
    return ps.from_dataset(pairs).map(slowly, on=0, random=False).map(noise, on=0).batch(8)


def named_numbers() -> Pipeline:
    rows = [{"x": float(i), "name": f"n{i}", "raw": bytes([i])} for i in range(SAMPLES)]
    return ps.from_dataset(rows).map(slowly, on="x", random=False).map(noise, on="x").batch(8)


def alone(pipeline: Pipeline) -> list[list[Any]]:
    """Three epochs of the same batches, prepared without other machines."""
    if id(pipeline) not in _alone:
        assembly = Assembly(Recipe(pipeline, Options(seed=5), stack), Choice("none", 0, "a test"))
        engine = assembly.engine()
        epochs = []
        for epoch in range(3):
            engine.start(iter(batches_of(epoch)))
            epochs.append([plain(ready.value) for ready in iter(engine.next, None)])
        engine.close()
        _alone[id(pipeline)] = (pipeline, epochs)
    return _alone[id(pipeline)][1]


_alone: dict[int, tuple[Pipeline, list[list[Any]]]] = {}


class Helped:
    """An engine whose pool has one worker here and those of ``helper``."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lending, "NEEDED", 0.0)
        monkeypatch.setattr(lending, "FIRST_PAUSE", 0.01)
        monkeypatch.setattr(lending, "PAYS", 0.0)
        monkeypatch.setattr(remote_pool, "LOOK", 0.01)
        recipe = Recipe(pipeline, Options(seed=5), stack)
        assembly = Assembly(recipe, Choice("threads", 1, "a test"))
        self.helper = Helper(assembly.work)
        self.recipe = Published()
        self.pool: RemotePool | None = None
        self._keepers = assembly.keepers
        self.engine = assembly.engine(join=self._join)
        self.meter = assembly.meter
        self._work = assembly.work
        self._pipeline = pipeline

    def _join(self, pool: Pool) -> Pool:
        self.pool = RemotePool(pool, self.helper._work, self.helper, self.recipe, self._keepers)
        return self.pool

    def epoch(self, number: int) -> list[Any]:
        self.engine.start(iter(batches_of(number)))
        return [plain(ready.value) for ready in iter(self.engine.next, None)]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run epochs, all with the right bits, until this is true."""
        deadline, number = time.monotonic() + LIMIT, 0
        while True:
            assert self.epoch(number % 3) == alone(self._pipeline)[number % 3]
            if done():
                return
            number += 1
            assert time.monotonic() < deadline, self.pool and self.pool.status()

    @property
    def prepared(self) -> dict[str, Any]:
        assert self.pool is not None
        found: dict[str, Any] = self.pool.status()["machines"]
        return found

    def close(self) -> None:
        self.engine.close()


PAIRS, NAMED = number_pairs(), named_numbers()


@pytest.fixture
def helped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Helped]:
    made = Helped(getattr(request, "param", PAIRS), monkeypatch)
    yield made
    made.close()
    assert made.recipe.withdrawn == 1


@pytest.mark.parametrize("helped", [PAIRS, NAMED], indirect=True, ids=["pairs", "text"])
def test_rows_of_another_machine_have_the_same_bits(helped: Helped) -> None:
    helped.run_until(lambda: helped.prepared["helper"]["tiny_batches"] >= 3)
    prepared = helped.prepared["helper"]
    assert prepared["samples"] >= prepared["tiny_batches"]
    assert prepared["again"] == 0
    assert helped.engine.pool.size == 3
    assert helped.meter.answered() == []


def raising(fault: PeerFault) -> Callable[[RemoteRows], RemoteRows]:
    def spoil(rows: RemoteRows) -> RemoteRows:
        raise fault

    return spoil


def swapped(rows: RemoteRows) -> RemoteRows:
    return rows._replace(report={**rows.report, "layout": [["<f8"], ["<i8"]]})


def shortened(rows: RemoteRows) -> RemoteRows:
    return rows._replace(leaves=[leaf[:-1] for leaf in rows.leaves])


def without_times(rows: RemoteRows) -> RemoteRows:
    return rows._replace(report={**rows.report, "busy": "long"})


SPOILT = {
    "lost": raising(PeerLost("reset")),
    "slow": raising(PeerSlow("busy")),
    "bad sample": raising(PeerFailed("no such file")),
    "deadly sample": raising(PeerDeadly("killed by signal 11")),
    "nonsense": raising(PeerNonsense("what?")),
    "another error": lambda rows: rows._replace(rows=1 // 0),
    "other layout": swapped,
    "short rows": shortened,
    "no times": without_times,
    "other rows": lambda rows: rows._replace(first=1),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_a_machine_fails_to_prepare_is_prepared_here(helped: Helped, kind: str) -> None:
    helped.helper.spoil = SPOILT[kind]
    helped.run_until(lambda: helped.prepared.get("helper", {"again": 0})["again"] >= 1)
    assert helped.prepared["helper"]["tiny_batches"] == 0
    assert helped.prepared["helper"]["reason"] != ""


def test_a_machine_without_the_pipeline_is_asked_once(helped: Helped) -> None:
    def refuse(keys: Keys) -> RemoteRows:
        raise PeerLacks("put it on a shared file system")

    helped.helper._prepare = refuse  # type: ignore[method-assign]
    helped.run_until(lambda: helped.prepared.get("helper", {"reason": ""})["reason"] != "")
    helped.run_until(lambda: True)
    assert helped.prepared["helper"]["state"] == "lacks the pipeline"


def test_a_pipeline_that_cannot_be_published_stays_here_until_there_is_a_way(
    helped: Helped,
) -> None:
    assert helped.pool is not None
    pool = helped.pool
    helped.recipe.ways = 0
    helped.run_until(lambda: pool.status()["withheld"] == "the directory cannot be written")
    helped.run_until(lambda: True)
    assert helped.helper.calls.total() == 0
    helped.recipe.ways = 1
    helped.run_until(lambda: helped.prepared["helper"]["tiny_batches"] > 0)


def test_a_cache_that_needs_a_pickle_keeps_its_pipeline_here(
    helped: Helped, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert helped.pool is not None
    pool = helped.pool
    monkeypatch.setattr(Keepers, "stays_here", "a cache keeps samples that need a pickle")
    helped.run_until(lambda: "pickle" in pool.status()["withheld"])
    helped.run_until(lambda: True)
    assert helped.helper.calls.total() == 0


class NothingAhead:
    """Objects of a bucket, of which none is fetched ahead."""

    def expect(self, indices: Iterable[int]) -> None: ...

    def hold(self, samples: int) -> None: ...

    def forget(self) -> None: ...

    def stats(self) -> None: ...


def test_objects_that_another_machine_fetches_too_are_said_once(
    helped: Helped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = helped._pipeline.source
    monkeypatch.setattr(type(source), "objects", property(lambda self: NothingAhead()))
    helped.run_until(lambda: helped.prepared["helper"]["tiny_batches"] >= 3)
    said = [record for record in caplog.records if "requested twice" in record.getMessage()]
    assert len(said) == 1


def test_a_machine_that_never_answers_holds_nothing_up(
    helped: Helped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "LEAST_LATE", 0.02)
    monkeypatch.setattr(lending, "MOST_LATE", 0.02)
    end = threading.Event()

    def hang(rows: RemoteRows) -> RemoteRows:
        end.wait(LIMIT)
        return rows

    helped.helper.spoil = hang
    try:
        helped.run_until(lambda: helped.prepared.get("helper", {"again": 0})["again"] >= 1)
        # Its answer comes after all, and is dropped.
        before = helped.prepared["helper"]["tiny_batches"]
    finally:
        end.set()
    assert before == 0
    helped.helper.spoil = lambda rows: rows
    helped.run_until(lambda: True)


def test_machines_come_and_go_while_it_runs(helped: Helped) -> None:
    helped.run_until(lambda: "helper" in helped.prepared and helped.engine.pool.size == 3)
    helped.helper.machines = [*helped.helper.machines, Lender("second", 1, 5)]
    helped.run_until(lambda: helped.engine.pool.size == 8)
    helped.helper.machines = []
    helped.run_until(lambda: helped.engine.pool.size == 1)


def test_closing_does_not_wait_for_another_machine(helped: Helped) -> None:
    end, asked = threading.Event(), threading.Event()

    def hang(rows: RemoteRows) -> RemoteRows:
        asked.set()
        end.wait(LIMIT)
        return rows

    helped.helper.spoil = hang
    helped.engine.start(iter(batches_of(0)))
    deadline = time.monotonic() + LIMIT
    while not asked.is_set():
        if helped.engine.next() is None:
            helped.engine.start(iter(batches_of(0)))
        assert time.monotonic() < deadline
    helped.engine.close()
    assert not end.is_set()
    end.set()
    helped.recipe.withdrawn = 0
    helped.engine.start(iter(batches_of(0)))
    assert helped.epoch(0) == alone(PAIRS)[0]
