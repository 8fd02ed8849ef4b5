"""What the thread of the training loop does for a batch: little, and nothing for each piece."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.feed import Queue
from penstock.engine.open_batch import OpenBatch, Summary
from penstock.engine.pools import processes
from penstock.engine.pools.inline import InlinePool
from penstock.engine.pools.messages import TasksSent
from penstock.engine.pools.runner import Runner, TaskReport, WorkerInfo
from penstock.engine.pools.threads import ThreadPool
from penstock.engine.pools.wire import Wire
from penstock.engine.schedule import Piece, Schedule
from penstock.loader import Custom, Loader
from penstock.options import Options
from penstock.order import Cursor, Sequential, Shuffled
from penstock.order.plan import BatchKeys, Plan
from penstock.stops.cache import CacheKeeper
from penstock.watch.publish import Publisher, Pulse

ROWS = 64


def counted_calls(monkeypatch: pytest.MonkeyPatch, piece: int) -> list[int]:
    """Python calls of each hand-out of a loader whose tasks have ``piece`` samples.

    Of the general way: the test of ``MOST_CALLS`` counts those of batches that are ready.
    """
    monkeypatch.setattr(Engine, "take_ready", lambda self: None)
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
        *(4, 4, 0.25, [[4], [0.5], 3, [1], [3], 0], [(0, 2, 8)]),
        objects={1: ["a", "b"]},
        machine="helper",
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
        {"helper": 4},
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

    def noted(self: CacheKeeper, offers: Any, epoch: int) -> None:
        admitted.extend([index for index, _ in offers])
        admit(self, offers, epoch)

    monkeypatch.setattr(CacheKeeper, "admit", noted)
    # A report, which is due after some time, has the statistics, and so admits samples too.
    monkeypatch.setattr(Publisher, "_publish", lambda *_, **__: None)
    numbers = ps.from_dataset(np.arange(40 * ROWS), random=False).cache("1MB").batch(ROWS)
    with numbers.loader(kind="threads", workers=2, seed=3) as loader:
        delivered = np.concatenate(list(loader)).tolist()
        (cache,) = loader.stats().caches  # admits what was left to workers
        assert cache.admitted == len(delivered)
        assert admitted == delivered
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


def test_outcomes_that_are_reported_together_wake_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken: list[int] = []
    numbers = ps.from_dataset(np.arange(12 * ROWS), random=False).batch(ROWS)
    with numbers.loader(workers=0, shuffle=False) as loader:
        epoch = iter(loader)
        next(epoch)
        feed = loader._feed
        assert isinstance(feed, Engine)
        runner = Runner(feed.work, WorkerInfo(0, 1, 0, process=False))
        tasks = list(iter(lambda: feed.take(0), None))
        monkeypatch.setattr(Engine, "_progressed", lambda self: woken.append(1))
        feed.done_all([(task.id, runner.run(task)) for task in tasks])
        assert len(woken) == 1
        finished = feed.queue().finished
        assert finished >= 2
        for number in range(1, 1 + finished):
            assert next(epoch).tolist() == list(range(number * ROWS, (number + 1) * ROWS))


def test_an_outcome_that_cannot_be_used_does_not_lose_the_others() -> None:
    numbers = ps.from_dataset(np.arange(12 * ROWS), random=False).batch(ROWS)
    with numbers.loader(workers=0, shuffle=False) as loader:
        epoch = iter(loader)
        next(epoch)
        feed = loader._feed
        assert isinstance(feed, Engine)
        runner = Runner(feed.work, WorkerInfo(0, 1, 0, process=False))
        tasks = list(iter(lambda: feed.take(0), None))
        outcomes: list[Any] = [(task.id, runner.run(task)) for task in tasks]
        outcomes.insert(0, (-1, None))
        feed.done_all(outcomes)
        assert feed.queue().finished >= 2
        with pytest.raises(AttributeError):
            next(epoch)


def test_a_loop_that_runs_out_of_batches_wakes_a_pool_that_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rested: list[bool] = []

    def forever(ahead: int, cost: float, *, relaxed: bool) -> float:
        rested.append(relaxed)
        return 3600.0 if relaxed else 0.0

    monkeypatch.setattr(processes, "rest", forever)
    monkeypatch.setattr(processes, "REST_FROM", 1)

    def ready(queue: Queue) -> bool:
        return queue.ready and queue.finished >= 4

    data = np.arange(100 * ROWS)
    with (
        ps.from_dataset(data, random=False)
        .batch(ROWS)
        .loader(kind="processes", workers=2, prefetch=8) as loader
    ):
        delivered: list[int] = []
        for number, batch in enumerate(loader):
            delivered += batch.tolist()
            while number < 40 and not ready(loader.queue()) and True not in rested:
                time.sleep(1e-3)
        assert sorted(delivered) == data.tolist()
        assert True in rested


def test_a_pool_can_rest_whatever_the_number_of_its_descriptor_is() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not have 2000 open files")
    ends = list(os.pipe())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
        os.dup2(ends[0], 1999)
        ends.append(1999)
        os.write(ends[1], b"x")  # the loop wants something: it must not rest
        pool = object.__new__(processes.ProcessPool)
        pool._wake = (1999, ends[1])
        pool._rest(3600.0)
    finally:
        for fd in ends:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


MOST_CALLS = 33
"""Calls of Python and C functions that a ready batch may cost the loop: 21 to 29 when this was
written, 35 to 42 without ``Engine.take_ready``, and more than 100 when the loop made the arrays,
counted and opened batches itself."""


def wait_until_ready(loader: Loader) -> None:
    while not loader.queue().ready:
        time.sleep(1e-3)


def calls_in_loop(loader: Loader, batches: int) -> list[int]:
    """Calls that the thread of the loop makes for each batch, all of which are ready."""
    calls: list[int] = []
    epoch = iter(loader)
    next(epoch)
    for _ in range(batches):
        wait_until_ready(loader)
        count = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            next(epoch)
        finally:
            sys.setprofile(None)
        calls.append(count)
    return calls


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_ready_batch_costs_the_loop_few_calls(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(Schedule, "piece_size", lambda self, rows: 1)
    data = [(np.full(3, n), n) for n in range(12 * ROWS)]
    pipeline = ps.from_dataset(data, random=False).batch(ROWS)
    with Loader(pipeline, Options(kind=kind, workers=2), Custom(convert=list)) as loader:
        calls = calls_in_loop(loader, 8)
    assert max(calls) <= MOST_CALLS, calls


def test_a_ready_batch_costs_the_loop_few_calls_while_a_cache_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admitting: list[threading.Thread] = []
    admit = CacheKeeper.admit

    def noted(self: CacheKeeper, offers: Any, epoch: int) -> None:
        admitting.append(threading.current_thread())
        admit(self, offers, epoch)

    monkeypatch.setattr(CacheKeeper, "admit", noted)
    numbers = ps.from_dataset(np.arange(40 * ROWS), random=False).cache("1MB").batch(ROWS)
    with numbers.loader(kind="threads", workers=2) as loader:
        calls = calls_in_loop(loader, 12)
        assert loader.stats().caches[0].admitted >= 12 * ROWS
    # A few calls more note the batch for the keeper. Admitting its samples is more than 64 calls.
    assert max(calls) <= MOST_CALLS + 4, calls
    assert admitting


@pytest.mark.parametrize("echo", [1, 2])
def test_workers_report_while_the_loop_finds_batches_ready(
    monkeypatch: pytest.MonkeyPatch, echo: int
) -> None:
    reporting: list[threading.Thread] = []
    monkeypatch.setattr(Pulse, "due", lambda self: True)
    monkeypatch.setattr(
        Publisher,
        "_write_report",
        lambda *_, **__: reporting.append(threading.current_thread()),
    )
    numbers = ps.from_dataset(np.arange(40 * ROWS), random=False).batch(ROWS)
    if echo > 1:
        numbers = numbers.echo(echo)
    with numbers.loader(kind="threads", workers=2) as loader:
        epoch = iter(loader)
        next(epoch)
        wait_until_ready(loader)
        reporting.clear()
        for _ in range(12):
            wait_until_ready(loader)
            next(epoch)
        while not reporting:
            time.sleep(1e-3)
        assert threading.main_thread() not in reporting


def test_the_loop_reports_itself_where_no_worker_has_a_task_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The next epoch does not begin early, so tasks run out.
    monkeypatch.setattr(Loader, "_may_begin_early", lambda self: False)
    numbers = ps.from_dataset(np.arange(3 * ROWS), random=False).batch(ROWS)
    with numbers.loader(kind="threads", workers=2) as loader:
        epoch = iter(loader)
        next(epoch)
        while loader.queue().finished < 2:
            time.sleep(1e-3)
        next(epoch)
        reporting: list[threading.Thread] = []
        monkeypatch.setattr(Pulse, "due", lambda self: True)
        monkeypatch.setattr(
            Publisher,
            "_write_report",
            lambda *_, **__: reporting.append(threading.current_thread()),
        )
        engine = loader._feed
        assert isinstance(engine, Engine)
        while not engine._all_opened:
            time.sleep(1e-3)
        next(epoch)
        assert reporting == [threading.main_thread()]


def test_the_loop_wakes_one_thread_which_wakes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[tuple[threading.Thread, int]] = []
    wake = ThreadPool._wake

    def noted(self: ThreadPool, threads: int) -> None:
        woken.append((threading.current_thread(), threads))
        wake(self, threads)

    monkeypatch.setattr(ThreadPool, "_wake", noted)
    monkeypatch.setattr("penstock.engine.pools.threads.IDLE_WAIT", 600.0)
    monkeypatch.setattr(Schedule, "piece_size", lambda self, rows: 1)
    together = threading.Barrier(3)

    def meet(sample: Any) -> Any:
        if sample >= 6:
            together.wait(120)  # all three threads have a task at the same time
        return sample

    numbers = ps.from_dataset(np.arange(24), random=False).map(meet, random=False).batch(3)
    with numbers.loader(kind="threads", workers=3, shuffle=False, prefetch=2) as loader:
        epoch = iter(loader)
        batches = [next(epoch).tolist()]
        engine = loader._feed
        assert isinstance(engine, Engine)
        assert isinstance(engine.pool, ThreadPool)
        while batches[-1][-1] < 23:
            while len(engine.pool._asleep) < 3:
                time.sleep(1e-3)
            woken.clear()
            batches.append(next(epoch).tolist())
            assert [one for one in woken if one[0] is threading.main_thread()] == [
                (threading.main_thread(), 1)
            ]
    assert batches == np.arange(24).reshape(8, 3).tolist()


def test_a_worker_converts_each_batch_once() -> None:
    threads: list[threading.Thread] = []

    def negative(value: Any) -> Any:
        threads.append(threading.current_thread())
        return -value

    numbers = ps.from_dataset(np.arange(4 * ROWS), random=False).batch(ROWS)
    options = Options(kind="threads", workers=2, shuffle=False)
    with Loader(numbers, options, Custom(convert=negative)) as loader:
        assert np.concatenate(list(loader)).tolist() == (-np.arange(4 * ROWS)).tolist()
        first_epoch = threads[:4]
    assert len(first_epoch) == 4
    assert threading.main_thread() not in first_epoch


def test_an_error_of_converting_is_raised_in_the_place_of_its_batch() -> None:
    def convert(value: Any) -> Any:
        if value[0] == 2 * ROWS:
            raise ValueError("not this one")
        return value

    numbers = ps.from_dataset(np.arange(4 * ROWS), random=False).batch(ROWS)
    options = Options(kind="threads", workers=2, shuffle=False)
    with Loader(numbers, options, Custom(convert=convert)) as loader:
        epoch = iter(loader)
        assert [int(next(epoch)[0]) for _ in range(2)] == [0, ROWS]
        with pytest.raises(ValueError, match="not this one"):
            next(epoch)


class Noting(Shuffled):
    """An order that notes which threads compute it."""

    def at(self, *arguments: Any) -> Any:
        THREADS.add(threading.current_thread())
        return super().at(*arguments)


THREADS: set[threading.Thread] = set()


def test_workers_open_the_batches_of_an_order() -> None:
    THREADS.clear()
    numbers = ps.from_dataset(np.arange(20 * ROWS), random=False).batch(ROWS)
    delivered: list[int] = []
    with numbers.loader(kind="threads", workers=2, order=Noting()) as loader:
        epoch = iter(loader)
        delivered += next(epoch).tolist()
        for _ in range(19):
            wait_until_ready(loader)
            delivered += next(epoch).tolist()
    assert sorted(delivered) == list(range(20 * ROWS))
    assert THREADS - {threading.main_thread()}


class Sampled(Plan):
    """The plan of a user's sampler, which may run in the thread of the loop only."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        for number in range(cursor.batch, self._batches):
            assert threading.current_thread() is threading.main_thread()
            indices = np.arange(number * ROWS, (number + 1) * ROWS)
            yield BatchKeys(cursor.epoch, number, indices, None)

    def length(self, cursor: Cursor) -> int:
        return self._batches - cursor.batch

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        return cursor._replace(batch=cursor.batch + 1)


def test_samplers_run_in_the_thread_of_the_loop() -> None:
    numbers = ps.from_dataset(np.arange(30 * ROWS), random=False).batch(ROWS)
    options = Options(kind="threads", workers=2)
    with Loader(numbers, options, Custom(plan=lambda *_: Sampled(30))) as loader:
        for _ in range(2):
            assert np.concatenate(list(loader)).tolist() == list(range(30 * ROWS))


class Failing(Sequential):
    """An order that fails for the last of 40 batches."""

    def at(self, n: int, seed: int, epoch: int, places: Any) -> Any:
        if int(np.max(places)) >= 39 * ROWS:
            raise LookupError("no such place")
        return super().at(n, seed, epoch, places)


def test_an_order_that_fails_in_a_worker_fails_in_the_loop() -> None:
    numbers = ps.from_dataset(np.arange(40 * ROWS), random=False).batch(ROWS)
    with (
        numbers.loader(kind="threads", workers=2, order=Failing()) as loader,
        pytest.raises(LookupError, match="no such place"),
    ):
        list(loader)


def test_an_epoch_goes_on_into_the_next_without_dropping_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[bool] = []
    start = Engine.start

    def noted(self: Engine, batches: Any, **options: Any) -> None:
        starts.append(True)
        start(self, batches, **options)

    monkeypatch.setattr(Engine, "start", noted)
    numbers = ps.from_dataset(np.arange(6 * ROWS), random=False).batch(ROWS)
    with numbers.loader(kind="threads", workers=2, seed=3) as loader:
        for _ in range(5):
            assert sorted(np.concatenate(list(loader)).tolist()) == list(range(6 * ROWS))
    assert len(starts) == 1


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loader_forgotten_while_a_worker_opens_a_batch_ends_its_workers(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    held: list[Any] = []
    forgotten = threading.Event()

    def may_begin_early(self: Loader) -> bool:
        if threading.current_thread() is not threading.main_thread():
            held.clear()
            forgotten.set()
        return True

    monkeypatch.setattr(Loader, "_may_begin_early", may_begin_early)
    numbers = ps.from_dataset(np.arange(6 * ROWS), random=False).batch(ROWS)
    held.append(numbers.loader(kind=kind, workers=2, prefetch=2))
    held.append(iter(held[0]))
    next(held[1])
    engine = held[0]._feed
    while not forgotten.is_set():
        while held and not engine.queue().ready:
            time.sleep(1e-3)
        epoch = held[1:]  # a worker may empty the list at any time
        if epoch:
            next(epoch.pop())
    assert not held
    while engine._started:
        time.sleep(1e-3)
    assert not engine._open_batches
