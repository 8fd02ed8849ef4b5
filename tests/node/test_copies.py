"""Who copies a batch to a device that several jobs use: decisions, without devices."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.node.copies import (
    EXPIRES,
    PLACES,
    CopyDecision,
    DeviceCopies,
    MakeCopy,
    MayLeave,
    OwnerLeft,
    UseCopy,
)
from penstock.node.state import BatchName


def name(number: int) -> BatchName:
    return BatchName("", 0, number, "f")


def copies_of(*members: int) -> DeviceCopies:
    copies = DeviceCopies()
    for member in members:
        copies.join(member)
    return copies


def alone(member: int, number: int) -> list[CopyDecision]:
    return [MakeCopy(member, name(number), None, ())]


def make(copies: DeviceCopies, member: int, number: int, version: int = 1) -> list[CopyDecision]:
    """``member`` asks for a batch, is to copy it for others, and does so."""
    [decision] = copies.ask(member, name(number))
    assert isinstance(decision, MakeCopy)
    assert decision.place is not None
    handles = {reader: b"%d" % reader for reader in decision.readers} if version == 1 else {}
    return copies.made(member, name(number), version, "uint8[8]", handles)


def test_a_job_alone_on_its_device_shares_nothing() -> None:
    copies = copies_of(1)
    assert copies.ask(1, name(0)) == alone(1, 0)


def test_the_first_job_copies_and_the_others_read_its_copy() -> None:
    copies = copies_of(1, 2, 3)
    assert copies.ask(2, name(0)) == [MakeCopy(2, name(0), 0, (1, 3))]
    assert copies.ask(1, name(0)) == []  # waits
    handles = {1: b"one", 3: b"three"}
    assert copies.made(2, name(0), 7, "uint8[8]", handles) == [
        UseCopy(1, name(0), 2, 0, 7, "uint8[8]", b"one")
    ]
    assert copies.ask(3, name(0)) == [UseCopy(3, name(0), 2, 0, 7, "uint8[8]", b"three")]
    assert (copies.alone, copies.shared, copies.read) == (0, 1, 2)


def test_a_handle_is_sent_once_for_each_version_of_a_place() -> None:
    copies = copies_of(1, 2)
    for number, expected in enumerate([b"2", None, None]):
        make(copies, 1, number)
        [use] = copies.ask(2, name(number))
        assert isinstance(use, UseCopy)
        assert use.place == 0
        assert use.handle == (expected if number == 0 else b"2")
        copies.end(2, name(number))
    # The owner has sent no new handles, so the one that is there is not sent again.
    copies.ask(1, name(9))
    copies.made(1, name(9), 1, "", {})
    [use] = copies.ask(2, name(9))
    assert isinstance(use, UseCopy)
    assert use.handle is None


def test_a_place_is_used_again_only_when_all_have_read_it() -> None:
    copies = copies_of(1, 2, 3)
    make(copies, 1, 0)
    copies.ask(2, name(0))
    copies.ask(3, name(0))
    copies.end(2, name(0))
    [decision] = copies.ask(1, name(1))
    assert isinstance(decision, MakeCopy)
    assert decision.place == 1
    copies.made(1, name(1), 1, "", {2: b"", 3: b""})
    copies.end(3, name(0))
    [decision] = copies.ask(1, name(2))
    assert isinstance(decision, MakeCopy)
    assert decision.place == 0


def test_a_job_without_a_free_place_copies_for_itself() -> None:
    copies = copies_of(1, 2)
    for number in range(PLACES):
        make(copies, 1, number)
    assert copies.ask(1, name(PLACES)) == alone(1, PLACES)
    # The other reads what is there, and makes the rest.
    for number in range(PLACES):
        assert isinstance(copies.ask(2, name(number))[0], UseCopy)
        copies.end(2, name(number))
    assert copies.ask(2, name(PLACES)) == alone(2, PLACES)


def test_a_job_that_stands_still_does_not_keep_the_others_from_sharing() -> None:
    copies = copies_of(1, 2, 3)
    shared = 0
    for number in range(200):
        [decision] = copies.ask(1, name(number))
        assert isinstance(decision, MakeCopy)
        if decision.place is not None:
            copies.made(1, name(number), 1, "", {2: b"", 3: b""})
        for answer in copies.ask(2, name(number)):
            if isinstance(answer, UseCopy):
                shared += 1
                copies.end(2, name(number))
    assert shared > 150
    # It comes back and takes part again.
    make(copies, 1, 1000)
    assert isinstance(copies.ask(3, name(1000))[0], UseCopy)


def test_a_copy_that_nobody_asks_for_is_given_up() -> None:
    copies = copies_of(1, 2)
    for number in range(PLACES):
        make(copies, 1, number)
    for number in range(PLACES, PLACES + EXPIRES + 1):
        assert copies.ask(1, name(number)) == alone(1, number)
    assert copies.ask(2, name(0)) == alone(2, 0)


def test_a_job_that_dies_while_it_copies_is_replaced_by_one_that_waits() -> None:
    copies = copies_of(1, 2, 3)
    copies.ask(1, name(0))
    copies.ask(2, name(0))
    copies.ask(3, name(0))
    assert copies.leave(1) == [
        OwnerLeft(2, 1),
        OwnerLeft(3, 1),
        MakeCopy(2, name(0), 0, (3,)),
    ]
    assert copies.made(2, name(0), 1, "", {3: b"new"}) == [UseCopy(3, name(0), 2, 0, 1, "", b"new")]


def test_a_job_that_cannot_make_its_copy_lets_another_do_it() -> None:
    copies = copies_of(1, 2)
    copies.ask(1, name(0))
    copies.ask(2, name(0))
    # Nobody is left who would read it.
    assert copies.end(1, name(0)) == alone(2, 0)


def test_a_job_that_died_is_not_read_from() -> None:
    copies = copies_of(1, 2)
    make(copies, 1, 0)
    assert copies.leave(1) == [OwnerLeft(2, 1)]
    assert copies.ask(2, name(0)) == alone(2, 0)


def test_a_late_joiner_has_no_handle_of_what_is_there_and_gets_the_next() -> None:
    copies = copies_of(1, 2)
    make(copies, 1, 0)
    copies.join(3)
    assert copies.ask(3, name(0)) == alone(3, 0)
    [decision] = copies.ask(1, name(1))
    assert isinstance(decision, MakeCopy)
    assert decision.readers == (2, 3)
    copies.made(1, name(1), 2, "", {2: b"2", 3: b"3"})
    assert isinstance(copies.ask(3, name(1))[0], UseCopy)


def test_a_job_leaves_when_nobody_reads_its_copies() -> None:
    copies = copies_of(1, 2)
    make(copies, 1, 0)
    make(copies, 1, 1)
    copies.ask(2, name(0))
    assert copies.leaving(1) == []
    assert copies.end(2, name(0)) == [MayLeave(1)]
    assert copies.ask(2, name(1)) == alone(2, 1)


def test_a_job_that_waited_too_long_may_still_be_answered() -> None:
    copies = copies_of(1, 2)
    copies.ask(1, name(0))
    copies.ask(2, name(0))
    assert copies.end(2, name(0)) == []
    assert copies.made(1, name(0), 1, "", {2: b""}) == []
    [decision] = copies.ask(1, name(1))
    assert isinstance(decision, MakeCopy)
    assert decision.place == 0  # nobody was left to read the first


Step = tuple[str, int, int]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "made", "fail", "end", "end", "leave", "join"]),
            st.integers(0, 3),
            st.integers(0, 6),
        ),
        max_size=120,
    )
)
def test_no_place_is_written_while_it_is_read(steps: list[Step]) -> None:
    """Jobs that ask, read, fail, leave and join in any order: each question has one answer, and
    nobody reads a place whose owner writes to it or has gone."""
    copies = copies_of(0, 1)
    live = {0, 1}
    writing: dict[tuple[int, int], BatchName] = {}
    reading: dict[tuple[int, int], Counter[int]] = {}
    mapped: dict[tuple[int, int, int], int] = {}
    waits: dict[int, BatchName] = {}
    busy: dict[int, tuple[BatchName, MakeCopy | UseCopy]] = {}

    def follow(decisions: list[CopyDecision]) -> None:
        for one in decisions:
            assert one.member in live
            if isinstance(one, (MakeCopy, UseCopy)):
                assert waits.pop(one.member) == one.name
                busy[one.member] = one.name, one
            if isinstance(one, MakeCopy) and one.place is not None:
                place = one.member, one.place
                assert place not in writing
                assert not reading.get(place)
                writing[place] = one.name
            elif isinstance(one, UseCopy):
                place = one.owner, one.place
                assert one.owner in live
                assert place not in writing
                key = one.member, *place
                assert one.handle is not None or key in mapped
                mapped[key] = one.version
                reading.setdefault(place, Counter())[one.member] += 1

    for what, member, number in steps:
        if what == "join" and member not in live:
            live.add(member)
            copies.join(member)
        if member not in live:
            continue
        if what == "ask" and member not in waits and member not in busy:
            waits[member] = name(number)
            follow(copies.ask(member, name(number)))
        elif what in ("made", "fail", "end") and member in busy:
            about, one = busy.pop(member)
            if isinstance(one, UseCopy):
                reading[one.owner, one.place][member] -= 1
                reading[one.owner, one.place] += Counter()
                follow(copies.end(member, about))
            elif one.place is not None:
                del writing[member, one.place]
                if what == "fail":
                    follow(copies.end(member, about))
                else:
                    handles = {
                        reader: b"h"
                        for reader in one.readers
                        if (reader, member, one.place) not in mapped
                    }
                    follow(copies.made(member, about, 1, "", handles))
        elif what == "leave":
            live.discard(member)
            waits.pop(member, None)
            busy.pop(member, None)
            for places in (writing, reading):
                for place in [place for place in places if place[0] == member]:
                    del places[place]
            for counter in reading.values():
                del counter[member]
            mapped = {key: one for key, one in mapped.items() if member not in key[:2]}
            follow(copies.leave(member))
    # Whoever waits is waiting for a job that makes a copy.
    for member, about in waits.items():
        assert about in writing.values(), member
