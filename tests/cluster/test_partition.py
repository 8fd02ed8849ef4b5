"""Where samples come from: owners, credits, hedges and offers, whatever other machines do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cluster.holdings import PROMISE, Holdings
from penstock.cluster.membership import Machine
from penstock.cluster.partition import (
    CREDIT_STEP,
    FIRST_CREDIT,
    FIRST_DELAY,
    LEAST_CREDIT,
    LEAST_DELAY,
    LOCAL_READ,
    LONGEST_READ,
    MOST_CREDIT,
    MOST_DELAY,
    SAMPLE_BYTES,
    Ask,
    Keep,
    OfferValues,
    Partition,
    PartitionDecision,
    PeerCredit,
    ReadStorage,
    SendReply,
    Settled,
    Tell,
)
from penstock.cluster.placement import NOBODY, FirstOwners, Placement
from penstock.store.admission import Admission

NAMES = ("a", "b", "c", "me")
SAMPLES = 40
SIZE = 1000

LONGEST = 3 * (2 * MOST_DELAY + PROMISE) + PROMISE + LOCAL_READ
"""Seconds after which a batch is settled, whatever others do: up to three machines are asked, each
after a wait for credit, and each may wait for a read of another machine. Before that, another batch
may be reading the sample, and it may be on its way to the machine that keeps it."""


def layout() -> FirstOwners:
    """Sample 0 belongs to a, 1 to b, 2 to c, 3 to me, and so on."""
    return FirstOwners("f", NAMES, np.arange(SAMPLES, dtype=np.uint16) % 4)


def machine(name: str, incarnation: int = 1) -> Machine:
    return Machine(name, f"{name}:1", incarnation, cache_bytes=1 << 20)


def placement(*names: str, incarnation: int = 1) -> Placement:
    return Placement(layout(), [machine(name, incarnation) for name in names or NAMES])


def partition(room: int = 1 << 20, total_bytes: int = 1 << 30) -> Partition:
    holdings = Holdings("me", Admission(room), lambda key: SIZE)
    return Partition("me", placement(), holdings, total_bytes=total_bytes)


def asks(decisions: list[PartitionDecision]) -> list[Ask]:
    return [decision for decision in decisions if isinstance(decision, Ask)]


def reads(decisions: list[PartitionDecision]) -> list[int]:
    return [
        key for decision in decisions if isinstance(decision, ReadStorage) for key in decision.keys
    ]


def offers(decisions: list[PartitionDecision]) -> list[OfferValues]:
    return [decision for decision in decisions if isinstance(decision, OfferValues)]


def settled(decisions: list[PartitionDecision]) -> list[int]:
    return [decision.batch for decision in decisions if isinstance(decision, Settled)]


def test_one_request_for_each_owner_however_many_batches() -> None:
    part = partition()
    decisions = part.want({0: [0, 1, 4, 3], 1: [8, 2, 5]}, 0.0)
    found = {ask.owner: ask.keys for ask in asks(decisions)}
    assert found == {"a": (0, 4, 8), "b": (1, 5), "c": (2,)}
    assert len(asks(decisions)) == 3
    assert reads(decisions) == [3]


def test_a_sample_that_the_store_did_not_take_is_withdrawn_from_its_owner() -> None:
    """The disk of this machine is full: the engine does not report the sample as read."""
    part = partition()
    [ask] = asks(part.want({0: [0]}, 0.0))
    assert reads(part.answered("a", ask.request, 0.01, absent=[0])) == [0]
    assert Tell("a", {0: "a"}) in part.used(0, 0.02)


def test_a_sample_that_was_reported_as_read_is_not_withdrawn() -> None:
    part = partition()
    [ask] = asks(part.want({0: [0]}, 0.0))
    part.answered("a", ask.request, 0.01, absent=[0])
    assert offers(part.read({0: SIZE}, 0.02)) == [OfferValues("a", (0,))]
    assert part.used(0, 0.03) == []


def test_others_do_not_wait_for_a_sample_that_this_machine_could_not_keep() -> None:
    holdings = Holdings("me", Admission(1 << 20), lambda key: SIZE)
    part = Partition("me", placement(), holdings)
    assert reads(part.want({0: [3]}, 0.0)) == [3]
    assert holdings.asked("a", 1, [3], SIZE, 0.01).held == [3]
    [sent] = [made.reply for made in part.used(0, 0.02) if isinstance(made, SendReply)]
    assert (sent.peer, sent.absent) == ("a", [3])


def test_an_owner_does_not_wait_for_a_sample_that_its_reader_withdraws() -> None:
    holdings = Holdings("me", Admission(1 << 20), lambda key: SIZE)
    part = Partition("me", placement(), holdings)
    assert holdings.asked("a", 1, [3], SIZE, 0.0).absent == [3]
    assert holdings.asked("me", 2, [3], SIZE, 0.01).held == [3]
    [made] = part.told({3: "me"}, 0.02)
    assert isinstance(made, SendReply)
    assert (made.reply.peer, made.reply.absent) == ("me", [3])
    assert holdings.redirect(3) is None


def test_a_batch_is_settled_when_the_last_of_its_samples_has_arrived() -> None:
    part = partition()
    first, second = asks(part.want({7: [0, 1, 3]}, 0.0))
    assert not settled(part.answered("a", first.request, 0.01, {0: SIZE}))
    assert not part.is_settled(7)
    assert settled(part.answered("b", second.request, 0.02, {1: SIZE})) == [7]
    assert part.is_settled(7)
    counts = part.counts
    assert (counts.asked, counts.local, counts.remote, counts.storage) == (3, 0, 2, 1)


def test_a_batch_that_is_all_here_is_settled_at_once() -> None:
    part = partition()
    part.want({0: [3, 7]}, 0.0)
    part.read({3: SIZE, 7: SIZE}, 0.1)
    assert part.want({1: [7, 3]}, 0.2) == [Settled(1)]
    assert part.counts.local == 2


def test_a_sample_that_two_batches_want_is_asked_for_once_and_counts_twice() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    assert asks(part.want({1: [0, 0]}, 0.0)) == []
    assert settled(part.answered("a", ask.request, 0.01, {0: SIZE})) in ([0, 1], [1, 0])
    assert part.counts.remote == part.counts.asked == 3
    part.used(0, 0.1)
    assert part.bytes_held == SIZE
    part.used(1, 0.1)
    assert part.bytes_held == 0


# A sample that is being read for another batch of this machine.


def test_a_rank_that_runs_ahead_waits_for_the_read_of_another_rank() -> None:
    part = partition()
    assert reads(part.want({0: [3, 7]}, 0.0)) == [3, 7]
    decisions = part.want({1: [7, 11]}, 0.1)
    assert (reads(decisions), settled(decisions)) == ([11], [])
    assert part.tick(LOCAL_READ - 0.1) == []
    decisions = part.read({3: SIZE, 7: SIZE}, LOCAL_READ - 0.05)
    assert settled(decisions) == [1]
    assert (part.to_prepare(0), part.to_prepare(1)) == ([], [11])
    part.used(0, LOCAL_READ)
    counts = part.counts
    assert (counts.asked, counts.local, counts.storage) == (4, 1, 3)


def test_batches_that_begin_together_read_a_sample_once() -> None:
    part = partition()
    decisions = part.want({0: [3, 3], 1: [3], 2: [3, 7]}, 0.0)
    assert (reads(decisions), settled(decisions)) == ([3, 7], [0])
    assert settled(part.read({3: SIZE}, 0.1)) == [1, 2]
    assert (part.counts.storage, part.counts.local) == (3, 2)


def test_the_next_batch_reads_a_sample_that_the_first_one_has_not_read() -> None:
    """It was dropped, or the sample could not be stored."""
    part = partition()
    part.want({0: [3]}, 0.0)
    part.want({1: [3]}, 0.1)
    part.want({2: [3]}, 0.1)
    decisions = part.used(0, 0.2)
    assert (reads(decisions), settled(decisions)) == ([3], [1])
    assert settled(part.read({3: SIZE}, 0.3)) == [2]


def test_a_sample_that_another_machine_will_keep_is_asked_from_there_by_the_next_batch() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    assert reads(part.answered("a", ask.request, 0.1, absent=[0])) == [0]
    assert asks(part.want({1: [0]}, 0.2)) == []
    assert part.read({0: SIZE}, 0.3) == [OfferValues("a", (0,))]
    assert part.used(0, 0.4) == []
    (again,) = asks(part.offered("a", [0], [], 0.5))
    assert (again.owner, again.keys) == ("a", (0,))
    assert settled(part.answered("a", again.request, 0.6, {0: SIZE})) == [1]
    assert (part.counts.storage, part.counts.remote) == (1, 1)
    part.used(1, 0.7)
    assert part.bytes_held == 0


def test_an_offer_that_is_not_answered_is_not_waited_for_without_a_limit() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    part.answered("a", ask.request, 0.1, absent=[0])
    part.want({1: [0]}, 0.2)
    part.want({2: [0]}, 0.2)
    part.read({0: SIZE}, 1.0)
    assert part.tick(1.0 + PROMISE - 0.1) == []
    decisions = part.tick(1.0 + PROMISE)
    assert (reads(decisions), settled(decisions)) == ([0], [1, 2])


def test_a_read_that_does_not_end_is_not_waited_for_without_a_limit() -> None:
    part = partition()
    part.want({0: [3]}, 0.0)
    part.want({1: [3], 2: [3]}, 0.1)
    decisions = part.tick(0.1 + LOCAL_READ)
    assert (reads(decisions), settled(decisions)) == ([3], [1, 2])


def test_nobody_waits_for_a_read_if_no_machine_has_room() -> None:
    part = partition(room=0)
    part.want({0: [3]}, 0.0)
    offered = offers(part.read({3: SIZE}, 0.1))
    while offered:
        offered = offers(part.offered(offered[0].to, [], [3], 0.1))
    decisions = part.want({1: [7], 2: [7]}, 0.2)
    assert (reads(decisions), settled(decisions)) == ([7], [1, 2])
    assert settled(part.want({3: [7]}, 0.3)) == [3]


# Slow and lost machines.


def test_a_slow_owner_is_hedged_and_its_late_answer_is_dropped() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0, 4]}, 0.0))
    part.answered("a", ask.request, 0.1, {0: SIZE})
    assert part.tick(FIRST_DELAY - 0.01) == []
    decisions = part.tick(FIRST_DELAY)
    assert reads(decisions) == [4]
    assert settled(decisions) == [0]
    assert part.answered("a", ask.request, 1.0, {4: SIZE}) == []
    counts = part.counts
    assert (counts.remote, counts.storage, counts.hedged, counts.late) == (1, 1, 1, 1)
    # Its owner has it, so it is not offered.
    assert part.read({4: SIZE}, 1.1) == []
    part.used(0, 1.2)
    assert part.bytes_held == 0


def test_a_hedged_sample_that_the_owner_turns_out_to_lack_is_offered_to_it() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    assert reads(part.tick(FIRST_DELAY)) == [0]
    part.answered("a", ask.request, 0.6, absent=[0])
    assert part.read({0: SIZE}, 0.7) == [OfferValues("a", (0,))]


def test_the_bytes_of_a_hedged_request_count_until_it_ends() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    part.tick(FIRST_DELAY)
    part.used(0, 0.6)
    assert part.bytes_held == ask.most_bytes
    part.failed(ask.request, 0.7)
    assert part.bytes_held == 0
    assert part.open_requests == 0


def test_a_peer_that_is_hedged_gets_half_the_credit_and_earns_it_back() -> None:
    part = partition()
    part.want({0: [0]}, 0.0)
    part.tick(FIRST_DELAY)
    assert part.peers["a"].credit == FIRST_CREDIT // 2
    part.tick(FIRST_DELAY + 1.0)
    assert part.peers["a"].credit == FIRST_CREDIT // 2  # Once for each request.
    (ask,) = asks(part.want({1: [4]}, 2.0))
    part.answered("a", ask.request, 2.01, {4: SIZE})
    assert part.peers["a"].credit == FIRST_CREDIT // 2 + CREDIT_STEP
    peer = PeerCredit()
    for _ in range(40):
        peer.too_late()
    assert peer.credit == LEAST_CREDIT
    for _ in range(400):
        peer.in_time()
    assert peer.credit == MOST_CREDIT


def test_a_lost_machine_is_not_waited_for_and_not_asked_until_it_answers() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0, 3]}, 0.0))
    decisions = part.lost("a", 0.01)
    assert reads(decisions) == [0]
    assert settled(decisions) == [0]
    assert part.open_requests == 0
    assert reads(part.want({1: [4]}, 0.02)) == [4]
    part.answered("a", ask.request, 0.03, {0: SIZE})
    assert part.counts.late == 1
    assert [found.owner for found in asks(part.want({2: [8]}, 0.04))] == ["a"]
    part.lost("a", 0.05)
    part.trusted("a", 0.06)
    assert [found.owner for found in asks(part.want({3: [12]}, 0.07))] == ["a"]


def test_the_delay_follows_the_slowest_twentieth_of_the_answers() -> None:
    peer = PeerCredit()
    rng = np.random.default_rng(0)
    nbytes = 10_000_000
    for seconds in rng.exponential(0.05, 4000):
        peer.answered(nbytes, float(seconds))
    # The 95th percentile of an exponential distribution is 3.0 times its mean.
    assert 0.1 < peer.delay(nbytes) < 0.2
    assert peer.delay(2 * nbytes) == pytest.approx(2 * peer.delay(nbytes), rel=0.01)
    assert peer.delay(0) == LEAST_DELAY
    assert peer.delay(10**12) == MOST_DELAY
    assert PeerCredit().delay(0) == FIRST_DELAY


# Credits.


def test_requests_wait_for_the_credit_of_their_peer_and_then_are_read() -> None:
    part = partition()
    part.peers["a"] = PeerCredit(credit=2 * SAMPLE_BYTES)
    (first,) = asks(part.want({0: [0, 4]}, 0.0))
    assert first.keys == (0, 4)
    assert asks(part.want({1: [8, 12]}, 0.0)) == []
    # A full answer frees the credit.
    (ask,) = asks(part.answered("a", first.request, 0.01, {0: SIZE, 4: SIZE}))
    assert ask.keys == (8, 12)
    part.peers["a"].credit = 0
    assert asks(part.want({2: [16]}, 0.02)) == []
    part.tick(0.02 + LEAST_DELAY / 2)
    assert part.counts.hedged == 0
    decisions = part.tick(0.02 + MOST_DELAY)
    assert 16 in reads(decisions)


def test_what_has_arrived_and_is_not_used_bounds_what_is_asked_for() -> None:
    part = partition(total_bytes=SAMPLE_BYTES * 3)
    (ask,) = asks(part.want({0: [0, 4, 8]}, 0.0))
    part.answered("a", ask.request, 0.01, dict.fromkeys((0, 4, 8), SAMPLE_BYTES))
    assert part.bytes_held == 3 * SAMPLE_BYTES
    # The consumer has a batch to use, so nothing more is asked for, however long it takes.
    assert asks(part.want({1: [12], 2: [1]}, 0.02)) == []
    assert part.tick(60.0) == []
    # Then batch 1 is the oldest. It may ask, whatever has arrived for later ones.
    decisions = part.used(0, 61.0)
    assert [found.keys for found in asks(decisions)] == [(12,), (1,)]
    part.want({3: [5]}, 61.0)
    (first, second) = asks(decisions)
    part.answered("b", second.request, 61.1, {1: 4 * SAMPLE_BYTES})
    (again,) = asks(part.answered("a", first.request, 61.2, redirected={12: "c"}))
    assert (again.owner, again.keys) == ("c", (12,))
    assert part.bytes_held > SAMPLE_BYTES * 3


def test_only_one_batch_at_a_time_may_exceed_the_total() -> None:
    part = partition(total_bytes=1)
    (ask,) = asks(part.want({0: [0]}, 0.0))
    part.tick(FIRST_DELAY)
    part.used(0, 0.6)
    # The bytes of batch 0 may still arrive, so batch 1 waits for them, but not for ever.
    assert asks(part.want({1: [1]}, 0.6)) == []
    assert part.bytes_held == ask.most_bytes
    assert reads(part.tick(0.6 + MOST_DELAY)) == [1]
    part.failed(ask.request, 2.0)
    part.used(1, 2.0)
    assert [found.keys for found in asks(part.want({2: [2]}, 2.1))] == [(2,)]


def test_samples_for_which_an_answer_had_no_room_are_asked_for_again() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0, 4]}, 0.0))
    (again,) = asks(part.answered("a", ask.request, 0.01, {0: SIZE}, left=[4]))
    assert (again.owner, again.keys) == ("a", (4,))
    assert again.request != ask.request


# Samples that their owner lacks.


def test_an_absent_sample_is_read_and_offered_to_its_owner() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    decisions = part.answered("a", ask.request, 0.01, absent=[0])
    assert reads(decisions) == [0]
    assert settled(decisions) == [0]
    assert part.read({0: SIZE}, 0.1) == [OfferValues("a", (0,))]
    assert part.bytes_held == SIZE  # The value is needed until the offer is answered.
    part.offered("a", [0], [], 0.2)
    assert (part.counts.offered, part.counts.spilled, part.bytes_held) == (1, 0, 0)


def test_an_offer_that_the_owner_refuses_goes_to_the_next_machines_and_the_owner_is_told() -> None:
    part = partition(room=0)
    (ask,) = asks(part.want({0: [0]}, 0.0))
    part.answered("a", ask.request, 0.01, absent=[0])
    part.read({0: SIZE}, 0.1)
    order = [name for name in placement().preference(0) if name not in ("a", "me")]
    (first,) = offers(part.offered("a", [], [0], 0.2))
    assert first == OfferValues(order[0], (0,))
    (second,) = offers(part.offered(order[0], [], [0], 0.3))
    assert second == OfferValues(order[1], (0,))
    assert part.offered(order[1], [0], [], 0.4) == [Tell("a", {0: order[1]})]
    assert (part.counts.refused, part.counts.spilled, part.counts.offered) == (2, 1, 1)
    # Machines that have refused are not offered anything again.
    (ask,) = asks(part.want({1: [4]}, 1.0))
    part.answered("a", ask.request, 1.1, absent=[4])
    assert part.read({4: SIZE}, 1.2) == [OfferValues(order[1], (4,))]


def test_if_no_machine_has_room_the_owner_is_told_once() -> None:
    part = partition(room=0)
    for batch, key in enumerate((0, 4)):
        (ask,) = asks(part.want({batch: [key]}, 0.0))
        part.answered("a", ask.request, 0.01, absent=[key])
        decisions = part.read({key: SIZE}, 0.1)
        while offers(decisions):
            decisions = part.offered(offers(decisions)[0].to, [], [key], 0.2)
        assert decisions == ([Tell("a", {0: ""})] if key == 0 else [])
    assert part.counts.refused == 3


def test_a_sample_of_this_machine_is_kept_or_spilled() -> None:
    part = partition(room=SIZE)
    part.want({0: [3, 7]}, 0.0)
    assert part.read({3: SIZE}, 0.1) == [Keep(3)]
    (offer,) = offers(part.read({7: SIZE}, 0.1))
    assert offer.to == placement().preference(7)[1]
    part.offered(offer.to, [7], [], 0.2)
    assert part.counts.spilled == 1
    # From now on it is asked from there.
    part.used(0, 0.3)
    (ask,) = asks(part.want({1: [7]}, 0.4))
    assert ask.owner == offer.to


def test_a_redirect_is_followed_once_and_an_outdated_one_ends_in_storage() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    (second,) = asks(part.answered("a", ask.request, 0.01, redirected={0: "b"}))
    assert (second.owner, second.keys) == ("b", (0,))
    decisions = part.answered("b", second.request, 0.02, redirected={0: "a"})
    assert reads(decisions) == [0]
    (ask,) = asks(part.want({1: [4]}, 1.0))
    (second,) = asks(part.answered("a", ask.request, 1.01, redirected={4: "c"}))
    assert reads(part.answered("c", second.request, 1.02, absent=[4])) == [4]
    # The owner does not know where it is: it gets the value.
    assert part.read({4: SIZE}, 1.1) == [OfferValues("a", (4,))]


def test_the_wait_for_the_read_of_another_machine_has_a_limit() -> None:
    part = partition()
    (ask,) = asks(part.want({0: [0]}, 0.0))
    part.answered("a", ask.request, 0.01, held=[0])
    assert part.tick(MOST_DELAY + 0.1) == []  # The owner is not slow.
    assert part.peers["a"].credit > FIRST_CREDIT
    assert reads(part.tick(0.01 + PROMISE)) == [0]


# Changes of the view.


def test_requests_to_a_machine_that_left_are_read_from_storage_and_go_to_the_new_owner() -> None:
    part = partition()
    part.want({0: [0]}, 0.0)
    smaller = placement("b", "c", "me")
    decisions = part.placed(smaller, 0.1)
    assert reads(decisions) == [0]
    owner = smaller.owner(0)
    expected: list[PartitionDecision] = [Keep(0)] if owner == "me" else [OfferValues(owner, (0,))]
    assert part.read({0: SIZE}, 0.2) == expected


def test_a_restarted_owner_lacks_a_sample_that_its_substitute_has() -> None:
    part = partition()
    part.placed(placement("b", "c", "me"), 0.0)
    part.placed(Placement(layout(), [machine("a", 9), *map(machine, ("b", "c", "me"))]), 1.0)
    key = next(key for key in range(0, SAMPLES, 4) if placement().preference(key)[1] != "me")
    substitute = placement().preference(key)[1]
    (ask,) = asks(part.want({0: [key]}, 1.1))
    assert ask.owner == "a"
    (second,) = asks(part.answered("a", ask.request, 1.2, absent=[key]))
    assert second.owner == substitute
    decisions = part.answered(substitute, second.request, 1.3, {key: SIZE})
    assert offers(decisions) == [OfferValues("a", (key,))]
    assert settled(decisions) == [0]
    assert part.counts.storage == 0


@pytest.mark.parametrize("restarted", [True, False])
def test_samples_that_spilled_to_a_machine_that_is_gone_are_absent(restarted: bool) -> None:
    holdings = Holdings("me", Admission(0), lambda key: SIZE)
    part = Partition("me", placement(), holdings)
    part.told({3: "a", 7: "b"}, 0.0)
    others = [machine("a", 2)] if restarted else []
    part.placed(Placement(layout(), [*others, *map(machine, ("b", "c", "me"))]), 1.0)
    reply = holdings.asked("c", 1, [3, 7], 100, 1.1)
    assert (reply.absent, reply.redirected) == ([3], {7: "b"})


def test_a_hedge_is_not_begun_before_the_time_of_a_read_from_storage() -> None:
    peer = PeerCredit()
    for _ in range(100):
        peer.answered(SIZE, 0.001)
    assert peer.delay(SIZE) == LEAST_DELAY
    assert peer.delay(SIZE, 0.3) == 0.3
    assert peer.delay(SIZE, 3600.0) == LONGEST_READ
    part = partition()
    part.reading = 2.0
    (ask,) = asks(part.want({0: [0]}, 0.0))
    assert part.tick(1.9) == []
    assert reads(part.tick(2.0)) == [0]
    assert (ask.owner, part.to_prepare(0)) == ("a", [0])


def test_what_is_to_be_prepared_is_neither_here_nor_on_its_way() -> None:
    part = partition()
    part.want({0: [3]}, 0.0)
    part.read({3: SIZE}, 0.1)
    (ask,) = asks(part.want({1: [3, 7, 0, 4]}, 0.2))
    assert part.to_prepare(1) == [7]
    part.answered("a", ask.request, 0.3, {0: SIZE}, absent=[4])
    assert part.to_prepare(1) == [7, 4]
    part.used(1, 0.4)
    assert part.to_prepare(1) == []


def test_a_machine_that_becomes_an_owner_late_lacks_what_its_substitute_has() -> None:
    part = partition()
    part.placed(placement(), 0.0, late={"a"})
    key = next(key for key in range(0, SAMPLES, 4) if placement().preference(key)[1] != "me")
    (ask,) = asks(part.want({0: [key]}, 0.1))
    (second,) = asks(part.answered("a", ask.request, 0.2, absent=[key]))
    assert second.owner == placement().preference(key)[1]


def test_a_cancelled_batch_gives_everything_back() -> None:
    part = partition()
    (first, second) = asks(part.want({0: [0, 1, 3]}, 0.0))
    part.answered("a", first.request, 0.01, {0: SIZE})
    part.cancelled(0, 0.02)
    assert part.counts.cancelled == 1
    part.answered("b", second.request, 0.03, {1: SIZE})
    assert part.counts.late == 1
    assert part.bytes_held == 0


# Anything in any order.


class Events(RuleBasedStateMachine):
    """One machine; the others answer anything, late, in parts, or never."""

    @initialize(
        room=st.sampled_from([0, 3 * SIZE, 1 << 20]),
        total_bytes=st.sampled_from([1, 4 * SAMPLE_BYTES, 1 << 30]),
    )
    def begin(self, room: int, total_bytes: int) -> None:
        self.part = partition(room, total_bytes)
        self.total_bytes = total_bytes
        self.now = 0.0
        self.next = 0
        self.open: dict[int, tuple[list[int], float]] = {}
        self.settled: set[int] = set()
        self.requests: dict[int, tuple[str, list[int]]] = {}
        self.reading: list[int] = []
        self.offers: list[OfferValues] = []
        self.incarnation = 1
        self.view = set(NAMES)

    def act(self, decisions: list[PartitionDecision]) -> None:
        for decision in decisions:
            match decision:
                case Ask(request, owner, keys, _):
                    assert owner in self.view
                    assert len(set(keys)) == len(keys) > 0
                    self.requests[request] = (owner, list(keys))
                case ReadStorage(keys):
                    self.reading += keys
                case OfferValues(to, _):
                    assert to != "me"
                    self.offers.append(decision)
                case Settled(batch):
                    assert batch not in self.settled
                    self.settled.add(batch)
                case _:
                    pass

    @rule(batches=st.lists(st.lists(st.integers(0, SAMPLES - 1), max_size=8), max_size=3))
    def want(self, batches: list[list[int]]) -> None:
        numbered = {self.next + place: keys for place, keys in enumerate(batches)}
        self.next += len(batches)
        self.open |= {number: (keys, self.now) for number, keys in numbered.items()}
        self.act(self.part.want(numbered, self.now))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kind=st.lists(st.integers(0, 5), min_size=8, max_size=8))
    def answer(self, data: st.DataObject, kind: list[int]) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        owner, keys = self.requests[number]
        kinds = dict(zip(keys, kind * 8, strict=False))

        def of(which: int) -> list[int]:
            return [key for key in keys if kinds[key] == which]

        redirected = {key: NAMES[key % 3] for key in of(2)}
        present = dict.fromkeys(of(0), SIZE)
        rest = [key for key in keys if kinds[key] in (3, 5)]
        if rest:
            self.requests[number] = (owner, rest)
        else:
            del self.requests[number]
        self.act(
            self.part.answered(owner, number, self.now, present, of(1), redirected, of(3), of(4))
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[number]
        self.act(self.part.failed(number, self.now))

    @precondition(lambda self: self.reading)
    @rule(count=st.integers(1, 9))
    def read(self, count: int) -> None:
        keys, self.reading = self.reading[:count], self.reading[count:]
        self.act(self.part.read(dict.fromkeys(keys, SIZE), self.now))

    @precondition(lambda self: self.offers)
    @rule(kept=st.integers(0, 9))
    def offered(self, kept: int) -> None:
        offer = self.offers.pop(0)
        self.act(self.part.offered(offer.to, offer.keys[:kept], offer.keys[kept:], self.now))

    @rule(name=st.sampled_from("abc"))
    def lose(self, name: str) -> None:
        self.requests = {n: r for n, r in self.requests.items() if r[0] != name}
        self.offers = [offer for offer in self.offers if offer.to != name]
        self.act(self.part.lost(name, self.now))

    @rule(name=st.sampled_from("abc"))
    def trust(self, name: str) -> None:
        self.act(self.part.trusted(name, self.now))

    @rule(names=st.sets(st.sampled_from("abc")), restarted=st.booleans())
    def place(self, names: set[str], restarted: bool) -> None:
        self.incarnation += restarted
        self.view = {*names, "me"}
        changed = placement(*sorted(self.view), incarnation=self.incarnation)
        self.act(self.part.placed(changed, self.now))

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.6, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.part.tick(self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[batch]
        done = self.part.used if batch in self.settled else self.part.cancelled
        self.act(done(batch, self.now))

    @invariant()
    def counters_add_up(self) -> None:
        if not hasattr(self, "part"):
            return
        counts = self.part.counts
        waiting = sum(self.part._unsettled.values())
        known = counts.local + counts.remote + counts.storage + counts.cancelled
        assert known + waiting == counts.asked
        assert counts.hedged <= counts.storage + counts.cancelled
        assert all(self.part.is_settled(batch) == (batch in self.settled) for batch in self.open)

    @invariant()
    def bytes_are_bounded(self) -> None:
        if not hasattr(self, "part"):
            return
        # One batch of 8 samples may exceed the total: each sample is asked for up to three times,
        # with twice the bytes that are expected. Values that are offered were not asked for.
        oldest = 3 * 8 * 2 * SAMPLE_BYTES
        assert 0 <= self.part.bytes_held <= self.total_bytes + oldest + self.part._offering_bytes
        for peer in self.part.peers.values():
            assert 0 <= peer.in_flight <= MOST_CREDIT + SAMPLE_BYTES

    def teardown(self) -> None:
        if not hasattr(self, "part"):
            return
        # From now on nobody answers. Batches are taken in order, and none waits for ever.
        for batch in list(self.open):
            end = self.now + LONGEST
            while not self.part.is_settled(batch):
                assert self.now < end, f"batch {batch} waits"
                self.now += 0.25
                self.act(self.part.tick(self.now))
            self.act(self.part.used(batch, self.now))
        for number in list(self.requests):
            self.act(self.part.failed(number, self.now))
        while self.offers:
            self.offered(0)
        assert self.part.bytes_held == 0
        assert self.part.open_requests == 0


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_samples_that_nobody_was_dealt_have_an_owner_too() -> None:
    unknown = FirstOwners("f", NAMES, np.full(SAMPLES, NOBODY, dtype=np.uint16))
    placed = Placement(unknown, [machine(name) for name in NAMES])
    holdings = Holdings("me", Admission(1 << 20), lambda key: SIZE)
    part = Partition("me", placed, holdings)
    decisions = part.want({0: list(range(SAMPLES))}, 0.0)
    found = {key: ask.owner for ask in asks(decisions) for key in ask.keys}
    found |= dict.fromkeys(reads(decisions), "me")
    assert found == {key: placed.owner(key) for key in range(SAMPLES)}
    assert set(found.values()) == set(NAMES)
