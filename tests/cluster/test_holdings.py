"""What an owner answers: present, absent, redirected, or held until a reader offers it."""

from __future__ import annotations

from penstock.cluster.holdings import PROMISE, Holdings
from penstock.store.admission import Admission


def holdings(room: int = 1000, size: int = 10) -> Holdings:
    return Holdings("me", Admission(room), lambda key: size)


def test_the_first_that_asks_for_an_absent_sample_reads_it_and_others_wait_for_it() -> None:
    owner = holdings()
    assert owner.asked("a", 1, [5], 100, now=0.0).absent == [5]
    assert owner.asked("b", 7, [5], 100, now=0.1).held == [5]
    assert owner.asked("c", 9, [5], 100, now=0.1).held == [5]
    kept, replies = owner.keep(5, 10, now=0.2)
    assert kept
    assert [(r.peer, r.request, r.present) for r in replies] == [("b", 7, [5]), ("c", 9, [5])]
    assert owner.asked("d", 1, [5], 100, now=0.3).present == [5]


def test_a_reader_that_asks_again_is_not_made_to_wait_for_itself() -> None:
    owner = holdings()
    owner.asked("a", 1, [5], 100, now=0.0)
    assert owner.asked("a", 2, [5], 100, now=0.1).absent == [5]


def test_a_promise_that_is_not_kept_passes_to_the_next_after_its_time() -> None:
    owner = holdings()
    owner.asked("a", 1, [5], 100, now=0.0)
    owner.asked("b", 2, [5], 100, now=0.5)
    owner.asked("c", 3, [5], 100, now=0.6)
    assert owner.tick(PROMISE - 0.01) == []
    (reply,) = owner.tick(PROMISE)
    assert (reply.peer, reply.absent) == ("b", [5])
    _, replies = owner.keep(5, 10, now=PROMISE + 0.1)
    assert [(r.peer, r.present) for r in replies] == [("c", [5])]


def test_a_sample_that_this_machine_reads_is_held_for_others() -> None:
    owner = holdings()
    owner.reading([5], now=0.0)
    assert owner.asked("a", 1, [5], 100, now=0.1).held == [5]
    assert owner.is_promised(5, 0.1)
    assert not owner.is_promised(5, PROMISE)


def test_a_spilled_sample_is_redirected_to_the_machine_that_keeps_it() -> None:
    owner = holdings(room=0)
    assert owner.keep(5, 10, now=0.0) == (False, [])
    owner.reading([5], now=0.0)
    owner.asked("a", 1, [5], 100, now=0.0)
    (reply,) = owner.spilled(5, "z", now=0.1)
    assert (reply.peer, reply.redirected) == ("a", {5: "z"})
    assert owner.asked("b", 1, [5], 100, now=0.2).redirected == {5: "z"}
    assert owner.redirect(5) == "z"
    owner.left("z")
    assert owner.asked("c", 1, [5], 100, now=0.3).absent == [5]


def test_nobody_waits_for_a_sample_that_no_machine_has_room_for() -> None:
    owner = holdings(room=0)
    owner.keep(5, 10, now=0.0)
    owner.homeless(5, now=0.0)
    assert owner.asked("a", 1, [5], 100, now=0.1).absent == [5]
    assert owner.asked("b", 1, [5], 100, now=0.1).absent == [5]
    # A machine that joins may have room.
    owner.joined()
    assert owner.asked("a", 2, [5], 100, now=0.2).absent == [5]
    assert owner.asked("b", 2, [5], 100, now=0.2).held == [5]


def test_nobody_waits_for_a_sample_that_a_full_disk_does_not_take() -> None:
    owner = holdings(room=1000)
    owner.refused()
    assert owner.asked("a", 1, [5], 100, now=0.0).absent == [5]
    assert owner.asked("b", 1, [5], 100, now=0.1).held == [5]  # another machine may have room
    (reply,) = owner.homeless(5, now=0.2)
    assert (reply.peer, reply.absent) == ("b", [5])
    assert owner.asked("c", 1, [5], 100, now=0.3).absent == [5]
    assert not owner.full_everywhere  # the store is not sealed: its disk may have room later
    assert owner.keep(6, 10, now=0.4) == (True, [])
    assert owner.asked("a", 2, [5], 100, now=0.5).absent == [5]
    assert owner.asked("b", 2, [5], 100, now=0.6).held == [5]


def test_an_answer_has_at_most_the_bytes_of_its_credit_and_at_least_one_value() -> None:
    owner = holdings(size=40)
    for key in range(4):
        owner.keep(key, 40, now=0.0)
    reply = owner.asked("a", 1, [0, 1, 2, 3], 100, now=0.0)
    assert (reply.present, reply.left) == ([0, 1], [2, 3])
    reply = owner.asked("a", 2, [2, 3], 1, now=0.0)
    assert (reply.present, reply.left) == ([2], [3])


def test_a_value_that_comes_to_its_owner_ends_the_redirect() -> None:
    owner = holdings()
    owner.spilled(5, "z", now=0.0)
    assert owner.redirects == 1
    assert owner.keep(5, 10, now=0.1) == (True, [])
    assert owner.asked("a", 1, [5], 100, now=0.2).present == [5]
    assert owner.redirects == 0
