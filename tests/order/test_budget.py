"""Batches by length: within the budget, exactly once, equal ranks, resume anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError, StateError
from penstock.order import (
    Budget,
    Budgeted,
    Cursor,
    Mixed,
    MixPart,
    Order,
    Sequential,
    Shuffled,
    Weighted,
)

lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=60)
Keys = list[tuple[int, int]]


def keys_of(batches: Any) -> Keys:
    found: Keys = []
    for batch in batches:
        replicas = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
        found += zip(batch.indices.tolist(), replicas, strict=True)
    return found


def orders(n: int) -> st.SearchStrategy[Order]:
    half = max(1, n // 2)
    parts = [MixPart("a", half, 2, Shuffled())]
    if n > half:
        parts.append(MixPart("b", n - half, 1, Shuffled()))
    return st.sampled_from(
        [Sequential(), Shuffled(), Weighted(np.arange(1, n + 1)), Mixed(tuple(parts), n + 5)]
    )


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_batch_can_be_resumed_with_another_world(data: st.DataObject) -> None:
    lengths = np.array(data.draw(lengths_of))
    n = len(lengths)
    padded, size = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 5))
    budget = Budget(lengths, 30, size, padded, data.draw(st.none() | st.integers(1, 40)))
    order = data.draw(orders(n))
    before, after = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    tail: Literal["pad", "drop"] = data.draw(st.sampled_from(["pad", "drop"]))
    epoch = data.draw(st.integers(0, 2))

    def plan(rank: int, world: int) -> Budgeted:
        return Budgeted(order, n, 3, budget, rank, world, tail)

    alone = list(plan(0, 1).batches(Cursor(epoch)))
    whole = [list(plan(rank, before).batches(Cursor(epoch))) for rank in range(before)]
    assert {len(batches) for batches in whole} == {plan(0, before).length(Cursor(epoch))}
    stop = data.draw(st.integers(0, len(whole[0])))
    cursor = Cursor(epoch)
    for batch in whole[0][:stop]:
        cursor = plan(0, before).after(cursor, batch)
    assert cursor.batch == stop
    seen = [batch for batches in whole for batch in batches[:stop]]
    rest = [list(plan(rank, after).batches(cursor)) for rank in range(after)]
    assert {len(batches) for batches in rest} == {plan(0, after).length(cursor)}
    for batch in seen + [batch for batches in rest for batch in batches]:
        costs = np.maximum(1, lengths[batch.indices])
        assert len(costs)
        assert (costs.max() * len(costs) if padded else costs.sum()) <= 30
        assert size is None or len(costs) <= size
    dealt = Counter(keys_of([*seen, *(batch for batches in rest for batch in batches)]))
    assert max(dealt.values(), default=0) <= 1
    expected = Counter(keys_of(alone))
    if tail == "drop":
        assert not dealt - expected
    # Only a last step of fewer samples than ranks repeats samples or leaves them out.
    missing = sum((expected - dealt).values())
    assert missing == 0 if tail == "pad" else missing < max(before, after)
    again = list(plan(0, before).batches(cursor))
    assert keys_of(again) == keys_of(whole[0][stop:])


def test_a_batch_has_samples_of_similar_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 4000)

    def padding(window: int | None) -> float:
        budget = Budget(lengths, 4000, padded=True, window=window)
        batches = list(Budgeted(Shuffled(), 4000, 0, budget).batches(Cursor()))
        cells = sum(lengths[b.indices].max() * len(b.indices) for b in batches)
        return 1 - int(lengths.sum()) / int(cells)

    assert padding(None) < 0.03 < 0.3 < padding(1 << 4)


def test_batches_of_a_window_are_shuffled_unless_the_order_is_sequential() -> None:
    budget = Budget(np.arange(1, 101), size=5)
    firsts = [
        [int(b.indices.max()) for b in Budgeted(order, 100, 0, budget, shuffle=s).batches(Cursor())]
        for order, s in ((Sequential(), False), (Shuffled(), True))
    ]
    assert all(a < b for a, b in pairwise(firsts[0]))
    assert sorted(firsts[1]) == firsts[0] != firsts[1]
    second = [b.indices.max() for b in Budgeted(Shuffled(), 100, 0, budget).batches(Cursor(1))]
    assert sorted(second) == firsts[0]
    assert second != firsts[1]


@pytest.mark.parametrize("too_long", ["raise", "drop", "alone"])
def test_a_sample_longer_than_the_budget(too_long: Any) -> None:
    budget = Budget(np.array([3, 50, 3, 70, 3]), 10, too_long=too_long)
    if too_long == "raise":
        with pytest.raises(PipelineError, match=r"2 of 5 samples .* is name 3 \(index 3\) with 70"):
            budget.check(lambda index: f"name {index}")
        return
    budget.check(str)
    batches = Budgeted(Sequential(), 5, 0, budget, shuffle=False).batches(Cursor())
    found = [batch.indices.tolist() for batch in batches]
    assert found == ([[0, 2, 4]] if too_long == "drop" else [[0, 2, 4], [1], [3]])


def test_wrong_arguments_and_cursors_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"Length 1 of batch.. is -1"):
        Budget(np.array([1, -1]), 5)
    with pytest.raises(PipelineError, match="without a size"):
        Budget(np.array([1]))
    with pytest.raises(PipelineError, match="tokens is 0"):
        Budget(np.array([1]), 0)
    with pytest.raises(PipelineError, match="too_long is 'cut'"):
        Budget(np.array([1]), 5, too_long="cut")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="All 2 samples are longer"):
        Budget(np.array([7, 8]), 5, too_long="drop").check(str)
    with pytest.raises(PipelineError, match="got 2 lengths, but the source has 3"):
        Budgeted(Sequential(), 3, 0, Budget(np.array([7, 8]), 9))
    with pytest.raises(StateError, match="after 9 batches of epoch 0, but with this budget"):
        Budgeted(Sequential(), 1, 0, Budget(np.array([7]), 9)).batches(Cursor(0, 9, 9))
