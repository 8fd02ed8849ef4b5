"""Epochs that begin in the middle, as checkpoints restore them."""

from __future__ import annotations

from penstock.order import Cursor, Deal, MidEpoch, Sequential


def rest(plan: MidEpoch, cursor: Cursor) -> list[list[int]]:
    return [batch.indices.tolist() for batch in plan.batches(cursor)]


def test_the_first_batch_of_an_epoch_is_that_of_the_last_checkpoint() -> None:
    plan = MidEpoch(Deal(Sequential(), n=8, seed=0, batch_size=2))
    plan.begin_at(0, 2)
    assert rest(plan, Cursor(0, 0, batch=1)) == [[6, 7], [0, 1], [2, 3]]
    plan.begin_at(0, 0)
    assert rest(plan, Cursor(0, position=2, batch=1)) == [[2, 3], [4, 5], [6, 7]]
