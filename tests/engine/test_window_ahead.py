"""Reading ahead: storage is asked for samples in sequence, before they can be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from penstock.engine.window_ahead import window_ahead
from penstock.order import Cursor, Deal, Shuffled
from penstock.source.tar import TarSource
from tests.support.contract import packed


def test_samples_are_asked_for_in_sequence_and_all_of_them(monkeypatch: Any) -> None:
    asked: list[NDArray[np.int64]] = []
    monkeypatch.setattr(TarSource, "will_need", lambda self, indices: asked.append(indices))
    source = packed().source
    order = ps.Reservoir(window=12).over(source.shards, "x")
    deal = Deal(order, 53, 0, 4)
    drawn: list[int] = []
    for batch in window_ahead(deal.batches(Cursor()), deal, source):
        drawn += batch.indices.tolist()
        if len(drawn) > 16:  # after the first window, nothing is drawn that was not asked for
            assert set(drawn) <= set(np.concatenate(asked).tolist())
    sequence = np.concatenate(asked)
    assert sorted(sequence.tolist()) == list(range(53))
    # Shards come one after the other, each from its start to its end.
    assert (np.diff(sequence) == 1).sum() == 53 - 6


def test_other_orders_do_not_read_ahead() -> None:
    source = packed().source
    batches = iter(())
    assert window_ahead(batches, Deal(Shuffled(), 53, 0, 4), source) is batches
    assert window_ahead(batches, None, source) is batches


def test_asking_ahead_changes_no_batch() -> None:
    pipeline = packed().batch(4)
    with pipeline.loader(workers=0, order=ps.Reservoir(window=12), seed=1) as loader:
        seen = [x for _, labels in loader for x in labels.tolist()]
    expected = ps.Reservoir(12).over(packed().source.shards, "x").indices(53, 1, 0)
    assert seen == expected.tolist()
