"""Batches of a group on several machines: each job gets each once, and each is prepared once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.membership import HostedGroup, Machine
from penstock.cluster.spanning import (
    FIRST_DELAY,
    LATE,
    PAUSE,
    MachineTurns,
    PrepareHere,
    Spanning,
    announced_unit,
    apart,
    hosts_of,
)
from tests.cluster.spanning_hosts import PART, ROWS, SIZE, SpanningHosts

GROUP = HostedGroup("n", "c", ROWS, 0, (PART,))


def batch(number: int) -> tuple[str, int, int, str]:
    return PART, 0, number, ""


def machine(name: str, *groups: HostedGroup, incarnation: int = 1) -> Machine:
    return Machine(name, f"{name}:1", incarnation, groups=groups)


def placed(me: str = "a", *others: str, now: float = 0.0) -> Spanning:
    spanning = Spanning(me)
    machines = [machine(name, GROUP) for name in (me, *others)]
    spanning.placed(hosts_of(GROUP, machines, me), machines, now)
    return spanning


def theirs(spanning: Spanning, machine: str) -> tuple[str, int, int, str]:
    """A batch that belongs to this machine."""
    return next(batch(n) for n in range(64) if spanning.owner(batch(n)) == machine)


def check(hosts: SpanningHosts) -> None:
    expected = [(epoch, n) for epoch in range(hosts.epochs) for n in range(hosts.length)]
    for host in hosts.hosts.values():
        for job in host.jobs.values():
            assert job.taken == expected
    assert set(hosts.prepared) == set(expected)


# Whole groups.


@settings(max_examples=40, deadline=None)
@given(
    machines=st.integers(2, 4),
    jobs=st.integers(1, 3),
    workers=st.integers(1, 3),
    seed=st.integers(0, 3),
    lag=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_where_nothing_fails_each_batch_is_prepared_once_in_the_cluster(
    machines: int, jobs: int, workers: int, seed: int, lag: float
) -> None:
    steps = [0.01 * (lag if number == seed % machines else 1.0) for number in range(machines)]
    hosts = SpanningHosts([0.02] * machines, jobs=jobs, workers=workers, steps=steps)
    hosts.run()
    check(hosts)
    assert set(hosts.prepared.values()) == {1}
    counts = [host.spanning.counts for host in hosts.hosts.values()]
    assert sum(one.prepared for one in counts) == hosts.length * hosts.epochs
    assert [one.received + one.prepared for one in counts] == [40] * machines
    assert sum(one.again + one.late + one.local for one in counts) == 0


@settings(max_examples=40, deadline=None)
@given(
    at=st.floats(0.0, 1.0),
    back=st.floats(0.05, 3.0),
    machines=st.integers(2, 4),
    jobs=st.integers(1, 2),
)
def test_a_machine_that_dies_and_comes_back_costs_no_batch(
    at: float, back: float, machines: int, jobs: int
) -> None:
    hosts = SpanningHosts([0.02] * machines, jobs=jobs, length=30)
    hosts._at(at, lambda: hosts.kill("m1"))
    hosts._at(at + back, lambda: hosts.restart("m1"))
    hosts.run()
    check(hosts)


def test_a_machine_that_never_answers_delays_others_for_a_limited_time() -> None:
    hosts = SpanningHosts([0.02, 0.02], silent=frozenset({"m1"}))
    hosts.run()
    check(hosts)
    counts = hosts.hosts["m0"].spanning.counts
    assert counts.received == 0
    assert counts.hedged >= 1
    # It waits once, and not once for each batch.
    assert hosts.now < 3 * FIRST_DELAY


def test_over_a_slow_link_each_machine_prepares_for_itself() -> None:
    hosts = SpanningHosts([0.02, 0.02], bandwidth=SIZE / 0.5, length=200)
    hosts.run()
    check(hosts)
    for host in hosts.hosts.values():
        assert host.spanning.counts.local > 150
        assert host.spanning.counts.received < 50


def test_a_link_that_gets_faster_is_used_again() -> None:
    hosts = SpanningHosts([0.02, 0.02], bandwidth=SIZE / 0.5, length=3000, epochs=1)
    hosts._at(10.0, lambda: setattr(hosts, "bandwidth", 1e8))
    hosts.run()
    check(hosts)
    for host in hosts.hosts.values():
        assert host.spanning.counts.received > 500


def test_a_machine_that_is_three_times_as_fast_prepares_three_times_as_many() -> None:
    hosts = SpanningHosts([0.02, 0.06], steps=[0.001, 0.001], length=2000, epochs=1)
    hosts.run()
    check(hosts)
    fast, slow = (host.spanning.counts.prepared for host in hosts.hosts.values())
    assert 2.0 < fast / slow < 4.0
    # Machines learn of the measured speeds at the same time here.
    assert sum(hosts.prepared.values()) <= 2000 + 40


def test_batches_on_their_way_stay_within_their_bytes() -> None:
    hosts = SpanningHosts([0.001] * 4, steps=[0.0] * 4, total_bytes=3 * SIZE, length=100)
    hosts.run()
    check(hosts)
    assert hosts.most_in_flight <= 3 * SIZE


def test_a_small_budget_lets_a_machine_that_lags_prepare_again() -> None:
    hosts = SpanningHosts([0.002, 0.002], steps=[0.001, 0.1], budget=8 * SIZE, length=60)
    hosts.run()
    check(hosts)
    for host in hosts.hosts.values():
        assert host.state.staged <= 8 * SIZE


# Single decisions.


def test_batches_are_dealt_in_turns_and_by_speed() -> None:
    equal = MachineTurns({"a": 0, "b": 900, "c": 100})
    assert [[equal.owner(PART, n) for n in range(30)].count(name) for name in "abc"] == [10] * 3
    fast = MachineTurns({"a": 100, "b": 300})
    dealt = [fast.owner(PART, number) for number in range(64)]
    assert [dealt.count("a"), dealt.count("b")] == [16, 48]
    assert max(len(run) for run in "".join(dealt).split("a")) <= 4
    assert MachineTurns({"a": 100, "b": 140})._turns == ("a", "b")


def test_a_batch_that_no_other_batch_fits_is_prepared_here() -> None:
    spanning = placed("a", "b")
    assert {spanning.route((PART, 0, -1 - n, ""), 0.0) for n in range(8)} == {"here"}
    assert spanning.route(("0/2 x 8", 0, 0, ""), 0.0) == "here"


def test_a_batch_that_is_late_is_prepared_here_once_and_the_first_result_counts() -> None:
    spanning = placed("a", "b")
    name = theirs(spanning, "b")
    ask = spanning.ask(name, 0.0)
    assert spanning.tick(FIRST_DELAY - 0.1) == []
    assert spanning.tick(FIRST_DELAY) == [PrepareHere(name)]
    assert spanning.tick(FIRST_DELAY + 1) == []
    spanning.prepared(name, ROWS, SIZE, 0.1)
    assert not spanning.arriving(ask.request, SIZE, 9.0)
    assert not spanning.arrived(ask.request, 9.0)
    assert (spanning.counts.hedged, spanning.counts.again, spanning.counts.late) == (1, 1, 1)
    assert spanning.in_flight == spanning.open_requests == 0


def test_the_batches_of_a_lost_machine_are_prepared_here_at_once_until_it_is_tried_again() -> None:
    spanning = placed("a", "b")
    name = theirs(spanning, "b")
    spanning.ask(name, 0.0)
    assert spanning.lost("b", 1.0) == [PrepareHere(name)]
    assert spanning.route(name, 1.0 + PAUSE - 0.1) == "here"
    assert spanning.route(name, 1.0 + PAUSE) == "ask"
    ask = spanning.ask(name, 1.0 + PAUSE)
    assert spanning.route(batch(name[2] + 2), 1.0 + PAUSE) == "here"
    assert spanning.arriving(ask.request, SIZE, 6.1)
    assert spanning.arrived(ask.request, 6.2)
    assert spanning.route(batch(name[2] + 2), 6.2) == "ask"


def test_a_machine_that_was_restarted_is_asked_again_and_owes_nothing() -> None:
    spanning = placed("a", "b")
    name = theirs(spanning, "b")
    spanning.ask(name, 0.0)
    machines = [machine("a", GROUP), machine("b", GROUP, incarnation=2)]
    assert spanning.placed(hosts_of(GROUP, machines, "a"), machines, 1.0) == [PrepareHere(name)]
    assert spanning.route(name, 1.0) == "ask"


def test_a_machine_that_refuses_again_and_again_is_left_alone_for_a_while() -> None:
    spanning = placed("a", "b")
    mine = [batch(n) for n in range(64) if spanning.owner(batch(n)) == "b"]
    for name in mine[:LATE]:
        ask = spanning.ask(name, 0.0)
        assert spanning.unanswered(ask.request, 0.1) == [PrepareHere(name)]
    assert spanning.route(mine[LATE], 0.1) == "here"


@pytest.mark.parametrize("me", ["a", "b"])
def test_of_two_machines_that_ask_each_other_the_first_prepares(me: str) -> None:
    other = "b" if me == "a" else "a"
    spanning = placed(me, other)
    name = theirs(spanning, other)
    spanning.ask(name, 0.0)
    accepted, decisions = spanning.asked_by(other, name, 0.1)
    assert (accepted, decisions) == ((True, [PrepareHere(name)]) if me == "a" else (False, []))


def test_a_batch_that_another_machine_asks_for_is_prepared_here_whoever_it_belongs_to() -> None:
    spanning = placed("a", "b", "c")
    name = theirs(spanning, "c")
    assert spanning.asked_by("b", name, 0.0) == (True, [])
    assert spanning.route(name, 0.0) == "here"
    spanning.ended(name)
    assert spanning.route(name, 0.0) == "ask"


def test_batches_that_cannot_be_sent_are_never_asked_for() -> None:
    spanning = placed("a", "b")
    spanning.unsendable()
    assert spanning.route(theirs(spanning, "b"), 0.0) == "here"


def test_only_equal_groups_take_part_and_others_of_the_name_are_named() -> None:
    machines = [
        machine("a", GROUP),
        machine("b", GROUP._replace(unit=4, speed=7, parts=(PART, "0/1 x 4"))),
        machine("c", GROUP._replace(content="other")),
        machine("d", GROUP._replace(name="other", unit=2)),
        machine("e"),
    ]
    assert hosts_of(GROUP, machines, "a") == {PART: {"a": 0, "b": 7}}
    assert apart(GROUP, machines, "a") == ["c"]
    assert announced_unit("n", "c", machines, "a") == 4
    assert announced_unit("other", "c", machines, "d") is None
