"""Mixed orders: exact shares in every run, own passes, equal ranks, resume anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.order import BatchKeys, Cursor, Deal, Mixed, MixPart, Sequential, Shuffled, Weighted
from penstock.order.mixed import ExactShares

weights_of = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(weights=weights_of, start=st.integers(0, 10**9), length=st.integers(1, 200))
def test_every_run_of_places_has_its_share_of_each_source(
    weights: list[float], start: int, length: int
) -> None:
    shares = ExactShares(weights)
    parts, numbers = shares.at(np.arange(start, start + length))
    most = 1.0 if len(weights) < 3 else 2.0
    for part, weight in enumerate(weights):
        mine = numbers[parts == part]
        assert abs(len(mine) - length * weight / sum(weights)) <= most + 1e-3
        assert all(b == a + 1 for a, b in pairwise(mine.tolist()))
        before, after = shares.counts(start)[part], shares.counts(start + length)[part]
        assert after - before == len(mine)
        assert len(mine) == 0 or mine[0] == before


def mixed(samples: int, *weights: object, lengths: tuple[int, ...] = (20, 7, 3)) -> Mixed:
    parts = zip("abc", lengths, weights, strict=False)
    return Mixed(tuple(MixPart(name, n, w, Shuffled()) for name, n, w in parts), samples)  # type: ignore[arg-type]


def test_each_source_goes_through_its_own_passes() -> None:
    order = mixed(30, 1, 1, 2)
    by_source: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for epoch in range(4):
        for index in order.indices(30, 3, epoch).tolist():
            by_source["a" if index < 20 else "b" if index < 27 else "c"].append(index)
    for name, n in (("a", 20), ("b", 7), ("c", 3)):
        seen = by_source[name]
        passes = [seen[i : i + n] for i in range(0, len(seen) - n + 1, n)]
        assert len(passes) >= 1
        assert all(len(set(one)) == n for one in passes)
        assert len(passes) < 3 or passes[0] != passes[1] or passes[1] != passes[2]


def test_a_sample_that_comes_again_in_an_epoch_has_another_replica_number() -> None:
    order = mixed(30, 1, 1, 2)
    for world in (1, 4):
        keys: list[tuple[int, int]] = []
        for rank in range(world):
            for batch in Deal(order, 30, 3, 4, rank=rank, world=world).batches(Cursor(1)):
                replicas = (
                    np.zeros(len(batch.indices)) if batch.replicas is None else batch.replicas
                )
                keys += zip(batch.indices.tolist(), replicas.tolist(), strict=True)
        assert len(keys) == -(-30 // world) * world
        assert len(set(keys)) == len(keys)


def test_weights_by_epoch_change_the_shares_and_keep_the_passes() -> None:
    by_list = mixed(40, 1, [0, 1, 3], lengths=(50, 10))
    by_function = mixed(
        40, 1, lambda epoch: min(epoch, 1) * (3 if epoch > 1 else 1), lengths=(50, 10)
    )
    counts = []
    for epoch in (3, 0, 1, 2, 4):  # asked for in any order
        indices = by_list.indices(60, 0, epoch)
        assert indices.tolist() == by_function.indices(60, 0, epoch).tolist()
        counts.append(int((indices >= 50).sum()))
    assert counts == [30, 0, 20, 30, 30]
    first = [i for e in range(3) for i in by_list.indices(60, 0, e).tolist() if i < 50]
    assert Counter(first[:50]) == Counter(range(50))
    assert [(p.name, p.share, p.samples, p.passes) for p in by_list.progress(2, 8)] == [
        ("a", 0.25, 2, (40 + 20 + 2) / 50),
        ("b", 0.75, 6, (20 + 6) / 10),
    ]


def test_a_rare_source_comes_even_if_its_share_of_an_epoch_is_below_one_sample() -> None:
    order = mixed(10, 99, 1, lengths=(10, 5))
    rare = sum(int((order.indices(15, 0, epoch) >= 10).sum()) for epoch in range(100))
    assert rare == 10


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_batch_can_be_resumed_with_another_world_and_ranks_have_exact_shares(
    data: st.DataObject,
) -> None:
    order = mixed(data.draw(st.integers(20, 60)), 3, 1, [1, 2])
    n, size = 30, data.draw(st.integers(1, 6))
    before, after = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    epoch = data.draw(st.integers(0, 2))

    def deal(rank: int, world: int) -> Deal:
        return Deal(order, n, 3, size, rank=rank, world=world, tail="drop")

    whole = [list(deal(r, before).batches(Cursor(epoch))) for r in range(before)]
    assert len({len(batches) for batches in whole}) == 1
    stop = data.draw(st.integers(0, len(whole[0])))
    cursor = Cursor(epoch)
    for batch in whole[0][:stop]:
        cursor = deal(0, before).after(cursor, batch)
    seen = [int(i) for batches in whole for b in batches[:stop] for i in b.indices]
    parts = [list(deal(rank, after).batches(cursor)) for rank in range(after)]
    rest = [int(i) for batches in parts for b in batches for i in b.indices]
    everything = Counter(order.indices(n, 3, epoch).tolist())
    dealt = Counter(seen + rest)
    assert not dealt - everything
    assert sum(everything.values()) - sum(dealt.values()) < before + after
    # Resumed with the same world, the same batches follow.
    again = list(deal(0, before).batches(cursor))
    assert [b.indices.tolist() for b in again] == [b.indices.tolist() for b in whole[0][stop:]]
    weights = [3, 1, 1 if epoch == 0 else 2]
    for batch in whole[0]:
        counts = np.histogram(batch.indices, [0, 20, 27, 30])[0]
        expected = len(batch.indices) * np.array(weights) / sum(weights)
        assert (np.abs(counts - expected) <= 2.001).all()


def test_orders_without_at_and_with_repeats_serve_as_passes() -> None:
    weighted = Weighted([1.0, 3.0, 0.0, 2.0], samples=6)
    parts = (MixPart("a", 4, 1, weighted), MixPart("b", 3, 1, Sequential()))
    order = Mixed(parts, samples=24)
    indices, replicas = order.keys_at(7, 0, 0, np.arange(24))
    assert replicas is not None
    keys = list(zip(indices.tolist(), replicas.tolist(), strict=True))
    assert len(set(keys)) == 24
    assert 2 not in indices


def test_padding_has_the_same_replica_numbers_after_a_resume() -> None:
    weighted = Weighted([1.0, 3.0, 1.0, 2.0, 1.0], samples=5)
    for samples in (29, 32, 35):
        parts = (MixPart("a", 5, 1, weighted), MixPart("b", 40, 1, Shuffled()))
        for rank in range(3):
            deal = Deal(Mixed(parts, samples), 45, seed=0, batch_size=4, rank=rank, world=3)
            whole = [_plain(batch) for batch in deal.batches(Cursor())]
            for stop in range(len(whole)):
                rest = deal.batches(Cursor(0, 12 * stop, stop))
                assert [_plain(batch) for batch in rest] == whole[stop:]


def _plain(batch: BatchKeys) -> tuple[list[int], list[int] | None]:
    replicas = batch.replicas
    return batch.indices.tolist(), None if replicas is None else replicas.tolist()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(PipelineError, match="weight of 'b' in epoch 0 is -1"):
        mixed(5, 1, -1)
    with pytest.raises(PipelineError, match="All weights of the mix are 0 in epoch 2"):
        mixed(5, [1, 1, 0], 0).indices(27, 0, 2)
    with pytest.raises(PipelineError, match="have 27 samples together, but the source of the lo"):
        mixed(5, 1, 1).indices(20, 0, 0)

    class NoLength:
        def indices(self, n: int, seed: int, epoch: int) -> np.ndarray:
            return np.arange(n)

    with pytest.raises(PipelineError, match="NoLength, the order of 'a' in a mix, has no method"):
        Mixed((MixPart("a", 3, 1, NoLength()),), 3)
