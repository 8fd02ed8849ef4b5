"""Dealing: every sample once, equally many for each rank, and the same rest after any resume."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock
from penstock.errors import PipelineError, StateError
from penstock.order import (
    BatchKeys,
    Cursor,
    Deal,
    Occurrences,
    Order,
    Sequential,
    Shuffled,
    Weighted,
    replica_numbers,
)

Tail = Literal["pad", "drop"]
Shown = tuple[int, int, list[int], list[int]]


@dataclass(frozen=True)
class Ragged:
    """A user's order: repeats some samples, leaves out others, and differs in length by epoch."""

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, epoch])
        return rng.integers(0, n, size=rng.integers(0, 2 * n + 1)) if n else np.zeros(0, np.int64)


orders = st.sampled_from([Sequential(), Shuffled(), Ragged()])
sizes = st.integers(0, 60)
batch_sizes = st.integers(1, 9)
worlds = st.integers(1, 7)
tails: st.SearchStrategy[Tail] = st.sampled_from(["pad", "drop"])
seeds = st.integers(0, 2**32)
epochs = st.integers(0, 3)


def shown(batch: BatchKeys) -> Shown:
    copies = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
    return batch.epoch, batch.number, batch.indices.tolist(), copies


def by_rank(deal: Deal, cursor: Cursor) -> list[list[Shown]]:
    return [
        [shown(batch) for batch in replace(deal, rank=rank).batches(cursor)]
        for rank in range(deal.world)
    ]


def together(ranks: list[list[Shown]]) -> list[tuple[int, int]]:
    """The (index, replica) pairs of all ranks, in the order in which they were dealt."""
    return [
        card
        for step in zip(*ranks, strict=True)
        for round_ in zip(*(zip(b[2], b[3], strict=True) for b in step), strict=True)
        for card in round_
    ]


def counted(sequence: list[int]) -> list[int]:
    """The replica number of every entry, by counting one by one."""
    seen: Counter[int] = Counter()
    numbers = []
    for index in sequence:
        numbers.append(seen[index])
        seen[index] += 1
    return numbers


def numbered(sequence: list[int]) -> list[tuple[int, int]]:
    return list(zip(sequence, counted(sequence), strict=True))


def sequence_of(deal: Deal, epoch: int) -> list[int]:
    found: list[int] = deal.order.indices(deal.n, deal.seed, epoch).tolist()
    return found


def expected_from(deal: Deal, cursor: Cursor) -> list[tuple[int, int]]:
    """The (index, replica) pairs for all ranks together, computed sample by sample."""
    sequence = sequence_of(deal, cursor.epoch)
    dealt = list(sequence)
    while (len(dealt) - cursor.position) % deal.world:
        if deal.tail == "drop":
            dealt.pop()
        else:
            dealt.append(sequence[(len(dealt) - len(sequence)) % len(sequence)])
    if deal.drop_last:
        step = deal.batch_size * deal.world
        del dealt[cursor.position + (len(dealt) - cursor.position) // step * step :]
    return numbered(dealt)[cursor.position :]


deals = st.builds(
    Deal,
    order=orders,
    n=sizes,
    seed=seeds,
    batch_size=batch_sizes,
    drop_last=st.booleans(),
    world=worlds,
    tail=tails,
)


@settings(deadline=None)
@given(deal=deals, epoch=epochs)
def test_an_epoch_deals_all_of_its_order_and_equally_many_to_each_rank(
    deal: Deal, epoch: int
) -> None:
    cursor = Cursor(epoch)
    ranks = by_rank(deal, cursor)
    for batches in ranks:
        assert [(b[0], b[1]) for b in batches] == [(epoch, k) for k in range(len(ranks[0]))]
        assert [len(b[2]) for b in batches] == [len(b[2]) for b in ranks[0]]
        assert all(len(b[2]) == deal.batch_size for b in batches[:-1])
        assert all(1 <= len(b[2]) <= deal.batch_size for b in batches)
    assert deal.length(cursor) == len(ranks[0])
    assert together(ranks) == expected_from(deal, cursor)


@settings(deadline=None)
@given(
    n=sizes, seed=seeds, epoch=epochs, batch_size=batch_sizes, world=worlds, tail=tails,
    drop_last=st.booleans(),
)  # fmt: skip
def test_a_shuffled_epoch_has_every_sample_exactly_once(
    n: int, seed: int, epoch: int, batch_size: int, world: int, tail: Tail, drop_last: bool
) -> None:
    deal = Deal(Shuffled(), n, seed, batch_size, drop_last, world=world, tail=tail)
    cards = together(by_rank(deal, Cursor(epoch)))
    firsts = [index for index, replica in cards if replica == 0]
    copies = [index for index, replica in cards if replica > 0]
    assert len(firsts) == len(set(firsts))
    missing = n - len(firsts)
    if drop_last:
        assert missing < batch_size * world
        assert len(cards) % (batch_size * world) == 0
    elif tail == "pad":
        assert missing == 0
        assert len(copies) == -n % world
    else:
        assert missing == n % world
    if tail == "drop" or world == 1:
        assert copies == []


@settings(deadline=None)
@given(deal=deals, epoch=epochs, data=st.data())
def test_a_resume_deals_exactly_the_rest(deal: Deal, epoch: int, data: st.DataObject) -> None:
    whole = by_rank(deal, Cursor(epoch))
    stop = data.draw(st.integers(0, len(whole[0])))
    cursor = Cursor(epoch)
    for _ in range(stop):
        cursor = deal.after(cursor)
    assert cursor.batch == stop
    assert by_rank(deal, cursor) == [batches[stop:] for batches in whole]
    assert deal.length(cursor) == len(whole[0]) - stop


@settings(deadline=None)
@given(
    order=orders, n=sizes, seed=seeds, epoch=epochs,
    phases=st.lists(
        st.tuples(worlds, batch_sizes, st.integers(0, 6)), min_size=1, max_size=6
    ),
    tail=tails, drop_last=st.booleans(),
)  # fmt: skip
def test_a_run_that_changes_ranks_and_batch_size_repeatedly_deals_all_once(
    order: Order,
    n: int,
    seed: int,
    epoch: int,
    phases: list[tuple[int, int, int]],
    tail: Tail,
    drop_last: bool,
) -> None:
    cursor = Cursor(epoch)
    dealt: list[tuple[int, int]] = []
    for place, (world, batch_size, steps) in enumerate(phases):
        last = place == len(phases) - 1
        deal = Deal(order, n, seed, batch_size, drop_last and last, world=world, tail=tail)
        if last:
            expected = expected_from(deal, cursor)
            rest = by_rank(deal, cursor)
            assert len(rest[0]) == deal.length(cursor)
            assert together(rest) == expected
            dealt += expected
        else:
            # Only full steps: an incomplete step ends the epoch.
            full = (len(sequence_of(deal, epoch)) - cursor.position) // (world * batch_size)
            steps = min(steps, full)
            dealt += together([batches[:steps] for batches in by_rank(deal, cursor)])
            for _ in range(steps):
                cursor = deal.after(cursor)
    sequence = numbered(sequence_of(deal, epoch))
    assert dealt[: len(sequence)] == sequence[: len(dealt)]
    if not drop_last and tail == "pad":
        assert len(sequence) <= len(dealt) < len(sequence) + world
    elif not drop_last:
        assert len(sequence) - world < len(dealt) <= len(sequence)


@settings(deadline=None)
@given(deal=deals, epoch=epochs)
def test_the_cursor_after_the_last_batch_ends_the_epoch(deal: Deal, epoch: int) -> None:
    cursor = Cursor(epoch)
    for batch in list(deal.batches(cursor)):
        assert deal.length(cursor) > 0
        cursor = deal.after(cursor, batch)
    assert cursor.position <= len(sequence_of(deal, epoch))
    assert deal.length(cursor) == 0
    assert list(deal.batches(cursor)) == []


def test_padding_repeats_the_sequence_if_there_are_more_ranks_than_samples() -> None:
    deal = Deal(Sequential(), n=2, seed=0, batch_size=4, world=5)
    assert together(by_rank(deal, Cursor())) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_drop_last_keeps_a_step_that_padding_has_filled() -> None:
    deal = Deal(Sequential(), n=5, seed=0, batch_size=1, drop_last=True, world=3)
    assert together(by_rank(deal, Cursor()))[3:] == [(3, 0), (4, 0), (0, 1)]


def test_replica_numbers_of_a_weighted_order_count_over_the_whole_epoch() -> None:
    deal = Deal(Weighted([1.0, 3.0], samples=7), n=2, seed=5, batch_size=2, world=2)
    drawn = sequence_of(deal, 1)
    assert together(by_rank(deal, Cursor(1))) == numbered([*drawn, drawn[0]])


def test_batches_without_repeats_have_no_replica_numbers() -> None:
    deal = Deal(Sequential(), n=7, seed=0, batch_size=1, rank=3, world=4)
    first, last = deal.batches(Cursor())
    assert first.replicas is None
    assert last.replicas is not None
    assert (last.indices.tolist(), last.replicas.tolist()) == ([0], [1])


class Runs(Ragged):
    """A user's order whose neighbours belong together."""

    blocks = True


class AscendingBlocks:
    """An order of blocks: the indices from 0 on, without ``at``."""

    blocks = True

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return np.arange(n, dtype=np.int64)


class AscendingBlocksByPlace(AscendingBlocks):
    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places

    def length(self, n: int) -> int:
        return n


@settings(deadline=None)
@given(
    n=sizes, seed=seeds, epoch=epochs, batch_size=batch_sizes, world=worlds, tail=tails,
    drop_last=st.booleans(), data=st.data(),
    order=st.sampled_from([Runs(), AscendingBlocksByPlace()]),
)  # fmt: skip
def test_an_order_of_blocks_deals_contiguous_runs_of_its_sequence(
    n: int,
    seed: int,
    epoch: int,
    batch_size: int,
    world: int,
    tail: Tail,
    drop_last: bool,
    order: Order,
    data: st.DataObject,
) -> None:
    deal = Deal(order, n, seed, batch_size, drop_last, world=world, tail=tail)
    position = data.draw(st.integers(0, len(sequence_of(deal, epoch))))
    cursor = Cursor(epoch, position)
    ranks = by_rank(deal, cursor)
    expected = expected_from(deal, cursor)
    for step in zip(*ranks, strict=True):
        for _, _, indices, copies in step:
            run, expected = expected[: len(indices)], expected[len(indices) :]
            assert sorted(zip(indices, copies, strict=True)) == sorted(run)
    assert expected == []
    assert len(ranks[0]) == deal.length(cursor)


@pytest.mark.parametrize("order", [AscendingBlocks(), AscendingBlocksByPlace()])
def test_the_shuffle_of_a_block_is_keyed_by_its_first_place(order: Order) -> None:
    def batches(deal: Deal, cursor: Cursor) -> list[list[int]]:
        return [batch.indices.tolist() for batch in deal.batches(cursor)]

    first, second = batches(Deal(order, 100, 7, 50), Cursor())
    assert sorted(first) == list(range(50))
    assert first != sorted(first)
    assert [index - 50 for index in second] != first
    # Two ranks of 50 are dealt what one rank is dealt in two steps, and so is a resumed run.
    assert batches(Deal(order, 100, 7, 50, rank=1, world=2), Cursor()) == [second]
    assert batches(Deal(order, 100, 7, 50), Cursor(0, 50, 1)) == [second]
    assert batches(Deal(order, 100, 7, 50), Cursor(1)) != [first, second]
    assert batches(Deal(order, 100, 8, 50), Cursor()) != [first, second]


def test_a_smaller_last_step_of_blocks_is_cut_into_equal_runs() -> None:
    deal = Deal(AscendingBlocksByPlace(), n=14, seed=0, batch_size=4, world=2)
    last = [batches[-1][2] for batches in by_rank(deal, Cursor())]
    assert [sorted(indices) for indices in last] == [[8, 9, 10], [11, 12, 13]]


class Counting:
    """A user's order that records the epochs it is called for."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        self.epochs.append(epoch)
        return np.arange(n, dtype=np.int64)


class Sized(Counting):
    def length(self, n: int) -> int:
        return n


def test_an_order_is_computed_once_per_epoch() -> None:
    order = Counting()
    deal = Deal(order, n=10, seed=0, batch_size=2)
    for epoch in (0, 1):
        assert deal.length(Cursor(epoch)) == 5
        cursor = Cursor(epoch)
        for batch in deal.batches(cursor):
            cursor = deal.after(cursor, batch)
            deal.length(Cursor(epoch + 1))
    assert order.epochs == [0, 1, 2]
    assert len(deal._sequences) == 2


def test_an_order_with_a_length_is_not_computed_to_be_counted() -> None:
    order = Sized()
    deal = Deal(order, n=10, seed=0, batch_size=3)
    assert (deal.length(Cursor()), deal.after(Cursor(0, 9, 3))) == (4, Cursor(0, 10, 4))
    assert order.epochs == []


def test_batches_are_read_only_views() -> None:
    for deal in (Deal(Shuffled(), 10, 0, 2), Deal(Ragged(), 10, 0, 2, world=3)):
        batch = next(deal.batches(Cursor(0)))
        assert batch.indices.base is not None
        with pytest.raises(ValueError, match="read-only"):
            batch.indices[0] = 1


def test_a_deal_deals_the_same_after_pickling() -> None:
    deal = Deal(Ragged(), n=30, seed=1, batch_size=4, rank=1, world=3)
    before = [shown(batch) for batch in deal.batches(Cursor(2))]
    assert list(deal._sequences) == [2]
    unpickled = pickle.loads(pickle.dumps(deal))
    assert unpickled == deal
    assert unpickled._sequences == {}
    assert [shown(batch) for batch in unpickled.batches(Cursor(2))] == before


FINGERPRINT = """
import hashlib
from penstock.order import Cursor, Deal, Sequential, Shuffled, Weighted
digest = hashlib.sha256()
weights = [(i * 7) % 11 for i in range(103)]
for order in (Sequential(), Shuffled(), Weighted(weights), Weighted(weights, 50, False)):
    for rank in range(3):
        for cursor in (Cursor(), Cursor(5, 24, 2)):
            deal = Deal(order, 103, 17, 4, rank=rank, world=3)
            for batch in deal.batches(cursor):
                copies = None if batch.replicas is None else batch.replicas.tolist()
                text = repr((batch.epoch, batch.number, batch.indices.tolist(), copies))
                digest.update(text.encode())
result = digest.hexdigest()
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_deals_the_same(hash_seed: str) -> None:
    namespace: dict[str, Any] = {}
    exec(FINGERPRINT, namespace)
    root = str(Path(penstock.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", FINGERPRINT + "\nimport sys; sys.stdout.write(result)"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == namespace["result"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; give a whole number, 1 or more"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"n": -1}, "n is -1"),
        ({"world": 0}, "world is 0"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 2, "world": 2}, "rank is 2 in a world of 2; ranks go from 0 to 1"),
        ({"seed": "lucky"}, "seed is 'lucky'; give a whole number"),
        ({"tail": "keep"}, "tail is 'keep'"),
        ({"order": [0, 1]}, "has no method indices"),
        ({"order": Shuffled}, r"Give an order such as Shuffled\(\)"),
    ],
)
def test_invalid_arguments_are_an_error_when_the_deal_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        Deal(**{"order": Sequential(), "n": 4, "seed": 0, "batch_size": 2, **arguments})


class OutOfRange(Counting):
    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return np.array([0, n], dtype=np.int64)


class WrongLength(Counting):
    def length(self, n: int) -> Any:
        return n + 1


class LengthNotANumber(Counting):
    def length(self, n: int) -> Any:
        return "many"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (OutOfRange(), r"OutOfRange\.indices returned 4 at place 1"),
        (WrongLength(), r"returned 4 indices for epoch 0, but its length\(4\) says 5"),
        (LengthNotANumber(), r"LengthNotANumber\.length\(4\) returned 'many'"),
    ],
)
def test_an_invalid_order_is_an_error_before_the_first_batch(order: Order, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Deal(order, 4, 0, 2).batches(Cursor())


def test_a_cursor_past_the_end_of_the_epoch_is_an_error() -> None:
    deal = Deal(Sequential(), 4, 0, 2)
    for ask in (deal.batches, deal.length):
        with pytest.raises(StateError, match=r"at sample 5 of epoch 0, but .* only 4 samples"):
            ask(Cursor(0, 5, 1))


# Replica numbers. Few values repeat often and close together; large values make the table by index
# too large, so that the entries are sorted instead.
sequences = st.one_of(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 2000), max_size=60),
    st.lists(st.sampled_from([0, 3, 10**12, 2**62]), max_size=20),
)


@settings(deadline=None)
@given(sequences)
def test_replica_numbers_are_those_of_counting_one_by_one(sequence: list[int]) -> None:
    found = replica_numbers(np.array(sequence, dtype=np.int64))
    expected = counted(sequence)
    if found is None:
        assert not any(expected)
    else:
        assert found.dtype == np.int64
        assert any(expected)
        assert found.tolist() == expected


@settings(deadline=None)
@given(sequences.filter(lambda s: max(s, default=0) < 10**6), st.data())
def test_counting_in_chunks_gives_the_numbers_of_the_whole(
    sequence: list[int], data: st.DataObject
) -> None:
    occurrences = Occurrences()
    expected = counted(sequence)
    start = 0
    while start < len(sequence):
        end = start + data.draw(st.integers(1, 20))
        chunk = np.array(sequence[start:end], dtype=np.int64)
        found = occurrences.count(chunk)
        wanted = expected[start:end]
        assert (None if found is None else found.tolist()) == (wanted if any(wanted) else None)
        start = end


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_entries_have_no_repeats(count: int) -> None:
    indices = np.zeros(count, dtype=np.int64)
    assert replica_numbers(indices) is None
    assert Occurrences().count(indices) is None


def test_a_million_random_draws_are_numbered_correctly() -> None:
    indices = np.random.default_rng(0).integers(0, 300_000, 1_000_000)
    found = replica_numbers(indices)
    assert found is not None
    counts = np.bincount(indices)
    # Every index has each of the numbers below its count once, in the order of the sequence.
    assert found.sum() == (counts * (counts - 1) // 2).sum()
    assert np.array_equal(np.bincount(indices, found + 1), counts * (counts + 1) // 2)
    last = np.empty(300_000, dtype=np.int64)
    last[indices] = found
    assert np.array_equal(last[counts > 0] + 1, counts[counts > 0])
