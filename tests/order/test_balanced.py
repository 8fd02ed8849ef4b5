"""Balanced: every sample once, and an equal share of the fresh ones in every batch and rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.order import Balanced, BatchKeys, Cursor, Deal, Generations, Order, shuffle

Tail = Literal["pad", "drop"]

limits = st.sampled_from([0, 8, shuffle.LISTED])
epochs = st.integers(0, 12)
worlds = st.integers(1, 6)
batch_sizes = st.integers(1, 9)


@contextmanager
def listed(limit: int) -> Iterator[None]:
    """Above ``limit`` samples, sequences are computed place by place instead of listed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        yield


@st.composite
def all_generations(draw: st.DrawFn) -> Generations:
    n = draw(st.integers(0, 60))
    kept = draw(st.one_of(st.just(n), st.integers(0, n)))
    return Generations(n, draw(st.integers(1, 7)), kept, draw(st.integers(0, 2**32)))


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    generations = draw(all_generations())
    tail: Tail = draw(st.sampled_from(["pad", "drop"]))
    return Deal(
        Balanced(generations), generations.n, draw(st.integers(0, 2**32)), draw(batch_sizes),
        drop_last=draw(st.booleans()), world=draw(worlds), tail=tail,
    )  # fmt: skip


def by_rank(deal: Deal, cursor: Cursor) -> list[list[BatchKeys]]:
    return [list(replace(deal, rank=rank).batches(cursor)) for rank in range(deal.world)]


def keys(batch: BatchKeys) -> list[tuple[int, int]]:
    copies = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
    return list(zip(batch.indices.tolist(), copies, strict=True))


def shown(ranks: list[list[BatchKeys]]) -> list[list[tuple[int, int, list[tuple[int, int]]]]]:
    return [[(b.epoch, b.number, keys(b)) for b in batches] for batches in ranks]


def generations_of(order: Order) -> Generations:
    assert isinstance(order, Balanced)
    return order.generations


@settings(deadline=None)
@given(generations=all_generations(), seed=st.integers(0, 2**32), epoch=epochs, limit=limits)
def test_fresh_samples_are_spread_evenly_and_every_sample_occurs_once(
    generations: Generations, seed: int, epoch: int, limit: int
) -> None:
    n, fresh = generations.n, generations.fresh(epoch)
    with listed(limit):
        dealt = Balanced(generations).indices(n, seed, epoch)
        so_far = np.cumsum([generations.is_fresh(index, epoch) for index in dealt.tolist()])
    assert np.array_equal(np.sort(dealt), np.arange(n))
    assert so_far.tolist() == [s * fresh // n for s in range(1, n + 1)]


@settings(deadline=None)
@given(deal=deals(), epoch=epochs, limit=limits)
def test_an_epoch_deals_every_sample_once_and_equally_many_to_each_rank(
    deal: Deal, epoch: int, limit: int
) -> None:
    with listed(limit):
        ranks = by_rank(deal, Cursor(epoch))
        assert deal.length(Cursor(epoch)) == len(ranks[0])
    for batches in ranks:
        assert [b.number for b in batches] == list(range(len(ranks[0])))
        assert [len(b.indices) for b in batches] == [len(b.indices) for b in ranks[0]]
        assert all(len(b.indices) == deal.batch_size for b in batches[:-1])
    cards = [key for batches in ranks for batch in batches for key in keys(batch)]
    assert len(cards) == len(set(cards))
    firsts = {index for index, replica in cards if replica == 0}
    copies = len(cards) - len(firsts)
    if deal.drop_last:
        assert deal.n - len(firsts) < deal.batch_size * deal.world
    elif deal.tail == "pad":
        assert (len(firsts), copies) == (deal.n, -deal.n % deal.world)
    else:
        assert (len(firsts), copies) == (deal.n - deal.n % deal.world, 0)


@settings(deadline=None)
@given(deal=deals(), epoch=epochs, limit=limits, data=st.data())
def test_every_batch_of_every_rank_has_its_share_of_fresh_samples(
    deal: Deal, epoch: int, limit: int, data: st.DataObject
) -> None:
    generations = generations_of(deal.order)
    n, fresh = deal.n, generations.fresh(epoch)
    position = data.draw(st.integers(0, n))
    with listed(limit):
        for batch in (b for batches in by_rank(deal, Cursor(epoch, position)) for b in batches):
            found = [i for i, replica in keys(batch) if replica == 0]
            missed = sum(generations.is_fresh(index, epoch) for index in found)
            assert len(found) * fresh // n <= missed <= -(-len(found) * fresh // n)


@settings(deadline=None)
@given(deal=deals(), epoch=epochs, limit=limits, data=st.data())
def test_a_resume_deals_exactly_the_rest(
    deal: Deal, epoch: int, limit: int, data: st.DataObject
) -> None:
    with listed(limit):
        run_through = by_rank(deal, Cursor(epoch))
        stop = data.draw(st.integers(0, len(run_through[0])))
        cursor = Cursor(epoch)
        for batch in run_through[0][:stop]:
            cursor = deal.after(cursor, batch)
        rest = by_rank(deal, cursor)
    assert shown(rest) == shown([batches[stop:] for batches in run_through])


@settings(deadline=None)
@given(
    deal=deals(), epoch=epochs, limit=limits,
    phases=st.lists(st.tuples(worlds, batch_sizes, st.integers(0, 5)), max_size=5),
)  # fmt: skip
def test_the_rest_after_a_position_does_not_depend_on_world_and_batch_size(
    deal: Deal, epoch: int, limit: int, phases: list[tuple[int, int, int]]
) -> None:
    with listed(limit):
        sequence = deal.order.indices(deal.n, deal.seed, epoch).tolist()
        cursor = Cursor(epoch)
        for world, batch_size, steps in phases:
            phase = replace(deal, world=world, batch_size=batch_size)
            # Only full steps: an incomplete step ends the epoch.
            steps = min(steps, (deal.n - cursor.position) // (world * batch_size))
            dealt = [batches[:steps] for batches in by_rank(phase, cursor)]
            found = [key for batches in dealt for batch in batches for key in keys(batch)]
            begun = cursor.position
            for _ in range(steps):
                cursor = phase.after(cursor)
            assert sorted(found) == sorted((i, 0) for i in sequence[begun : cursor.position])
        last = replace(deal, drop_last=False, tail="pad")
        cards = [key for batches in by_rank(last, cursor) for b in batches for key in keys(b)]
    firsts = [index for index, replica in cards if replica == 0]
    assert sorted(firsts) == sorted(sequence[cursor.position :])
    # The padding is taken from the start of the sequence.
    copies = [index for index, replica in cards if replica == 1]
    assert set(copies) == set(sequence[: len(copies)])


@settings(deadline=None)
@given(
    generations=all_generations(),
    seed=st.integers(0, 2**32),
    epoch=epochs,
    limit=limits,
    data=st.data(),
)
def test_single_places_agree_with_the_whole_sequence(
    generations: Generations, seed: int, epoch: int, limit: int, data: st.DataObject
) -> None:
    order, n = Balanced(generations), generations.n
    wanted = data.draw(st.lists(st.integers(0, n - 1), max_size=9)) if n else []
    places = np.array(wanted, dtype=np.int64)
    with listed(limit):
        found = order.at(n, seed, epoch, places)
        assert found.tolist() == order.indices(n, seed, epoch)[places].tolist()
    assert found.dtype == np.int64


@pytest.mark.parametrize("kept", [200_000, 120_000])
def test_many_samples_are_dealt_by_the_same_rules(kept: int) -> None:
    n, epoch, world = 200_000, 4, 3
    generations = Generations(n, 3, kept, seed=1)
    before, now = (generations.generations(np.arange(n), e) for e in (epoch - 1, epoch))
    fresh = now > before
    deal = Deal(Balanced(generations), n, 1, 256, world=world)
    ranks = by_rank(deal, Cursor(epoch))
    counts = np.bincount(np.concatenate([b.indices for batches in ranks for b in batches]))
    assert (counts.min(), counts.max(), counts.sum()) == (1, 2, n + -n % world)
    share = 256 * int(fresh.sum()) / n
    missed = {int(fresh[b.indices].sum()) for batches in ranks for b in batches[:-1]}
    assert missed == {int(share), int(share) + 1}
    assert deal.after(Cursor(epoch, 768, 1)) == Cursor(epoch, 1536, 2)
    resumed = [next(replace(deal, rank=r).batches(Cursor(epoch, 768, 1))) for r in range(world)]
    assert [keys(batch) for batch in resumed] == [keys(batches[1]) for batches in ranks]


def test_places_of_very_many_samples_are_exact() -> None:
    n = 1 << 40
    generations = Generations(n, 3, n - 5, seed=0)
    order = Balanced(generations)
    places = np.array([0, 12345, n // 2, n - 2, n - 1])
    found = order.at(n, 0, 5, places).tolist()
    fresh = generations.fresh(5)
    expected = [(s + 1) * fresh // n > s * fresh // n for s in places.tolist()]
    assert [generations.is_fresh(index, 5) for index in found] == expected
    assert len(set(found)) == 5


@pytest.mark.parametrize("n", [3_000, 200_000])
def test_fresh_and_kept_samples_are_shuffled_anew_each_epoch(n: int) -> None:
    generations = Generations(n, 2, n, seed=0)
    order = Balanced(generations)
    # Epochs 1 and 3 renew the same half, but in different sequences.
    assert generations.span(1) == generations.span(3)
    one, other = order.indices(n, 0, 1), order.indices(n, 0, 3)
    assert (one == other).sum() < 15  # two are expected by chance
    # The renewed samples are not in the same sequence as the kept ones.
    place = np.argsort(generations.queued(np.arange(n))) % (n // 2)
    assert (place[one[0::2]] == place[one[1::2]]).sum() < 15
    for half in (slice(0, None, 2), slice(1, None, 2)):
        assert set(one[half]) == set(other[half])
        for dealt in (one, other):
            # No order is left: neighbours are as far apart as two random samples.
            assert abs(np.abs(np.diff(dealt[half])).mean() / (n / 3) - 1) < 0.05
            assert abs(np.corrcoef(dealt[half], np.arange(n // 2))[0, 1]) < 0.1


def test_fresh_samples_are_at_any_row_of_a_batch() -> None:
    generations = Generations(4_000, 4, 4_000, seed=0)
    deal = Deal(Balanced(generations), 4_000, 0, 8)
    by_row = np.zeros(8)
    for batch in deal.batches(Cursor(2)):
        by_row += [generations.is_fresh(index, 2) for index in batch.indices.tolist()]
    # 1,000 in all, so 125 in every row: 4.5 standard deviations to either side.
    assert by_row.sum() == 1_000
    assert abs(by_row - 125).max() < 4.5 * np.sqrt(500 * 0.25 * 0.75)


def test_another_number_of_samples_is_an_error_before_the_first_batch() -> None:
    order = Balanced(Generations(10, 3, 10, seed=0))
    with pytest.raises(PipelineError, match="made for 10 samples, but the source has 11"):
        Deal(order, 11, 0, 2).batches(Cursor())
    with pytest.raises(PipelineError, match="made for 10 samples, but the source has 11"):
        order.indices(11, 0, 0)


def test_a_balanced_order_deals_the_same_after_pickling() -> None:
    order = Balanced(Generations(30, 3, 20, seed=4))
    unpickled = pickle.loads(pickle.dumps(order))
    assert unpickled == order
    assert np.array_equal(unpickled.indices(30, 4, 2), order.indices(30, 4, 2))
