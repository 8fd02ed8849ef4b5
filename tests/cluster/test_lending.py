"""Lending: which machine gets a tiny-batch, how long it is, and what failures cost it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.lending import (
    CALLS,
    CREDIT,
    FAILED_SAMPLES,
    FIRST_PAUSE,
    LARGEST_CALL,
    LEAST_LATE,
    LONGEST_PAUSE,
    MOST_LATE,
    NEEDED,
    REHEARSAL,
    SETTLED,
    Call,
    Failure,
    Lender,
    Lending,
    Measured,
    call_size,
)

HELPER = Lender("helper", 1, 4)


def in_need(*lenders: Lender) -> Lending:
    """Lending on a machine that has had more to do than it can for ``NEEDED`` seconds."""
    lending = Lending()
    lending.machines(lenders or [HELPER], 0.0)
    lending.left(1000, -NEEDED)
    return lending


def measured(samples: int, *, cost: float = 0.02, row: int = 1000, idle: float = 4.0) -> Measured:
    return Measured(samples, samples * row, samples * cost, 1e-5 * samples, idle)


def make(lending: Lending, now: float) -> Call:
    call = lending.next_call(now)
    assert call is not None
    lending.sent(call, call.samples, now)
    return call


def ready(*lenders: Lender, row: int = 1000) -> Lending:
    """Lending whose machines have passed their rehearsal: 20 ms a sample on each core."""
    lending = in_need(*lenders)
    for _ in lenders or [HELPER]:
        call = make(lending, 0.0)
        assert call.rehearsal
        lending.answered(call.number, measured(call.samples, row=row), 0.02)
    return lending


def state_of(lending: Lending, name: str = "helper") -> str:
    return lending.stats()[name].state


def test_nobody_is_asked_while_this_machine_keeps_up() -> None:
    lending = Lending()
    lending.machines([HELPER], 0.0)
    assert lending.next_call(0.0) is None
    lending.left(10, 0.0)
    assert lending.next_call(NEEDED / 2) is None, "a moment is not a need"
    lending.left(0, NEEDED / 2)
    lending.left(10, NEEDED)
    assert lending.next_call(NEEDED * 1.5) is None
    assert lending.next_call(NEEDED * 2) == Call(1, "helper", 4, rehearsal=True)


def test_a_machine_gets_samples_only_after_its_rehearsal() -> None:
    lending = in_need()
    rehearsal = make(lending, 0.0)
    assert rehearsal.rehearsal
    assert lending.next_call(1.0) is None
    assert lending.cores == 0
    lending.answered(rehearsal.number, measured(4), 8.0)
    assert lending.cores == 4
    call = make(lending, 8.0)
    assert not call.rehearsal
    assert lending.stats()["helper"].calls == 0, "a rehearsal prepares nothing"
    lending.answered(call.number, measured(call.samples), 8.2)
    stats = lending.stats()["helper"]
    assert (stats.calls, stats.samples) == (1, call.samples)


def test_a_few_calls_are_on_their_way_at_the_same_time() -> None:
    lending = ready()
    calls = [make(lending, 1.0) for _ in range(CALLS)]
    assert lending.next_call(1.0) is None
    lending.answered(calls[0].number, measured(calls[0].samples), 1.1)
    assert lending.next_call(1.1) is not None


def test_a_machine_whose_own_jobs_need_its_cores_gets_one_call_at_a_time() -> None:
    lending = ready()
    first = make(lending, 1.0)
    lending.answered(first.number, measured(first.samples, idle=0.0), 1.1)
    second = make(lending, 1.1)
    assert lending.next_call(1.1) is None
    lending.answered(second.number, measured(second.samples, idle=3.0), 1.2)
    make(lending, 1.2)
    make(lending, 1.2)


def test_calls_go_to_the_machine_that_runs_dry_first() -> None:
    lending = ready(Lender("large", 1, 12), Lender("small", 1, 4))
    given = [make(lending, 1.0) for _ in range(2 * CALLS)]
    assert {call.lender for call in given[:2]} == {"large", "small"}
    sizes = {call.lender: call.samples for call in given}
    assert sizes["large"] == 3 * sizes["small"]


def test_rows_that_are_owed_stay_within_the_credit() -> None:
    lending = ready(Lender("helper", 1, 10_000), row=1 << 20)
    owed = 0
    while (call := lending.next_call(1.0)) is not None:
        lending.sent(call, call.samples, 1.0)
        assert call.samples << 20 <= LARGEST_CALL
        owed += call.samples << 20
    assert 0 < owed <= CREDIT


def test_a_late_call_is_given_up_and_its_answer_ignored() -> None:
    lending = ready()
    call = make(lending, 1.0)
    deadline = lending.deadline(call.number)
    assert deadline is not None
    assert 1.0 + LEAST_LATE <= deadline <= 1.0 + MOST_LATE
    assert lending.late(deadline - 0.01) == []
    assert lending.late(deadline) == [call.number]
    assert lending.late(deadline) == []
    lending.answered(call.number, measured(call.samples), deadline + 1)
    assert not lending.failed(call.number, "lost", "", deadline + 1)
    stats = lending.stats()["helper"]
    assert (stats.state, stats.calls, stats.again) == ("pauses", 0, 1)
    assert lending.cores == 0


def test_a_rehearsal_that_never_ends_is_given_up_too() -> None:
    lending = in_need()
    call = make(lending, 0.0)
    assert lending.late(REHEARSAL) == [call.number]
    assert lending.stats()["helper"].again == 0


def test_pauses_of_a_failing_machine_grow_up_to_a_limit_and_end_with_a_success() -> None:
    lending, now, pauses = in_need(), 0.0, []
    for _ in range(8):
        call = make(lending, now)
        assert call.rehearsal
        lending.failed(call.number, "lost", "reset", now)
        began = now
        while lending.next_call(now) is None:
            now += 0.25
        pauses.append(now - began)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    call = make(lending, now)
    lending.answered(call.number, measured(4), now)
    call = make(lending, now)
    lending.answered(call.number, measured(call.samples), now + 0.1)
    call = make(lending, now + 0.1)
    lending.failed(call.number, "slow", "", now + 0.1)
    assert lending.next_call(now + 0.1 + FIRST_PAUSE) is not None


def test_a_machine_without_the_pipeline_is_not_asked_until_something_changes() -> None:
    lending = in_need()
    call = make(lending, 0.0)
    lending.failed(call.number, "recipe", "no way to get it", 0.0)
    assert lending.next_call(1e6) is None
    assert state_of(lending) == "lacks the pipeline"
    lending.ways_changed()
    call = make(lending, 1e6)
    lending.failed(call.number, "recipe", "no way to get it", 1e6)
    lending.machines([HELPER._replace(incarnation=2)], 1e6)
    assert make(lending, 1e6).rehearsal


def test_one_bad_sample_does_not_count_against_a_machine_but_many_in_a_row_do() -> None:
    lending = ready()
    for _ in range(FAILED_SAMPLES - 1):
        call = make(lending, 1.0)
        assert lending.failed(call.number, "sample", "bad", 1.0)
        assert state_of(lending) == "ready"
    call = make(lending, 1.0)
    lending.answered(call.number, measured(call.samples), 1.1)
    for _ in range(FAILED_SAMPLES):
        call = make(lending, 2.0)
        lending.failed(call.number, "sample", "no such file", 2.0)
    assert state_of(lending) == "pauses"


def test_a_machine_whose_rows_cost_more_to_receive_than_to_prepare_does_not_pay() -> None:
    lending, now = ready(), 1.0
    while state_of(lending) == "ready":
        call = make(lending, now)
        now += 0.1
        lending.answered(call.number, Measured(call.samples, 1000, 1e-6, 1e-3, 4.0), now)
        assert now < 100, "judged after a few calls"
    assert state_of(lending) == "does not pay"
    assert lending.stats()["helper"].calls >= SETTLED - 1
    assert lending.next_call(now + LONGEST_PAUSE / 2) is None
    assert make(lending, now + LONGEST_PAUSE).rehearsal


def test_the_calls_of_a_machine_that_leaves_are_lost_and_its_counts_stay() -> None:
    lending = ready()
    call = make(lending, 1.0)
    lending.answered(call.number, measured(call.samples), 1.1)
    open_calls = [make(lending, 1.2).number for _ in range(2)]
    assert lending.machines([], 1.3) == open_calls
    assert lending.cores == 0
    assert lending.next_call(1.3) is None
    lending.machines([HELPER._replace(incarnation=7)], 2.0)
    stats = lending.stats()["helper"]
    assert (stats.calls, stats.again, stats.state) == (1, 2, "new")


def test_more_cores_are_used_as_soon_as_they_are_lent() -> None:
    lending = ready()
    lending.machines([HELPER, Lender("second", 1, 8)], 1.0)
    rehearsal = make(lending, 1.0)
    assert (rehearsal.lender, rehearsal.samples) == ("second", 8)
    lending.answered(rehearsal.number, measured(8), 1.1)
    assert lending.cores == 12
    lending.machines([HELPER], 2.0)
    assert lending.cores == 4


def test_a_call_hides_a_long_way() -> None:
    assert call_size(100.0, 0.0, 1.0) == 10
    assert call_size(100.0, 1.0, 1.0) == 200
    assert call_size(0.0, 0.0, 0.0) == 1


FAILURES: list[Failure] = ["lost", "slow", "busy", "nonsense", "sample", "recipe"]
EVENTS = st.one_of(
    st.tuples(st.just("call"), st.integers(1, 50)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
    st.tuples(st.just("fail"), st.integers(0, 5), st.sampled_from(FAILURES)),
    st.tuples(st.just("machines"), st.sets(st.integers(0, 3)), st.integers(1, 2)),
    st.tuples(st.just("wait"), st.floats(0.01, 40)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_every_call_ends_exactly_once_whatever_happens(events: list[tuple[object, ...]]) -> None:
    lending, now = in_need(*(Lender(str(i), 1, 2) for i in range(3))), 0.0
    opened: list[int] = []
    ended: list[int] = []
    for event in events:
        if event[0] == "call":
            call = lending.next_call(now)
            if call is not None:
                lending.sent(call, call.samples, now)
                opened.append(call.number)
        elif event[0] in ("answer", "fail"):
            alive = [number for number in opened if number not in ended]
            if not alive:
                continue
            number = alive[int(str(event[1])) % len(alive)]
            if event[0] == "answer":
                lending.answered(number, measured(3), now)
            else:
                assert lending.failed(number, event[2], "", now)  # type: ignore[arg-type]
            ended.append(number)
        elif event[0] == "machines":
            names, incarnation = event[1], int(str(event[2]))
            made = [Lender(str(name), incarnation, 2) for name in names]  # type: ignore[attr-defined]
            ended += lending.machines(made, now)
        else:
            now += float(str(event[1]))
            ended += lending.late(now)
    ended += lending.late(now + REHEARSAL + MOST_LATE)
    assert sorted(ended) == sorted(opened)
    assert len(set(opened)) == len(opened)
