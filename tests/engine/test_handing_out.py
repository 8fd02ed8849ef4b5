"""What the thread of the training loop does for a batch: nothing for each of its pieces."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.open_batch import OpenBatch, Summary
from penstock.engine.pools.inline import InlinePool
from penstock.engine.pools.messages import TasksSent
from penstock.engine.pools.runner import Runner, TaskReport, WorkerInfo
from penstock.engine.pools.wire import Wire
from penstock.engine.schedule import Piece, Schedule
from penstock.order.plan import BatchKeys
from penstock.stops.cache import CacheKeeper
from penstock.watch.publish import Publisher

ROWS = 64


def counted_calls(monkeypatch: pytest.MonkeyPatch, piece: int) -> list[int]:
    """Python calls of each hand-out of a loader whose tasks have ``piece`` samples."""
    calls: list[int] = []
    hand_out = Engine._hand_out

    def counted(self: Engine, batch: OpenBatch) -> Any:
        count = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            return hand_out(self, batch)
        finally:
            sys.setprofile(None)
            calls.append(count)

    monkeypatch.setattr(Engine, "_hand_out", counted)
    monkeypatch.setattr(Schedule, "piece_size", lambda self, rows: min(piece, rows))
    data = [(np.full(3, n), f"sample {n}") for n in range(4 * ROWS)]
    with (
        ps.from_dataset(data, random=False).batch(ROWS).loader(kind="threads", workers=2) as loader
    ):
        assert sum(len(names) for _, names in loader) == len(data)
        assert loader.stats().stages[0].samples == len(data)
    return calls


def test_handing_out_costs_the_same_for_any_number_of_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = counted_calls(monkeypatch, 1)
    monkeypatch.undo()
    few = counted_calls(monkeypatch, ROWS)
    assert many == few


def finished(*reports: tuple[int, TaskReport]) -> OpenBatch:
    batch = OpenBatch(BatchKeys(0, 0, np.arange(8), None), "whole")
    for first, report in reports:
        batch.add_report(Piece(first, "rows", 0, first, report.rows), report)
    batch.finish()
    return batch


def test_reports_are_added_up_in_the_order_of_rows() -> None:
    second = TaskReport(2, 2, 0.5, [[2], [0.25], 7, [0], [2], 1], [(0, 5, 9)], objects={1: ["c"]})
    first = TaskReport(
        4, 4, 0.25, [[4], [0.5], 3, [1], [3], 0], [(0, 2, 8)], objects={1: ["a", "b"]}
    )
    batch = finished((4, second), (0, first))
    assert batch.complete
    assert batch.summary == Summary(
        6,
        6,
        0.75,
        [[6], [0.75], 10, [1], [5], 1],
        [(0, 2, 8), (0, 5, 9)],
        {1: ["a", "b", "c"]},
    )
    assert batch.offers() == [(0, 2, 8), (0, 5, 9)]


def test_bad_samples_of_a_finished_batch_are_listed_once() -> None:
    batch = finished((0, TaskReport(1, bad=[(3, "three", "source", "broken")])))
    assert [(bad.index, bad.name, bad.stage, bad.error) for bad in batch.bad] == [
        (3, "three", "source", "broken")
    ]


def test_keys_of_a_probe_are_few() -> None:
    planned = BatchKeys(2, 0, np.arange(500), np.ones(500, np.int64))
    probe = OpenBatch(planned, "probe")
    assert probe.rows == len(probe.keys) == len(probe.keys.replicas or ()) == 64
    assert OpenBatch(planned, "rows").rows == 500


def test_caches_admit_samples_in_the_order_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admitted: list[int] = []
    admit = CacheKeeper.admit

    def noted(self: CacheKeeper, offers: Any) -> None:
        admitted.extend([index for index, _ in offers])
        admit(self, offers)

    monkeypatch.setattr(CacheKeeper, "admit", noted)
    # A report, which is due after some time, has the statistics, and so admits samples too.
    monkeypatch.setattr(Publisher, "_publish", lambda *_, **__: None)
    numbers = ps.from_dataset(np.arange(40 * ROWS), random=False).cache("1MB").batch(ROWS)
    with numbers.loader(kind="threads", workers=2, seed=3) as loader:
        delivered = np.concatenate(list(loader)).tolist()
        assert admitted == delivered
        (cache,) = loader.stats().caches
        assert cache.admitted == len(delivered)
        assert np.concatenate(list(loader)).tolist() != delivered
        assert loader.stats().caches[0].hits == len(delivered)


def test_samples_of_a_failed_batch_stay_if_a_batch_handed_out_before_has_them() -> None:
    numbers = ps.from_dataset(np.arange(8), random=False).cache("1MB").batch(4)
    with numbers.loader(workers=0) as loader:
        keepers = loader._assembly.keepers
        keepers.open()
        keeper = keepers._keepers[0]
        keeper.store.put_many([(5, b"five"), (6, b"six")])
        keepers.handed_out(BatchKeys(0, 0, np.array([5]), None), [(0, 5, 100)])
        keepers.discard([(0, 5, 100), (0, 6, 100)])
        assert keeper.store.keys() == [5]


def test_the_training_loop_sends_no_messages_to_worker_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    senders: list[threading.Thread] = []
    send = Wire.send

    def noted(self: Wire, record: Any, fds: Any = ()) -> None:
        if isinstance(record, TasksSent):
            senders.append(threading.current_thread())
        send(self, record, fds)

    monkeypatch.setattr(Wire, "send", noted)
    data = np.arange(20 * ROWS)
    with (
        ps.from_dataset(data, random=False)
        .batch(ROWS)
        .loader(kind="processes", workers=2, seed=3) as loader
    ):
        for _ in range(2):
            assert sorted(np.concatenate(list(loader)).tolist()) == data.tolist()
    assert senders
    assert threading.main_thread() not in senders


def test_workers_are_notified_only_if_one_of_them_found_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notified: list[int] = []
    monkeypatch.setattr(InlinePool, "notify", lambda self: notified.append(1))
    numbers = ps.from_dataset(np.arange(12 * ROWS), random=False).batch(ROWS)
    with numbers.loader(workers=0) as loader:
        epoch = iter(loader)
        next(epoch)
        at_first = len(notified)
        assert at_first
        for _ in range(3):
            next(epoch)
        assert len(notified) == at_first
        feed = loader._feed
        assert isinstance(feed, Engine)
        tasks = list(iter(lambda: feed.take(0), None))
        assert len(tasks) > 1
        for task in tasks:
            feed.done(task.id, Runner(feed.work, WorkerInfo(0, 1, 0, process=False)).run(task))
        next(epoch)
        assert len(notified) == at_first + 1
        next(epoch)
        assert len(notified) == at_first + 1
