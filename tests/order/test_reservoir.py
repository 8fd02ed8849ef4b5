"""Reservoirs: exactly once, uniform within the window, equal ranks, resume anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PipelineError
from penstock.keyed import Key
from penstock.order import Cursor, Deal, Reservoir
from penstock.order import reservoir as module
from penstock.order.reservoir import ReservoirOnce, Streamed

shards_of = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)


def simulated(streamed: Streamed, seed: int, epoch: int) -> list[int]:
    """The same window, step by step: one lane, as a program would keep it in memory."""
    count, slots = streamed.n, streamed.slots(0)
    walk = module._LaneWindow(slots, count, seed, epoch, 0)
    blocks = range(-(-(count - slots) // module.BLOCK))
    draws = [slot for block in blocks for slot in walk._draws(block).tolist()]
    sequence = streamed.samples(seed, epoch, np.arange(count)).tolist()
    window, out = sequence[:slots], []
    for step, slot in enumerate(draws):
        out.append(window[slot])
        window[slot] = sequence[slots + step]
    rest = walk._keyed.fresh(Key(len(blocks), epoch, 1)).permutation(slots)
    return [*out, *(window[slot] for slot in rest.tolist())]


@settings(deadline=None, max_examples=50)
@given(shards=shards_of, window=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_it_is_the_shuffle_buffer_that_programs_keep_in_memory(
    shards: list[int], window: int, seed: int, epoch: int
) -> None:
    order = ReservoirOnce(Streamed(tuple(shards), window, 1))
    n = sum(shards)
    assert order.indices(n, seed, epoch).tolist() == simulated(order.streamed, seed, epoch)


@pytest.mark.parametrize("block", [4, 4096])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_sample_comes_once_and_any_place_can_be_asked_for(
    block: int, data: st.DataObject
) -> None:
    shards = data.draw(shards_of)
    order = Reservoir(data.draw(st.integers(1, 60)), lanes=data.draw(st.integers(1, 5)))
    n, seed = sum(shards), data.draw(st.integers(0, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        module._windows.cache_clear()
        bound = order.over(np.array(shards), "x")
        whole = bound.indices(n, seed, 1)
        assert sorted(whole.tolist()) == list(range(n))
        for place in data.draw(st.lists(st.integers(0, n - 1), max_size=5)):
            module._windows.cache_clear()
            assert bound.at(n, seed, 1, np.array([place])).tolist() == [whole[place]]  # type: ignore[attr-defined]
    module._windows.cache_clear()


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_batch_can_be_resumed_with_another_world(data: st.DataObject) -> None:
    shards = data.draw(shards_of)
    n = sum(shards)
    order = Reservoir(data.draw(st.integers(1, 30)), lanes=data.draw(st.integers(1, 4))).over(
        np.array(shards), "x"
    )
    size, before, after = (data.draw(st.integers(1, 4)) for _ in range(3))

    def deal(rank: int, world: int) -> Deal:
        return Deal(order, n, 3, size, rank=rank, world=world, tail="drop")

    whole = [list(deal(r, before).batches(Cursor(1))) for r in range(before)]
    assert len({len(batches) for batches in whole}) == 1
    stop = data.draw(st.integers(0, len(whole[0])))
    seen = [int(i) for batches in whole for b in batches[:stop] for i in b.indices]
    cursor = Cursor(1)
    for batch in whole[0][:stop]:
        cursor = deal(0, before).after(cursor, batch)
    rest = [
        int(i)
        for rank in range(after)
        for b in deal(rank, after).batches(cursor)
        for i in b.indices
    ]
    everything = seen + rest
    assert len(set(everything)) == len(everything)
    left_out = n - len(everything)
    assert 0 <= left_out < after + before


def test_lanes_give_each_rank_shards_of_its_own() -> None:
    order = Reservoir(window=40, lanes=4).over(np.full(8, 100), "x")
    ranks = [set[int](), set[int]()]
    for rank in range(2):
        for batch in Deal(order, 800, 0, 10, rank=rank, world=2).batches(Cursor()):
            ranks[rank] |= set((batch.indices // 100).tolist())
    assert [len(shards) for shards in ranks] == [4, 4]
    assert not ranks[0] & ranks[1]


def test_samples_leave_the_window_uniformly() -> None:
    """In every step each slot is equally likely: chi-squared over the slots, with a fixed seed."""
    slots, steps = 50, 200_000
    walk = module._LaneWindow(slots, steps + slots, 7, 0, 0)
    draws = np.concatenate([walk._draws(block) for block in range(walk._blocks)])
    expected = steps / slots
    chi = float(((np.bincount(draws, minlength=slots) - expected) ** 2 / expected).sum())
    assert 20 < chi < 90  # 49 degrees of freedom: outside of that in 1 of 10,000 cases
    # A sample waits 50 steps on average, and its waiting time is geometric.
    position = np.empty(steps + slots, dtype=np.int64)
    position[walk.leaving(np.arange(steps + slots))] = np.arange(steps + slots)
    waited = position[slots:steps] - np.arange(0, steps - slots)
    assert abs(waited.mean() - slots) < 1.0
    shares = [float((waited > k * slots).mean()) for k in (1, 2, 4)]
    assert np.allclose(shares, [np.exp(-k) for k in (1, 2, 4)], atol=0.01)


def test_a_window_of_everything_is_a_uniform_shuffle() -> None:
    order = Reservoir(window=6, shards=(3, 3)).over(None, "x")
    counts = np.zeros((6, 6))
    for epoch in range(1800):
        counts[np.arange(6), order.indices(6, 0, epoch)] += 1
    chi = float(((counts - 300) ** 2 / 300).sum())
    assert chi < 60  # 25 degrees of freedom


def test_epochs_seeds_and_shards_differ() -> None:
    order = Reservoir(window=10).over(np.full(10, 10), "x")
    first, second = (order.indices(100, 0, epoch) for epoch in range(2))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, order.indices(100, 1, 0))
    # The shards come in another sequence, not only the samples within them.
    assert [int(x) // 10 for x in first[::25]] != [int(x) // 10 for x in second[::25]]


def test_with_replacement_samples_stay_in_the_window() -> None:
    order = Reservoir(window=100, replace=True, lanes=2).over(np.full(20, 500), "x")
    drawn = order.indices(10_000, 0, 0)
    assert len(drawn) == 10_000
    assert not hasattr(order, "at")
    counts = np.bincount(drawn, minlength=10_000)
    # A sample is drawn 1 / w times in each of about w steps: a geometric number of times, so half
    # of all samples come at least once.
    assert 0.48 < (counts > 0).mean() < 0.53
    assert abs(counts.var() - 2.0) < 0.3
    # Nothing is drawn before it has come in.
    sequence = order.streamed.samples(0, 0, np.arange(10_000))  # type: ignore[attr-defined]
    position = np.argsort(sequence)
    assert (position[drawn[::2]] < 50 + np.arange(5000)).all()


def test_auto_takes_the_samples_of_eight_shards() -> None:
    order = Reservoir().over(np.array([100, 300, 200, 0]), "x")
    assert order.streamed.window == 1600  # type: ignore[attr-defined]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(PipelineError, match="window is 0"):
        Reservoir(window=0)
    with pytest.raises(PipelineError, match="lanes is 0"):
        Reservoir(lanes=0)
    with pytest.raises(PipelineError, match="DatasetSource, which has no shards"):
        ps.from_dataset(range(5)).batch(2).loader(order=Reservoir(3))
    with pytest.raises(PipelineError, match="4 samples together, but the source has 5"):
        list(ps.from_dataset(range(5)).batch(2).loader(order=Reservoir(3, shards=[4]), workers=0))
