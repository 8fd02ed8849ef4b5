"""Membership: all machines agree soon after the last failure, on exactly those that are alive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from benchmarks.simulate.machines import Machines
from penstock.cluster.membership import (
    BEAT,
    FLAPPING,
    GATHER,
    LIMIT,
    LOG,
    LONGEST_HOLD,
    NEVER,
    Beat,
    ClusterMembership,
    ClusterView,
    Heartbeat,
    HeartbeatAnswer,
    Installed,
    Machine,
    MemberDecision,
    Probe,
    Stamp,
    ViewUpdate,
)

SEEDS = 3

CONVERGED = LIMIT * (SEEDS + 1) + 4 * BEAT
"""Seconds after the last failure until all agree, if the head must be found anew."""

HEALED = LIMIT + BEAT
"""Seconds after a network that was cut heals until all have the same view."""


def machine(name: str, incarnation: int = 1, version: int = 1) -> Machine:
    return Machine(name, f"{name}:1", incarnation, cache_bytes=1 << 30, version=version)


def beat_of(sender: Machine, stamp: Stamp = NEVER, head: str = "", size: int = 1) -> Heartbeat:
    return Heartbeat(sender, stamp, head, size)


def names(view: ClusterView) -> list[str]:
    return [found.name for found in view.machines]


def views(decisions: list[MemberDecision]) -> list[ClusterView]:
    return [decision.view for decision in decisions if isinstance(decision, Installed)]


def probes(decisions: list[MemberDecision]) -> list[str]:
    return [decision.machine.name for decision in decisions if isinstance(decision, Probe)]


def beats(decisions: list[MemberDecision]) -> list[str]:
    return [decision.address for decision in decisions if isinstance(decision, Beat)]


def head_with(*others: str, now: float = 0.0) -> ClusterMembership:
    """A head that has these machines in its view."""
    head = ClusterMembership(machine("a"), ["a:1", "b:1"], now)
    head.unanswered("b:1", now)
    head.tick(now)
    for name in others:
        head.heartbeat(beat_of(machine(name)), now)
    head.tick(now + GATHER)
    assert names(head.view) == ["a", *others]
    return head


# Whole clusters.


class Failures(RuleBasedStateMachine):
    """Machines that start, die, restart, leave and are cut off, in any order and at any time."""

    @initialize(size=st.integers(1, 6), seed=st.integers(0, 1000))
    def begin(self, size: int, seed: int) -> None:
        self.machines = Machines(size, SEEDS, seed)
        self.dead: list[str] = []
        self.next = size

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.machines.run(seconds)

    @rule(place=st.integers(0, 99), leaves=st.booleans())
    def end(self, place: int, leaves: bool) -> None:
        running = list(self.machines.members)
        # One seed stays: without any, nobody can be head.
        spare = [name for name in running if name != "m0"]
        if spare:
            name = spare[place % len(spare)]
            (self.machines.leave if leaves else self.machines.kill)(name)
            self.dead.append(name)

    @rule()
    def restart_the_first_seed(self) -> None:
        self.machines.kill("m0")
        self.machines.start("m0")

    @precondition(lambda self: self.dead)
    @rule(place=st.integers(0, 99))
    def restart(self, place: int) -> None:
        name = self.dead.pop(place % len(self.dead))
        self.machines.start(name)

    @rule()
    def join(self) -> None:
        if len(self.machines.members) < 9:
            self.machines.start(f"m{self.next}")
            self.next += 1

    @rule(sides=st.lists(st.integers(0, 2), min_size=9, max_size=9))
    def cut(self, sides: list[int]) -> None:
        running = list(self.machines.members)
        sided = list(zip(running, sides, strict=False))
        self.machines.cut([[name for name, side in sided if side == group] for group in range(3)])

    @rule()
    def heal(self) -> None:
        self.machines.heal()

    def teardown(self) -> None:
        if not hasattr(self, "machines"):
            return
        self.machines.heal()
        # Heartbeats of machines that have just died may still arrive.
        self.machines.run(BEAT)
        # A machine that was removed often stays outside for a while.
        allowed = CONVERGED + LONGEST_HOLD
        assert self.machines.run(allowed, self.machines.agree) < allowed, self.machines.views()
        # And it stays like that.
        stamp = next(iter(self.machines.views().values())).stamp
        self.machines.run(3 * LIMIT)
        assert {view.stamp for view in self.machines.views().values()} == {stamp}


TestFailures = Failures.TestCase
TestFailures.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(
    size=st.integers(4, 12),
    sides=st.lists(st.booleans(), min_size=12, max_size=12),
    cut_for=st.sampled_from([1.0, 4.0, 10.0, 40.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_halves_of_a_cut_network_agree_soon_after_it_heals(
    size: int, sides: list[bool], cut_for: float, seed: int
) -> None:
    machines = Machines(size, SEEDS, seed)
    machines.run(10.0)
    assert machines.agree()
    listed = list(machines.members)
    halves = [
        [n for n, side in zip(listed, sides, strict=False) if side is s] for s in (True, False)
    ]
    machines.cut(halves)
    machines.run(cut_for)
    machines.heal()

    def same_view() -> bool:
        return len(set(machines.views().values())) == 1

    assert machines.run(60.0, same_view) <= HEALED
    assert machines.run(60.0, machines.agree) <= HEALED


def test_each_half_with_a_seed_goes_on_by_itself() -> None:
    machines = Machines(6, SEEDS)
    machines.run(10.0)
    machines.cut([["m0", "m3"], ["m1", "m2", "m4", "m5"]])
    machines.run(LIMIT * 3)
    assert sorted(machines.heads()) == ["m0", "m1"]
    assert names(machines.members["m3"].view) == ["m0", "m3"]
    assert names(machines.members["m5"].view) == ["m1", "m2", "m4", "m5"]
    machines.heal()
    machines.run(LIMIT)
    # The larger half keeps its head.
    assert machines.heads() == ["m1"]
    assert machines.agree()


def test_a_half_without_a_seed_keeps_its_last_view() -> None:
    machines = Machines(5, 2)
    machines.run(10.0)
    machines.cut([["m0", "m1", "m2"], ["m3", "m4"]])
    machines.run(LIMIT * 4)
    assert names(machines.members["m4"].view) == ["m0", "m1", "m2", "m3", "m4"]
    assert names(machines.members["m2"].view) == ["m0", "m1", "m2"]


def test_the_next_seed_takes_over_and_the_old_head_comes_back_as_a_member() -> None:
    machines = Machines(6, SEEDS)
    machines.run(10.0)
    assert machines.heads() == ["m0"]
    before = machines.members["m5"].view.stamp
    machines.kill("m0")
    assert machines.run(60.0, machines.agree) <= LIMIT + BEAT
    assert machines.heads() == ["m1"]
    after = machines.members["m5"].view.stamp
    assert after.term > before.term
    machines.start("m0")
    assert machines.run(60.0, machines.agree) <= LIMIT
    assert machines.heads() == ["m1"]
    assert machines.members["m5"].view.stamp.term == after.term


def test_control_messages_grow_with_the_number_of_machines_not_its_square() -> None:
    per_second = {}
    for size in (20, 40):
        machines = Machines(size, SEEDS)
        machines.run(10.0)
        assert machines.agree()
        before = machines.traffic.messages
        machines.run(10.0)
        per_second[size] = (machines.traffic.messages - before) / 10.0
    # A heartbeat and an answer each, and those between the head and the other seeds.
    assert per_second[40] - per_second[20] == pytest.approx(40.0, rel=0.05)


# One machine.


def test_no_two_heads_use_the_same_term() -> None:
    seeds = ["a:1", "b:1", "c:1"]
    terms = []
    for name in ("a", "b", "c"):
        head = ClusterMembership(machine(name), seeds, 0.0)
        for address in seeds:
            if address != head.me.address:
                head.unanswered(address, 0.0)
        (view,) = views(head.tick(0.0))
        terms.append(view.stamp.term)
    assert terms == [0, 1, 2]


def test_a_view_of_a_higher_term_makes_the_head_begin_a_newer_one() -> None:
    head = head_with("b", "c")
    _, decisions = head.heartbeat(beat_of(machine("c"), Stamp(7, 9, 4)), 1.0)
    (view,) = views(decisions)
    assert view.stamp.term == 8
    assert names(view) == ["a", "b", "c"]


def test_a_restarted_machine_keeps_its_place_and_stale_messages_of_it_are_ignored() -> None:
    head = head_with("b", "c")
    head.heartbeat(beat_of(machine("c", incarnation=5)), 1.0)
    (view,) = views(head.tick(1.0 + GATHER))
    assert names(view) == ["a", "b", "c"]
    assert view.named["c"].incarnation == 5
    head.heartbeat(beat_of(machine("c", incarnation=1)), 2.0)
    assert views(head.tick(2.0 + GATHER)) == []
    assert head.view.named["c"].incarnation == 5


def test_joins_at_the_same_time_make_one_view() -> None:
    head = head_with()
    for number in range(50):
        head.heartbeat(beat_of(machine(f"x{number:02}")), 1.0 + number * 0.004)
    made = views(head.tick(1.0 + GATHER))
    assert len(made) == 1
    assert len(made[0].machines) == 51


def test_a_silent_machine_is_removed_after_the_limit_and_not_before() -> None:
    head = head_with("b", "c")
    for second in range(1, 6):
        now = float(second)
        head.heartbeat(beat_of(machine("b")), now)
        head.tick(now)
        head.tick(now + GATHER)
        assert ("c" in names(head.view)) is (now <= LIMIT)


def test_a_lost_connection_makes_a_machine_suspect_at_once_until_it_answers() -> None:
    member = ClusterMembership(machine("c"), ["a:1"], 0.0)
    view = ClusterView(Stamp(0, 1, 1), "a:1", (machine("a"), machine("b"), machine("c")))
    answer = HeartbeatAnswer(
        machine("a"), view.stamp, "a:1", 3, ViewUpdate(view.stamp, "a:1", None, view.machines)
    )
    member.answered("a:1", answer, 0.0)
    member.tick(0.0)
    assert probes(member.lost("b", 0.5)) == []  # That is for the head.
    assert member.suspects == {"b"}
    (beat,) = [d for d in member.tick(0.5) if isinstance(d, Beat)]
    assert (beat.address, beat.heartbeat.suspects) == ("a:1", (("b", 1),))
    # It is asked again from time to time, ever less often.
    asked = [now for now in range(1, 200) if probes(member.tick(float(now)))]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps[:3] == [2, 4, 8]
    assert max(gaps) == 30
    member.heard("b", 1)
    assert member.suspects == set()


def test_the_head_probes_a_suspect_and_removes_it_only_if_it_does_not_answer() -> None:
    head = head_with("b", "c")
    beat = Heartbeat(machine("b"), head.view.stamp, "a:1", 3, suspects=(("c", 1),))
    assert probes(head.heartbeat(beat, 1.0)[1]) == ["c"]
    head.probed(machine("c"), True, 1.1)
    assert views(head.tick(1.1 + GATHER)) == []
    head.probed(machine("c"), False, 2.0)
    (view,) = views(head.tick(2.0 + GATHER))
    assert names(view) == ["a", "b"]
    # A report on its earlier life says nothing.
    head.heartbeat(beat_of(machine("c", incarnation=4)), 2.5)
    head.tick(2.5 + GATHER)
    assert "c" in names(head.view)
    assert probes(head.heartbeat(beat, 3.0)[1]) == []


def test_a_machine_that_flaps_stays_outside_ever_longer() -> None:
    head = head_with("b")
    now, outside = 1.0, []
    for _ in range(6):
        head.probed(head.view.named["b"], False, now)
        head.tick(now + GATHER)
        assert names(head.view) == ["a"]
        removed = now
        while "b" not in names(head.view):
            now += 0.5
            head.heartbeat(beat_of(machine("b")), now)
            head.tick(now + GATHER)
        outside.append(now - removed)
        now += 0.5
    assert outside == [0.5, 3.0, 6.0, 12.0, 24.0, 30.0]
    # After a quiet time it is treated like any other.
    now += FLAPPING + 1.0
    head.heartbeat(beat_of(machine("b")), now - 0.1)
    head.probed(machine("b"), False, now)
    head.tick(now + GATHER)
    head.heartbeat(beat_of(machine("b")), now + 1.0)
    head.tick(now + 1.0 + GATHER)
    assert names(head.view) == ["a", "b"]


def test_a_machine_of_another_version_is_not_admitted() -> None:
    head = head_with("b")
    head.heartbeat(beat_of(machine("old", version=0)), 1.0)
    assert views(head.tick(1.0 + GATHER)) == []
    assert names(head.view) == ["a", "b"]


def test_a_machine_that_leaves_is_removed_at_once() -> None:
    head = head_with("b", "c")
    head.heartbeat(Heartbeat(machine("c"), head.view.stamp, "", 3, leaving=True), 1.0)
    (view,) = views(head.tick(1.0 + GATHER))
    assert names(view) == ["a", "b"]


def test_members_send_heartbeats_to_the_head_only() -> None:
    member = ClusterMembership(machine("z"), ["a:1", "b:1", "c:1"], 0.0)
    assert beats(member.tick(0.0)) == ["a:1", "b:1", "c:1"]
    stamp = Stamp(1, 1, 1)
    update = ViewUpdate(stamp, "b:1", None, (machine("b"), machine("z")))
    member.answered("b:1", HeartbeatAnswer(machine("b"), stamp, "b:1", 2, update), 0.1)
    assert beats(member.tick(BEAT)) == ["b:1"]
    assert beats(member.tick(BEAT + 0.1)) == []


def test_two_machines_that_name_each_other_as_head_do_not_keep_a_third_waiting() -> None:
    seed = ClusterMembership(machine("c"), ["a:1", "b:1", "c:1"], 0.0)
    stamp = Stamp(0, 1, 1)
    now = 0.0
    while not seed.is_head:
        for address in beats(seed.tick(now)):
            name = address[0]
            other = {"a": "b:1", "b": "a:1"}[name]
            seed.answered(address, HeartbeatAnswer(machine(name), stamp, other, 3), now + 0.01)
        now += 0.25
        assert now < 5 * LIMIT


# Views and differences.


@given(
    changes=st.lists(
        st.tuples(st.sampled_from("bcdef"), st.sampled_from(["join", "gone"])), max_size=30
    ),
    known=st.integers(0, 30),
)
@settings(deadline=None)
def test_differences_lead_to_the_same_view_as_the_whole_list(
    changes: list[tuple[str, str]], known: int
) -> None:
    head = head_with()
    seen = [head.view]
    now, incarnation = 100.0, 1
    for name, change in changes:
        now += LONGEST_HOLD + FLAPPING
        if change == "join":
            incarnation += 1
            head.heartbeat(beat_of(machine(name, incarnation)), now)
        elif name in head.view.named:
            head.probed(head.view.named[name], False, now)
        seen += views(head.tick(now + GATHER))
    old = seen[known % len(seen)]
    answer, _ = head.heartbeat(beat_of(machine("q", version=9), old.stamp), now + GATHER)
    if old == head.view:
        assert answer.update is None
    else:
        assert answer.update is not None
        assert answer.update.since == old.stamp
        assert answer.update.apply(old) == head.view


def test_a_machine_that_is_far_behind_gets_the_whole_list() -> None:
    head = head_with()
    first = head.view
    for number in range(LOG + 5):
        head.heartbeat(beat_of(machine("b", 10 + number)), 10.0 + number)
        head.tick(10.0 + number + GATHER)
    answer, _ = head.heartbeat(beat_of(machine("q", version=9), first.stamp), 100.0)
    assert answer.update is not None
    assert answer.update.since is None
    assert answer.update.apply(first) == head.view


def test_a_difference_from_another_view_is_not_applied() -> None:
    view = ClusterView(Stamp(0, 1, 1), "a:1", (machine("a"),))
    update = ViewUpdate(Stamp(0, 1, 3), "a:1", Stamp(0, 1, 2), (machine("b"),))
    assert update.apply(view) is None


# Losing a head, and meeting another.


def follower(now: float = 0.0) -> ClusterMembership:
    """A machine that follows head a, and whose heartbeats are all sent."""
    member = ClusterMembership(machine("z"), ["a:1", "b:1"], now)
    stamp = Stamp(0, 1, 1)
    update = ViewUpdate(stamp, "a:1", None, (machine("a"), machine("z")))
    member.tick(now)
    member.answered("a:1", HeartbeatAnswer(machine("a"), stamp, "a:1", 2, update), now)
    return member


def test_one_heartbeat_without_an_answer_is_repeated_and_two_start_a_search() -> None:
    member = follower()
    assert beats(member.tick(1.0)) == ["a:1"]
    member.unanswered("a:1", 1.1)
    assert beats(member.tick(1.1)) == ["a:1"]
    member.unanswered("a:1", 1.2)
    assert member.head == ""
    assert beats(member.tick(1.2)) == ["a:1", "b:1"]


def test_a_head_that_says_nothing_at_all_is_given_up_after_the_limit() -> None:
    member = follower()
    assert beats(member.tick(LIMIT)) == ["a:1"]
    assert beats(member.tick(LIMIT + 0.1)) == ["a:1", "b:1"]


def test_the_head_of_the_larger_cluster_stays_whatever_its_term() -> None:
    large = head_with("c", "d")
    rival = Heartbeat(machine("b"), Stamp(99, 1, 1), "b:1", 2)
    answer, decisions = large.heartbeat(rival, 1.0)
    assert large.is_head
    assert answer.head == "a:1"
    (view,) = views(decisions)
    assert view.stamp.term > 99
    small = head_with("c")
    rival = Heartbeat(machine("b"), Stamp(-1, 1, 1), "b:1", 3)
    answer, _ = small.heartbeat(rival, 1.0)
    assert not small.is_head
    assert answer.head == "b:1"
