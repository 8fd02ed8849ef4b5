"""The schedule: every sample of a batch is dealt until it is done, even if workers die."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.schedule import (
    AHEAD,
    AHEAD_OF_LARGE,
    HANDING,
    HANDING_EACH,
    HANDING_SHARE,
    HELD,
    LONGEST_PIECE,
    LONGEST_REST,
    MEMORY_AHEAD,
    MOST_AHEAD,
    PIECE_SECONDS,
    SMALLEST,
    Demand,
    Piece,
    Schedule,
    piece_seconds,
    piece_size,
    refill_from,
    rest,
)


@given(rows=st.integers(1, 200), workers=st.integers(1, 16), cost=st.floats(1e-7, 1.0))
def test_pieces_cover_a_batch_exactly_once(rows: int, workers: int, cost: float) -> None:
    schedule = Schedule(workers)
    for batch in range(3):
        schedule.open(batch, rows)
        covered: list[int] = []
        last = False
        while (piece := schedule.take(0)) is not None:
            covered += range(piece.first, piece.first + piece.count)
            last = schedule.done(piece.id, cost * piece.count)
        assert sorted(covered) == list(range(rows))
        assert last
        schedule.drop(batch)


def test_older_batches_come_first() -> None:
    schedule = Schedule(2)
    for batch in (1, 2):
        schedule.open(batch, 8)
    taken = []
    while (piece := schedule.take(0)) is not None:
        taken.append(piece.batch)
    assert taken == sorted(taken)


def test_pieces_follow_the_cost_of_a_sample() -> None:
    schedule = Schedule(4)
    schedule.open(0, 64)
    assert schedule.piece_size(64) == 8
    piece = schedule.take(0)
    assert piece is not None
    schedule.done(piece.id, piece.count * PIECE_SECONDS / 3)
    assert schedule.piece_size(64) == 3
    cheap = Schedule(4)
    cheap.open(0, 64)
    piece = cheap.take(0)
    assert piece is not None
    cheap.done(piece.id, piece.count * 1e-6)
    assert cheap.piece_size(64) == 64
    costly = Schedule(4)
    costly.open(0, 64)
    piece = costly.take(0)
    assert piece is not None
    costly.done(piece.id, piece.count * 1.0)
    assert costly.piece_size(64) == 1


def test_a_pinned_piece_goes_to_its_worker_only() -> None:
    schedule = Schedule(2)
    schedule.open(0, 4, "pull", pin=1)
    assert schedule.take(0) is None
    piece = schedule.take(1)
    assert piece is not None
    assert (piece.count, piece.pin) == (4, 1)


def test_a_piece_put_back_is_the_next_one_again() -> None:
    schedule = Schedule(2)
    schedule.open(0, 8)
    first = schedule.take(0)
    assert first is not None
    schedule.put_back(first.id)
    assert first.id not in schedule
    assert schedule.outstanding(0) == 2  # this piece, and the rest of the batch
    assert schedule.take(1) == first


def test_the_piece_a_worker_died_of_comes_back_one_sample_at_a_time() -> None:
    schedule = Schedule(1)
    schedule.open(0, 4)
    first = schedule.take(0)
    assert first is not None
    assert first.count == 2
    assert schedule.lost(first.id, guilty=True) is None
    again = [schedule.take(0) for _ in range(2)]
    assert [(p.first, p.count) for p in again if p] == [(0, 1), (1, 1)]
    assert again[1] is not None
    deadly = schedule.lost(again[1].id, guilty=True)
    assert deadly is not None
    assert deadly.first == 1


def test_a_piece_its_worker_had_not_begun_is_not_blamed() -> None:
    schedule = Schedule(1)
    schedule.open(0, 4)
    for _ in range(5):
        piece = schedule.take(0)
        assert piece is not None
        assert piece.count == 2
        assert schedule.lost(piece.id, guilty=False) is None


@given(
    rows=st.integers(1, 30),
    workers=st.integers(1, 4),
    events=st.lists(st.sampled_from(["done", "guilty", "waiting"]), max_size=60),
    pick=st.integers(0, 7),
)
def test_nothing_is_lost_and_nothing_done_twice_under_random_deaths(
    rows: int, workers: int, events: list[str], pick: int
) -> None:
    schedule = Schedule(workers)
    schedule.open(0, rows)
    held = []
    done: list[int] = []
    finished = False
    while not finished:
        while (piece := schedule.take(0)) is not None:
            held.append(piece)
        piece = held.pop(pick % len(held))
        event = events.pop() if events else "done"
        if event == "done":
            done += range(piece.first, piece.first + piece.count)
            finished = schedule.done(piece.id, 1e-3)
        else:
            deadly = schedule.lost(piece.id, guilty=event == "guilty")
            if deadly is not None:
                schedule.deal_again(deadly)
    assert sorted(done) == list(range(rows))
    assert held == []


def test_a_dropped_batch_has_no_pieces_left() -> None:
    schedule = Schedule(1)
    schedule.open(0, 8)
    piece = schedule.take(0)
    assert piece is not None
    assert piece.id in schedule
    schedule.drop(0)
    assert piece.id not in schedule
    assert schedule.take(0) is None


def taken(schedule: Schedule) -> list[Piece]:
    found = []
    while (piece := schedule.take(0)) is not None:
        found.append(piece)
    return found


def test_a_whole_batch_that_killed_its_worker_is_tried_sample_by_sample_and_then_again() -> None:
    schedule = Schedule(2)
    schedule.open(0, 3, "whole")
    (whole,) = taken(schedule)
    assert schedule.lost(whole.id, guilty=True) is None
    trials = taken(schedule)
    assert [(p.kind, p.first, p.count, p.strikes) for p in trials] == [
        ("probe", row, 1, 1) for row in range(3)
    ]
    assert schedule.lost(trials[1].id, guilty=True) == trials[1]
    assert not schedule.done(trials[0].id, 0.0)
    assert schedule.done(trials[2].id, 0.0)
    schedule.redo_whole(0, 2, strikes=1)
    (again,) = taken(schedule)
    # No sample kills a worker when it is prepared alone: now collating them does.
    assert schedule.lost(again.id, guilty=True) == again


def test_a_probe_that_killed_its_worker_is_made_of_its_first_sample_alone() -> None:
    schedule = Schedule(2)
    schedule.open(0, 8, "probe")
    (probe,) = taken(schedule)
    assert schedule.lost(probe.id, guilty=True) is None
    (single,) = taken(schedule)
    assert (single.kind, single.first, single.count) == ("probe", 0, 1)
    assert schedule.lost(single.id, guilty=True) == single
    schedule.probe(0, 1, 7)
    (rest,) = taken(schedule)
    assert (rest.first, rest.count, rest.strikes) == (1, 7, 0)
    assert schedule.done(rest.id, 0.0)


def test_a_probe_its_worker_had_not_begun_comes_back_whole() -> None:
    schedule = Schedule(2)
    schedule.open(0, 8, "probe")
    (probe,) = taken(schedule)
    assert schedule.lost(probe.id, guilty=False) is None
    assert [(p.kind, p.count, p.strikes) for p in taken(schedule)] == [("probe", 8, 0)]


# The size of a piece.

PLENTY = Demand(12, HANDING, mean=0.0, open=10**6, waiting=10**6, urgent=True)


@given(workers=st.integers(1, 256), cost=st.floats(1e-6, 10.0), urgent=st.booleans())
def test_all_workers_together_cost_the_training_process_a_stated_share_of_a_core(
    workers: int, cost: float, urgent: bool
) -> None:
    demand = Demand(workers, HANDING, cost, 10**12, 10**12, urgent)
    size = piece_size(10**8, cost, demand)
    pieces_a_second = workers / (size * cost)
    assert pieces_a_second * HANDING <= HANDING_SHARE * 1.6
    # Nor are pieces longer than that takes, or than one sample.
    assert size == 1 or size * cost <= 1.01 * piece_seconds(workers, HANDING, cost) + cost
    # Nor does a sample cost much, however long it takes, unless that makes pieces very long.
    assert HANDING / size <= 1.1 * HANDING_EACH or (size + 1) * cost >= LONGEST_PIECE


@given(
    left=st.integers(1, 10**4),
    cost=st.floats(0.0, 10.0),
    workers=st.integers(1, 64),
    more=st.integers(0, 10**4),
    running=st.integers(0, 10**4),
    urgent=st.booleans(),
)
def test_a_piece_has_at_least_one_sample_and_at_most_those_left(
    left: int, cost: float, workers: int, more: int, running: int, urgent: bool
) -> None:
    waiting = left + more
    demand = Demand(workers, HANDING, cost, waiting + running, waiting, urgent)
    assert 1 <= piece_size(left, cost, demand) <= left


def test_pieces_shrink_when_the_loop_is_about_to_wait_and_little_is_left() -> None:
    cost = 4e-3
    sizes = [piece_size(256, cost, PLENTY._replace(waiting=w)) for w in (1000, 200, 100, 10)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[-1] == round(piece_seconds(12, HANDING) / cost / SMALLEST)
    # A loop that has a batch to take needs nothing soon, and long pieces cost it less.
    assert piece_size(256, cost, PLENTY._replace(waiting=10, urgent=False)) == sizes[0]


def test_all_workers_get_pieces_of_what_is_open() -> None:
    few = PLENTY._replace(open=12 * 12, waiting=12 * 12)
    assert piece_size(256, 4e-3, few) == 4
    # But a piece is not cut into less than is worth handing out.
    assert piece_size(256, 0.2e-3, few) == round(256 / round(256 / (PIECE_SECONDS / 0.2e-3)))


def test_long_pieces_follow_the_mean_cost_and_short_ones_the_least() -> None:
    # A cache has most samples: a piece of 64 cheap ones could have to read 64 others.
    assert piece_size(1000, 1e-3, PLENTY._replace(mean=1e-3)) > 90
    assert piece_size(1000, 1e-3, PLENTY._replace(mean=8e-3)) == 16
    # Interrupted workers seem slow, and smaller pieces would only add to the load.
    assert piece_size(1000, 1e-3, PLENTY._replace(mean=1.0)) == 4


def test_a_finished_batch_that_the_loop_has_not_taken_makes_pieces_longer() -> None:
    schedule = Schedule(12, handing=HANDING)
    schedule.open(0, 24)
    while (piece := schedule.take(0)) is not None:
        schedule.done(piece.id, 4e-3 * piece.count)
    schedule.open(1, 48)
    relaxed = schedule.piece_size(48)
    schedule.drop(0)  # the loop took it
    assert schedule.piece_size(48) < relaxed == 24
    # A finished batch that is not the next one does not help the loop.
    tight = schedule.piece_size(48)
    schedule.open(2, 1)
    piece = schedule.take(0)
    while piece is not None and piece.batch != 2:
        piece = schedule.take(0)
    assert piece is not None
    schedule.done(piece.id, 4e-3)
    schedule.open(3, 48)
    assert tight <= schedule.piece_size(48) < relaxed


def test_a_finished_batch_does_not_make_pieces_longer_for_a_loop_that_waits() -> None:
    schedule = Schedule(12, handing=HANDING)
    schedule.open(0, 24)
    while (piece := schedule.take(0)) is not None:
        schedule.done(piece.id, 4e-3 * piece.count)
    schedule.open(1, 48)
    relaxed = schedule.piece_size(48)
    schedule.hurried = True  # it takes the finished batch at once, and then needs the next
    assert schedule.piece_size(48) < relaxed


@given(rows=st.integers(1, 60), size=st.integers(1, 70), cost=st.floats(1e-7, 1.0))
def test_a_given_tiny_batch_is_the_size_of_every_piece(rows: int, size: int, cost: float) -> None:
    schedule = Schedule(3, handing=HANDING, tiny_batch=size)
    for batch in range(2):
        schedule.open(batch, rows)
        counts = []
        while (piece := schedule.take(0)) is not None:
            counts.append(piece.count)
            schedule.done(piece.id, cost * piece.count)
        assert counts == [size] * (rows // size) + [rows % size] * (rows % size > 0)


def test_small_batches_are_opened_further_ahead_for_many_workers() -> None:
    few, many = Schedule(AHEAD, handing=HANDING), Schedule(3 * AHEAD, handing=HANDING)
    for schedule in (few, many):
        schedule.open(0, 8)
        assert schedule.batches_ahead(1000, 8) == AHEAD  # nothing is known yet
        piece = schedule.take(0)
        assert piece is not None
        schedule.done(piece.id, piece.count * 4e-3)
    assert few.batches_ahead(1000, 8) == AHEAD
    wanted = (HELD + 2) * 12 * piece_seconds(12, HANDING) / 4e-3
    assert many.batches_ahead(1000, 8) == MOST_AHEAD
    assert many.batches_ahead(1000, 128) == math.ceil(wanted / 128) == 12
    assert many.batches_ahead(1000, 512) == AHEAD
    # In a stated amount of memory for each worker.
    assert many.batches_ahead(MEMORY_AHEAD // 2, 8) == 2 * 12
    assert many.batches_ahead(MEMORY_AHEAD * 20, 8) == AHEAD_OF_LARGE


# Resting.


@given(ahead=st.integers(0, 10**4), cost=st.floats(0.0, 10.0))
def test_nobody_rests_until_a_worker_has_run_out_of_tasks(ahead: int, cost: float) -> None:
    assert 0.0 <= rest(ahead, cost) <= min(LONGEST_REST, ahead * cost)
    assert rest(ahead, cost, relaxed=True) == LONGEST_REST


class Simulation:
    """A pool of worker processes on a virtual clock: which messages there are, and who is idle.

    Each worker has up to two tasks. The pool handles all messages that it finds, gives out tasks
    and rests. The training loop takes a batch as soon as it is finished, or ``step`` seconds after
    the one before.
    """

    def __init__(self, workers: int, rows: int, nbytes: int, cost: float, step: float) -> None:
        self.schedule = Schedule(workers, handing=HANDING)
        self.tasks: list[list[Piece]] = [[] for _ in range(workers)]
        self.rows, self.nbytes, self.cost, self.step = rows, nbytes, cost, step
        self.ends: list[tuple[float, int]] = []  # when each busy worker has done its task
        self.reports: list[tuple[int, Piece]] = []
        self.complete: set[int] = set()
        self.opened = self.taken = self.messages = self.wakes = 0
        self.now = self.rests_until = self.loop_free = 0.0
        self.random = random.Random(7)

    def run(self, batches: int) -> float:
        """Share of the time in which workers were busy, once all have begun."""
        self.take_batches()
        self.give_out()
        while self.taken < batches:
            times = [self.ends[0][0]] if self.ends else []
            if self.taken in self.complete:
                times.append(max(self.loop_free, self.now))
            if self.reports:
                times.append(max(self.rests_until, self.now))
            self.now = min(times)
            if self.ends and self.ends[0][0] <= self.now:
                _, worker = heapq.heappop(self.ends)
                self.reports.append((worker, self.tasks[worker].pop(0)))
                self.begin(worker)
            elif self.reports and self.rests_until <= self.now:
                self.handle()
            else:
                self.take_batches()
        return self.taken * self.rows * self.cost / (len(self.tasks) * self.now)

    def begin(self, worker: int) -> None:
        if self.tasks[worker]:
            seconds = self.cost * self.tasks[worker][0].count * self.random.uniform(0.8, 1.2)
            heapq.heappush(self.ends, (self.now + seconds, worker))

    def handle(self) -> None:
        self.wakes += 1
        self.messages += len(self.reports)
        for _, piece in self.reports:
            if self.schedule.done(piece.id, self.cost * piece.count):
                self.complete.add(piece.batch)
        self.reports.clear()
        self.give_out()
        self.take_batches()

    def give_out(self) -> None:
        waiting = [worker for worker, _ in self.reports]
        for depth in (1, 2):
            for worker, tasks in enumerate(self.tasks):
                if len(tasks) + waiting.count(worker) < depth:
                    self.schedule.hurried = not self.step
                    piece = self.schedule.take(worker)
                    if piece is not None:
                        tasks.append(piece)
                        if len(tasks) == 1:
                            self.begin(worker)
        ahead = min(sum(piece.count for piece in tasks[1:]) for tasks in self.tasks)
        relaxed = bool(self.step) and {self.taken, self.taken + 1} <= self.complete
        self.rests_until = self.now + rest(ahead, self.cost, relaxed=relaxed)

    def take_batches(self) -> None:
        while self.taken in self.complete and self.loop_free <= self.now:
            self.complete.remove(self.taken)
            self.schedule.end(self.taken)
            self.taken += 1
            self.loop_free = self.now + self.step
        depth = self.schedule.batches_ahead(self.nbytes, self.rows)
        if self.opened - self.taken <= refill_from(depth):
            while self.opened - self.taken < depth:
                self.schedule.open(self.opened, self.rows)
                self.opened += 1
            if not all(self.tasks):
                self.give_out()


PHOTO = 224 * 224 * 3


@pytest.mark.parametrize(
    ("workers", "rows", "row_nbytes", "messages", "together"),
    [
        (12, 32, PHOTO, 1.5, 3.0),
        (12, 32, 4 * PHOTO, 6.0, 3.0),
        (12, 256, PHOTO, 16.0, 3.0),
        (32, 64, PHOTO, 3.5, 8.0),
    ],
)
def test_messages_are_few_and_come_together_and_no_worker_is_idle(
    workers: int, rows: int, row_nbytes: int, messages: float, together: float
) -> None:
    pool = Simulation(workers, rows, rows * row_nbytes, cost=4e-3, step=0.0)
    assert pool.run(400) > 0.95
    assert pool.messages / pool.taken <= messages
    assert pool.messages / pool.wakes >= together


def test_a_loop_that_takes_its_time_is_seldom_disturbed() -> None:
    pool = Simulation(12, 32, 32 * PHOTO, cost=4e-3, step=0.02)
    pool.run(400)
    assert pool.now < 1.05 * 400 * 0.02, "it never waited"
    assert pool.messages / pool.wakes >= 3


def test_other_machines_get_what_the_workers_here_leave() -> None:
    schedule = Schedule(2, tiny_batch=4)
    schedule.open(0, 20)
    assert schedule.left_over() == 12, "a piece for each worker stays"
    piece = schedule.take_away(10)
    assert piece is not None
    assert (piece.first, piece.count) == (0, 10), "longer than pieces for workers here"
    assert schedule.left_over() == 2
    piece = schedule.take_away(10)
    assert piece is not None
    assert (piece.first, piece.count) == (10, 2)
    assert schedule.take_away(10) is None
    here = [schedule.take(worker) for worker in (0, 1)]
    assert [(found.first, found.count) for found in here if found] == [(12, 4), (16, 4)]


def test_workers_that_share_a_batch_keep_the_next_one() -> None:
    schedule = Schedule(8, cuts=False)
    schedule.open(0, 20)
    assert schedule.take_away(5) is None
    schedule.open(1, 20)
    assert schedule.left_over() == 20
    piece = schedule.take_away(5)
    assert piece is not None
    assert (piece.batch, piece.first, piece.count) == (0, 0, 5)
    rest = schedule.take(0)
    assert rest is not None
    assert (rest.batch, rest.first, rest.count) == (0, 5, 15)


def test_samples_that_may_kill_workers_and_whole_batches_stay_on_this_machine() -> None:
    schedule = Schedule(1, tiny_batch=1)
    schedule.open(0, 3)
    schedule.open(1, 8, "whole")
    taken = schedule.take_away(1)
    assert taken is not None
    schedule.lost(taken.id, guilty=True)
    struck = schedule.take(0)
    assert struck is not None
    assert (struck.first, struck.strikes) == (0, 1)
    away = schedule.take_away(9)
    assert away is not None
    assert (away.batch, away.first, away.count) == (0, 1, 1)
    assert schedule.take_away(9) is None
