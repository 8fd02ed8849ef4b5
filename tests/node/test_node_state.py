"""The state of a group: each member gets every batch once and in order, whatever others do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.node.state import (
    GATHER,
    MERGE,
    WINDOW,
    BatchName,
    Decision,
    Drop,
    Fail,
    Give,
    GroupState,
    Lag,
)

SIZE = 10
LENGTH = 7
DEPTH = 3


def name(number: int, epoch: int = 0, part: str = "0/1") -> BatchName:
    return BatchName(part, epoch, number, "")


@dataclass
class Job:
    """A member's own record of its epoch and batches."""

    part: str
    epoch: int = 0
    first: int = 0
    asked: int = 0
    queue: list[BatchName] = field(default_factory=list)
    held: list[BatchName] = field(default_factory=list)
    seen: dict[int, list[int]] = field(default_factory=dict)

    def nth(self, count: int) -> BatchName:
        return name((self.first + count) % LENGTH, self.epoch, self.part)


class Node(RuleBasedStateMachine):
    """Members that join, take, keep, lag, leave, die and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = GroupState(budget=5 * SIZE)
        self.jobs: dict[int, Job] = {}
        self.now = 0.0
        self.next = 0
        self.preparing: list[BatchName] = []
        self.staged: set[BatchName] = set()

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Give):
                assert decision.name in self.staged, "given before it was prepared"
                self.jobs[decision.member].queue.append(decision.name)
            elif isinstance(decision, Drop):
                holders = [
                    job for job in self.jobs.values() if decision.name in job.held + job.queue
                ]
                assert not holders, "dropped while a member uses it"
                self.staged.remove(decision.name)
            else:
                raise AssertionError(decision)

    def begin(self, number: int, first: int | None, done: int) -> None:
        job = self.jobs[number]
        job.first, made = self.state.begin(number, job.epoch, LENGTH, first, done, self.now)
        job.asked = done
        self.carry_out(made)

    def pick(self, which: int, among: list[int]) -> int:
        return among[which % len(among)]

    @rule(
        rank=st.integers(0, 1),
        lag=st.sampled_from(["detach", "detach", "wait"]),
        epoch=st.integers(0, 1),
    )
    def join(self, rank: int, lag: Lag, epoch: int) -> None:
        if len(self.jobs) == 4:
            return
        self.next += 1
        part = f"{rank}/2"
        self.jobs[self.next] = Job(part, epoch)
        self.state.join(self.next, part, lag, self.now)
        self.begin(self.next, None, 0)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 3))
    def want(self, which: int) -> None:
        number = self.pick(which, list(self.jobs))
        job = self.jobs[number]
        taken = len(job.seen.get(job.epoch, []))
        if job.asked < LENGTH and job.asked - taken < DEPTH:
            job.asked += 1
            self.carry_out(self.state.want(number, job.nth(job.asked - 1), self.now))

    @precondition(lambda self: any(job.queue for job in self.jobs.values()))
    @rule(which=st.integers(0, 3))
    def take(self, which: int) -> None:
        number = self.pick(which, [n for n, job in self.jobs.items() if job.queue])
        job = self.jobs[number]
        seen = job.seen.setdefault(job.epoch, [])
        found = job.queue.pop(0)
        assert found == job.nth(len(seen)), "out of order, or twice"
        seen.append(found.number)
        job.held.append(found)
        self.carry_out(self.state.took(number, found, self.now))
        if len(seen) == LENGTH:
            assert sorted(seen) == list(range(LENGTH))
            job.epoch += 1
            self.begin(number, None, 0)

    @precondition(lambda self: any(job.held for job in self.jobs.values()))
    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        number = self.pick(which, [n for n, job in self.jobs.items() if job.held])
        found = self.jobs[number].held.pop(0)
        self.carry_out(self.state.released(number, found, self.now))

    @precondition(lambda self: len(self.preparing) < 3)
    @rule()
    def prepare(self) -> None:
        chosen, made = self.state.choose(self.now)
        self.carry_out(made)
        if chosen is not None:
            assert chosen not in self.staged, "prepared twice"
            assert chosen not in self.preparing, "prepared twice"
            self.preparing.append(chosen)

    @precondition(lambda self: self.preparing)
    @rule(which=st.integers(0, 2))
    def finish(self, which: int) -> None:
        done = self.preparing.pop(which % len(self.preparing))
        self.staged.add(done)
        self.carry_out(self.state.prepared(done, SIZE, self.now))

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 3), back=st.booleans())
    def die(self, which: int, back: bool) -> None:
        """A member is killed. If it comes ``back``, it goes on after the batches it has taken."""
        number = self.pick(which, list(self.jobs))
        job = self.jobs.pop(number)
        self.carry_out(self.state.leave(number, self.now))
        if back:
            self.next += 1
            self.jobs[self.next] = Job(job.part, job.epoch, job.first, seen=job.seen)
            self.state.join(self.next, job.part, "detach", self.now)
            self.begin(self.next, job.first, len(job.seen.get(job.epoch, [])))

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 3))
    def rewind(self, which: int) -> None:
        """A member withdraws its requests and begins again after the batches it has taken."""
        number = self.pick(which, list(self.jobs))
        job = self.jobs[number]
        dropped, job.queue = job.queue, []
        self.carry_out(self.state.rewind(number, self.now))
        for found in dropped:
            self.carry_out(self.state.released(number, found, self.now))
        self.begin(number, job.first, len(job.seen.get(job.epoch, [])))

    @rule(seconds=st.sampled_from([1.0, 2 * GATHER]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.state.tick(self.now))

    @invariant()
    def no_member_is_given_more_than_its_window(self) -> None:
        assert all(len(job.queue) <= WINDOW for job in self.jobs.values())

    @invariant()
    def memory_is_bounded(self) -> None:
        in_use = {n for job in self.jobs.values() for n in job.held + job.queue}
        free = len(self.staged - in_use) * SIZE
        assert free <= self.state.budget + SIZE * max(1, len(self.jobs))
        assert self.state.staged == SIZE * (len(self.staged) + len(self.preparing)) or (
            not self.staged
        )

    def teardown(self) -> None:
        """All members come to the end of their epoch, wherever they are now."""
        for _ in range(400):
            for number, job in self.live():
                while job.held:
                    self.release(list(self.jobs).index(number))
                for _ in range(DEPTH):
                    self.want(list(self.jobs).index(number))
                if job.queue:
                    waiting = [n for n, other in self.jobs.items() if other.queue]
                    self.take(waiting.index(number))
            self.prepare()
            if self.preparing:
                self.finish(0)
            if not self.live():
                break
        assert not self.live(), "a member never came to the end"
        for number in list(self.jobs):
            self.jobs.pop(number)
            self.carry_out(self.state.leave(number, self.now))
        while self.preparing:
            self.finish(0)
        assert self.staged == set()
        assert self.state.staged == 0

    def live(self) -> list[tuple[int, Job]]:
        """The members that have not finished the epoch that all are to finish."""
        return [(number, job) for number, job in self.jobs.items() if job.epoch < 2]


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def joined(state: GroupState, *parts: str, lag: Lag = "detach", length: int = 100) -> None:
    for number, part in enumerate(parts):
        state.join(number, part, lag, 0.0)
        state.begin(number, 0, length, 0, 0, 0.0)


def prepare(state: GroupState, size: int = SIZE) -> tuple[BatchName | None, list[Decision]]:
    chosen, made = state.choose(0.0)
    if chosen is not None:
        made = made + state.prepared(chosen, size, 0.0)
    return chosen, made


def test_a_batch_is_prepared_once_and_given_to_all_members_that_want_it() -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1", "0/1")
    for member in range(3):
        assert state.want(member, name(0), 0.0) == []
    assert prepare(state) == (name(0), [Give(0, name(0)), Give(1, name(0)), Give(2, name(0))])
    assert prepare(state) == (None, [])
    assert (state.prepared_batches, state.given_batches) == (1, 3)


def test_a_batch_is_dropped_when_the_last_member_has_released_it() -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1")
    late = 2 * GATHER
    for member in range(2):
        state.want(member, name(0), 0.0)
    prepare(state)
    assert state.took(0, name(0), late) == []
    assert state.released(0, name(0), late) == []
    assert state.took(1, name(0), late) == []
    assert state.released(1, name(0), late) == [Drop(name(0))]


def test_batches_kept_for_a_member_that_dies_are_dropped() -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1")
    late = 2 * GATHER
    for member in range(2):
        state.want(member, name(0), 0.0)
    prepare(state)
    state.took(0, name(0), late)
    state.released(0, name(0), late)
    assert state.leave(1, late) == [Drop(name(0))]


def test_the_rank_that_is_furthest_behind_is_served_first() -> None:
    state = GroupState(1000)
    joined(state, "0/2", "1/2")
    mine = [name(i, part="0/2") for i in range(3)]
    theirs = [name(i, part="1/2") for i in range(3)]
    for number in range(3):
        state.want(0, mine[number], 0.0)
    assert prepare(state)[0] == mine[0]
    assert prepare(state)[0] == mine[1]
    for number in range(3):
        state.want(1, theirs[number], 0.0)
    # The first rank has two batches ready, the second none.
    assert [prepare(state)[0] for _ in range(4)] == [theirs[0], theirs[1], mine[2], theirs[2]]


def test_a_member_a_little_behind_is_helped_to_catch_up() -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1")
    state.members[0].done = MERGE
    state.want(0, name(MERGE), 0.0)
    state.want(1, name(0), 0.0)
    assert prepare(state)[0] == name(0)
    state.want(1, name(1), 0.0)
    state.took(1, name(0), 0.0)
    assert prepare(state)[0] == name(1)


def test_a_member_far_behind_takes_turns_with_the_others() -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1", length=10_000)
    state.members[0].done = 5 * MERGE
    chosen = []
    for number in range(2):
        state.want(0, name(5 * MERGE + number), 0.0)
        state.want(1, name(number), 0.0)
    for _ in range(4):
        found, made = prepare(state)
        chosen.append(found is not None and found.number < MERGE)
        for give in made:
            if isinstance(give, Give):
                state.took(give.member, give.name, 0.0)
    assert sorted(chosen[:2]) == [False, True]
    assert sorted(chosen[2:]) == [False, True]


def run_ahead(state: GroupState, batches: int) -> int:
    """Let the first member take up to ``batches``, and the second none; return how many it got."""
    got = 0
    for number in range(batches):
        state.want(0, name(number), 0.0)
        _, made = prepare(state)
        if Give(0, name(number)) not in made:
            break
        state.took(0, name(number), 0.0)
        state.released(0, name(number), 0.0)
        got += 1
    return got


def test_a_slow_member_is_detached_when_the_budget_is_full_and_is_served_again() -> None:
    state = GroupState(5 * SIZE)
    joined(state, "0/1", "0/1")
    assert run_ahead(state, 20) == 20
    assert state.staged <= 5 * SIZE
    # The batches that it needs first were kept.
    given: list[Decision] = []
    prepared = state.prepared_batches
    for number in range(6):
        given += state.want(1, name(number), 0.0)
        while not any(isinstance(g, Give) and g.name == name(number) for g in given):
            given += prepare(state)[1]
        state.took(1, name(number), 0.0)
        state.released(1, name(number), 0.0)
    assert [g.name.number for g in given if isinstance(g, Give)] == list(range(6))
    assert 0 < state.prepared_batches - prepared < 6


def test_with_lag_wait_no_member_runs_ahead_beyond_the_budget() -> None:
    state = GroupState(5 * SIZE)
    joined(state, "0/1", "0/1", lag="wait")
    assert run_ahead(state, 20) == 5
    assert state.choose(0.0) == (None, [])
    state.want(1, name(0), 0.0)
    state.took(1, name(0), 2 * GATHER)
    state.released(1, name(0), 2 * GATHER)
    assert prepare(state)[0] == name(5)


def test_a_member_that_joins_in_the_middle_begins_where_the_others_are() -> None:
    state = GroupState(1000)
    joined(state, "0/1", length=10)
    late = 2 * GATHER
    for number in range(4):
        state.want(0, name(number), late)
        prepare(state)
        state.took(0, name(number), late)
        state.released(0, name(number), late)
    assert state.tick(late) == [] or state.staged == 0
    state.join(1, "0/1", "detach", late)
    assert state.begin(1, 0, 10, None, 0, late)[0] == 4
    # No member has begun another epoch, or is of another rank.
    assert state.begin(1, 1, 10, None, 0, late)[0] == 0
    state.join(2, "1/2", "detach", late)
    assert state.begin(2, 0, 10, None, 0, late)[0] == 0


def test_a_member_that_joins_a_moment_later_begins_with_batch_0() -> None:
    state = GroupState(1000)
    joined(state, "0/1", length=10)
    for number in range(4):
        state.want(0, name(number), 1.0)
        prepare(state)
        state.took(0, name(number), 1.0)
        state.released(0, name(number), 1.0)
    state.join(1, "0/1", "detach", 2.0)
    assert state.begin(1, 0, 10, None, 0, 2.0)[0] == 0
    assert state.want(1, name(0), 2.0) == [Give(1, name(0))]
    assert state.prepared_batches == 4


@pytest.mark.parametrize("again", [False, True])
def test_the_error_of_a_batch_goes_to_all_members_that_want_it(again: bool) -> None:
    state = GroupState(1000)
    joined(state, "0/1", "0/1")
    for member in range(2):
        state.want(member, name(0), 0.0)
    assert state.choose(0.0)[0] == name(0)
    decisions = state.failed(name(0), b"why", 0.0)
    assert decisions == [Fail(0, name(0), b"why"), Fail(1, name(0), b"why")]
    if again:
        state.want(0, name(0), 0.0)
        assert prepare(state) == (name(0), [Give(0, name(0))])
    else:
        assert prepare(state) == (None, [])


@pytest.mark.parametrize("local", [False, True], ids=["prepared-for-it", "it-gets-it-elsewhere"])
def test_a_batch_is_kept_for_another_machine_until_it_was_given_it(local: bool) -> None:
    state = GroupState(budget=5 * SIZE)
    state.join(1, "0/1", "detach", 0.0)
    state.begin(1, 0, LENGTH, 0, 0, 0.0)
    state.join(-1, "0/1", "detach", 0.0, remote=True)
    state.begin(-1, 0, LENGTH, 0, 0, 0.0)
    late = GATHER + 1
    state.want(1, name(0), late)
    assert state.choose(late)[0] == name(0)
    assert state.prepared(name(0), SIZE, late, local=local) == [Give(1, name(0))]
    state.took(1, name(0), late)
    dropped = state.released(1, name(0), late)
    assert dropped == ([Drop(name(0))] if local else [])
    if not local:
        assert state.want(-1, name(0), late) == [Give(-1, name(0))]
        assert state.released(-1, name(0), late) == [Drop(name(0))]
