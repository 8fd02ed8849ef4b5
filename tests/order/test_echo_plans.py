"""Plans that echo: every copy is delivered once, on one rank, wherever a run was interrupted."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.order import (
    BatchKeys,
    Cursor,
    Deal,
    Echoed,
    EchoedBatches,
    EchoSequence,
    Sampled,
    Sequential,
    Shuffled,
)

Card = tuple[int, int]
Shown = tuple[int, int, list[int], list[int], list[int]]


@dataclass(frozen=True)
class Ragged:
    """A user's order: repeats some samples, leaves out others, and differs in length by epoch."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, epoch])
        return rng.integers(0, n, size=rng.integers(0, 2 * n + 1)) if n else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Blocks(Shuffled):
    """An order of which every rank is dealt contiguous runs."""

    blocks = True


orders = st.sampled_from([Sequential(), Shuffled(), Ragged(), Blocks()])
deals = st.builds(
    Deal,
    order=orders,
    n=st.integers(0, 40),
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    world=st.integers(1, 4),
    tail=st.sampled_from(["pad", "drop"]),
)
echoes = st.builds(
    EchoSequence,
    factor=st.one_of(st.integers(1, 4), st.floats(1, 4)),
    window=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
plans = st.builds(
    Echoed, deal=deals, echo=echoes, batch_size=st.integers(1, 9), drop_last=st.booleans()
)
epochs = st.integers(0, 3)


def shown(batch: BatchKeys) -> Shown:
    copies = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
    assert batch.spent is not None
    return batch.epoch, batch.number, batch.indices.tolist(), copies, batch.spent.tolist()


def of_rank(plan: Echoed, rank: int) -> Echoed:
    return replace(plan, deal=replace(plan.deal, rank=rank))


def by_rank(plan: Echoed, cursor: Cursor) -> list[list[Shown]]:
    return [
        [shown(batch) for batch in of_rank(plan, rank).batches(cursor)]
        for rank in range(plan.deal.world)
    ]


def cards(batches: list[Shown]) -> list[Card]:
    return [card for batch in batches for card in zip(batch[2], batch[3], strict=True)]


def fresh_of(deal: Deal, epoch: int) -> list[Card]:
    """The (index, replica) pairs that the rank is dealt before echoing."""
    found: list[Card] = []
    for batch in replace(deal, drop_last=False).batches(Cursor(epoch)):
        copies = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
        found += zip(batch.indices.tolist(), copies, strict=True)
    return found


def expected_of(plan: Echoed, epoch: int) -> list[Card]:
    fresh = fresh_of(plan.deal, epoch)
    numbers, copies = plan.echo.sequence(len(fresh), epoch)
    return [
        (fresh[number][0], fresh[number][1] * plan.echo.most + copy)
        for number, copy in zip(numbers.tolist(), copies.tolist(), strict=True)
    ]


@settings(deadline=None)
@given(plan=plans, epoch=epochs)
def test_an_epoch_delivers_the_echoed_sequence_in_batches(plan: Echoed, epoch: int) -> None:
    ranks = by_rank(plan, Cursor(epoch))
    for rank, batches in enumerate(ranks):
        assert [(b[0], b[1]) for b in batches] == [(epoch, k) for k in range(len(ranks[0]))]
        assert [len(b[2]) for b in batches] == [len(b[2]) for b in ranks[0]]
        assert all(len(b[2]) == plan.batch_size for b in batches[:-1])
        assert all(1 <= len(b[2]) <= plan.batch_size for b in batches)
        expected = expected_of(of_rank(plan, rank), epoch)
        if plan.drop_last:
            del expected[len(expected) - len(expected) % plan.batch_size :]
        assert cards(batches) == expected
    assert plan.length(Cursor(epoch)) == len(ranks[0])


@settings(deadline=None)
@given(plan=plans, epoch=epochs)
def test_every_fresh_sample_has_its_copies_and_all_on_one_rank(plan: Echoed, epoch: int) -> None:
    plan = replace(plan, drop_last=False)
    factor = plan.echo.factor_of(epoch)
    places: dict[Card, set[int]] = defaultdict(set)
    for rank, batches in enumerate(by_rank(plan, Cursor(epoch))):
        found = cards(batches)
        assert len(set(found)) == len(found)
        copies: dict[Card, list[int]] = defaultdict(list)
        for index, replica in found:
            base, copy = divmod(replica, plan.echo.most)
            copies[index, base].append(copy)
            places[index, base].add(rank)
        assert sorted(copies) == sorted(set(fresh_of(replace(plan.deal, rank=rank), epoch)))
        for numbers in copies.values():
            assert math.floor(factor) <= len(numbers) <= math.ceil(factor)
            assert sorted(numbers) == list(range(len(numbers)))
    assert all(len(ranks) == 1 for ranks in places.values())


@settings(deadline=None)
@given(plan=plans, epoch=epochs, data=st.data())
def test_a_sample_is_spent_in_the_batch_of_its_last_copy(
    plan: Echoed, epoch: int, data: st.DataObject
) -> None:
    batches = by_rank(plan, Cursor(epoch))[0]
    stop = data.draw(st.integers(0, len(batches)))
    cursor = Cursor(epoch, sum(len(b[2]) for b in batches[:stop]) * plan.deal.world, stop)
    rest = by_rank(plan, cursor)[0]
    last = {
        (index, replica // plan.echo.most): place
        for place, batch in enumerate(rest)
        for index, replica in cards([batch])
    }
    expected: dict[int, list[int]] = defaultdict(list)
    for (index, _), place in last.items():
        expected[place].append(index)
    assert [sorted(batch[4]) for batch in rest] == [
        sorted(expected[place]) for place in range(len(rest))
    ]


@settings(deadline=None)
@given(plan=plans, epoch=epochs, data=st.data())
def test_a_resume_delivers_exactly_the_rest(plan: Echoed, epoch: int, data: st.DataObject) -> None:
    whole = by_rank(plan, Cursor(epoch))
    stop = data.draw(st.integers(0, len(whole[0])))
    cursor = Cursor(epoch)
    for batch in itertools.islice(plan.batches(cursor), stop):
        cursor = plan.after(cursor, batch)
    assert cursor == (epoch, sum(len(b[2]) for b in whole[0][:stop]) * plan.deal.world, stop)
    assert by_rank(plan, cursor) == [batches[stop:] for batches in whole]
    assert plan.length(cursor) == len(whole[0]) - stop


@settings(deadline=None)
@given(plan=plans, epoch=epochs, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_sequence_does_not_depend_on_a_batch_size_that_changes_within_an_epoch(
    plan: Echoed, epoch: int, sizes: list[int]
) -> None:
    plan = replace(plan, drop_last=False)
    cursor = Cursor(epoch)
    found: list[Card] = []
    for size in sizes:
        plan = replace(plan, batch_size=size)
        for batch in itertools.islice(plan.batches(cursor), 2):
            found += cards([shown(batch)])
            cursor = plan.after(cursor, batch)
    found += cards([shown(batch) for batch in plan.batches(cursor)])
    assert found == expected_of(plan, epoch)


@settings(deadline=None)
@given(
    plan=plans,
    order=st.sampled_from([Sequential(), Shuffled(), Ragged()]),
    size=st.integers(1, 50),
    drop_last=st.booleans(),
)
def test_the_batch_size_of_the_deal_does_not_matter_without_blocks(
    plan: Echoed, order: Any, size: int, drop_last: bool
) -> None:
    plan = replace(plan, deal=replace(plan.deal, order=order))
    other = replace(plan, deal=replace(plan.deal, batch_size=size, drop_last=drop_last))
    assert by_rank(plan, Cursor(1)) == by_rank(other, Cursor(1))


def test_a_batch_of_first_copies_has_no_replica_numbers() -> None:
    plan = Echoed(Deal(Sequential(), 4, 0, 1), EchoSequence(2, 1, 0), batch_size=1)
    batches = list(plan.batches(Cursor()))
    assert [batch.indices.tolist() for batch in batches] == [[k] for k in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [batch.replicas is None for batch in batches] == [True, False] * 4


def test_a_sample_that_is_dealt_twice_is_echoed_twice_and_spent_twice() -> None:
    # Three samples for two ranks: the second rank gets sample 0 again, as replica 1.
    deal = Deal(Sequential(), 3, 0, 1, rank=1, world=2)
    plan = Echoed(deal, EchoSequence(2, 1, 0), batch_size=4)
    assert by_rank(plan, Cursor())[1] == [(0, 0, [1, 1, 0, 0], [0, 1, 2, 3], [1, 0])]


def test_copies_left_out_by_drop_last_do_not_count_for_spent() -> None:
    plan = Echoed(Deal(Sequential(), 2, 0, 1), EchoSequence(3, 1, 0), batch_size=4, drop_last=True)
    assert by_rank(plan, Cursor())[0] == [(0, 0, [0, 0, 0, 1], [0, 1, 2, 0], [0, 1])]


class Counting:
    """A user's order that records the epochs it is called for."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        self.epochs.append(epoch)
        return np.arange(n, dtype=np.int64)


def test_an_order_is_computed_once_per_epoch() -> None:
    order = Counting()
    plan = Echoed(Deal(order, 10, 0, 2), EchoSequence(2, 4, 0), batch_size=3)
    for epoch in (0, 1):
        assert plan.length(Cursor(epoch)) == 7
        assert len(list(plan.batches(Cursor(epoch)))) == 7
    assert order.epochs == [0, 1]


def test_only_a_fixed_factor_lets_the_next_epoch_begin_early() -> None:
    deal = Deal(Sequential(), 4, 0, 2)
    fixed, chosen = EchoSequence(2, 1, 0), EchoSequence(lambda epoch: epoch + 1, 1, 0)
    sampled = Sampled([0, 1], 4, 0, batch_size=2)
    assert [Echoed(deal, echo, 2).ahead for echo in (fixed, chosen)] == [True, False]
    assert [EchoedBatches(deal, echo).ahead for echo in (fixed, chosen)] == [True, False]
    assert not EchoedBatches(sampled, fixed).ahead


def test_a_factor_may_be_chosen_for_every_epoch() -> None:
    echo = EchoSequence(lambda epoch: epoch + 1, 1, 0)
    deal = Deal(Sequential(), 6, 0, 2)
    assert [Echoed(deal, echo, 3).length(Cursor(epoch)) for epoch in range(3)] == [2, 4, 6]
    assert [EchoedBatches(deal, echo).length(Cursor(epoch)) for epoch in range(3)] == [3, 6, 9]
    replicas = [
        [] if b.replicas is None else b.replicas.tolist()
        for b in Echoed(replace(deal, n=3), echo, 9).batches(Cursor(2))
    ]
    assert replicas == [[0, 1, 2] * 3]


def test_a_cursor_of_another_world_or_of_more_data_is_an_error() -> None:
    plan = Echoed(Deal(Sequential(), 6, 0, 1, world=3), EchoSequence(2, 1, 0), batch_size=2)
    for ask in (plan.batches, plan.length):
        with pytest.raises(StateError, match=r"at sample 4 of epoch 1, .* not a multiple of 3"):
            ask(Cursor(1, 4, 1))
        with pytest.raises(StateError, match=r"at sample 15 of epoch 0, .* epoch delivers only 12"):
            ask(Cursor(0, 15, 3))
    assert plan.length(Cursor(0, 12, 2)) == 0
    assert list(plan.batches(Cursor(0, 12, 2))) == []


class OutOfRange(Counting):
    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return np.array([0, n], dtype=np.int64)

    def length(self, n: int) -> int:
        return 2


def test_an_invalid_order_is_an_error_before_the_first_batch() -> None:
    plan = Echoed(Deal(OutOfRange(), 4, 0, 2), EchoSequence(2, 1, 0), 2)
    with pytest.raises(PipelineError, match=r"OutOfRange\.indices returned 4 at place 1"):
        plan.batches(Cursor())


def test_an_invalid_batch_size_is_an_error() -> None:
    with pytest.raises(PipelineError, match="batch_size is 0"):
        Echoed(Deal(Sequential(), 4, 0, 2), EchoSequence(2, 1, 0), 0)


# EchoedBatches.

inner_plans: st.SearchStrategy[Any] = st.one_of(deals, plans)


@settings(deadline=None)
@given(inner=inner_plans, echo=echoes, epoch=epochs, data=st.data())
def test_echoed_batches_have_their_copies_and_resume_anywhere(
    inner: Any, echo: EchoSequence, epoch: int, data: st.DataObject
) -> None:
    plan = EchoedBatches(inner, echo)
    fresh = list(inner.batches(Cursor(epoch)))
    numbers = plan.deliveries(Cursor(epoch)).tolist()
    assert numbers == echo.sequence(len(fresh), epoch)[0].tolist()
    assert Counter(numbers) == dict(enumerate(echo.counts(len(fresh), epoch).tolist()))
    assert plan.length(Cursor(epoch)) == len(numbers)

    stop = data.draw(st.integers(0, len(numbers)))
    cursor = Cursor(epoch)
    for _ in range(stop):
        cursor = plan.after(cursor)
    assert cursor == (epoch, 0, stop)
    assert plan.deliveries(cursor).tolist() == numbers[stop:]
    assert plan.length(cursor) == len(numbers) - stop
    needed = list(plan.batches(cursor))
    assert [batch.number for batch in needed] == sorted(set(numbers[stop:]))
    for batch in needed:
        same = fresh[batch.number]
        assert batch.indices.tolist() == same.indices.tolist()
        assert (batch.replicas is None) == (same.replicas is None)
        assert (
            batch.replicas is None
            or batch.replicas.tolist() == fresh[batch.number].replicas.tolist()
        )


def test_a_batch_cursor_past_the_end_is_an_error() -> None:
    plan = EchoedBatches(Deal(Sequential(), 6, 0, 2), EchoSequence(2, 1, 0))
    for ask in (plan.batches, plan.length, plan.deliveries):
        with pytest.raises(StateError, match=r"at batch 7 of epoch 0, .* that epoch has only 6"):
            ask(Cursor(0, 0, 7))


class Endless:
    """A user's sampler that is endless and therefore has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle([0, 1])


def test_batches_of_a_sampler_without_a_length_cannot_be_echoed() -> None:
    with pytest.raises(PipelineError, match=r"echo\(\) after batch\(\) needs the number"):
        EchoedBatches(Sampled(Endless(), 4, 0, batch_size=2), EchoSequence(2, 1, 0))


class Declared:
    """A user's sampler of ``true`` samples whose ``len`` is ``declared``."""

    def __init__(self, declared: int, true: int) -> None:
        self.declared = declared
        self.true = true
        self.ended = 0

    def __len__(self) -> int:
        return self.declared

    def __iter__(self) -> Iterator[int]:
        yield from range(self.true)
        self.ended += 1


@pytest.mark.parametrize(
    ("declared", "message"),
    [(8, "has 4 batches.*but it dealt only 3"), (4, "has 2 batches.*but it dealt more")],
)
def test_a_sampler_with_a_wrong_length_is_an_error(declared: int, message: str) -> None:
    plan = EchoedBatches(Sampled(Declared(declared, 6), 10, 0, batch_size=2), EchoSequence(2, 1, 0))
    with pytest.raises(PipelineError, match=message):
        list(plan.batches(Cursor()))


def test_a_sampler_is_run_to_its_end_wherever_a_run_resumes() -> None:
    sampler = Declared(6, 6)
    plan = EchoedBatches(Sampled(sampler, 10, 0, batch_size=2), EchoSequence(2, 3, 0))
    for delivered in range(7):
        assert len(list(plan.batches(Cursor(0, 0, delivered)))) <= 3
        assert sampler.ended == delivered + 1


def test_a_checkpoint_carries_the_generator_of_an_echoed_sampler() -> None:
    torch = pytest.importorskip("torch")

    def plan(seed: int) -> EchoedBatches:
        generator = torch.Generator().manual_seed(seed)
        sampler = torch.utils.data.RandomSampler(range(20), generator=generator)
        return EchoedBatches(Sampled(sampler, 20, 0, batch_size=4), EchoSequence(2, 4, 0))

    def dealt(plan: EchoedBatches, cursor: Cursor) -> dict[int, list[int]]:
        return {batch.number: batch.indices.tolist() for batch in plan.batches(cursor)}

    first = plan(seed=1)
    dealt(first, Cursor(0))
    whole = dealt(first, Cursor(1))
    state = first.epoch_state(1)
    assert state is not None
    second = plan(seed=2)
    second.restore(state)
    rest = dealt(second, Cursor(1, 0, 6))
    assert 0 < len(rest) < len(whole)
    assert rest == {number: whole[number] for number in rest}


def test_echoed_batches_of_a_plan_without_a_state_have_none() -> None:
    plan = EchoedBatches(Deal(Sequential(), 6, 0, 2), EchoSequence(2, 1, 0))
    assert plan.epoch_state(0) is None
    plan.restore(None)
    assert plan.length(Cursor()) == 6
