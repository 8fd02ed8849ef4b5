"""Generations: what was prepared is used so often and no more, and every epoch renews its part."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.order import Generations, shuffle


@st.composite
def renewals(draw: st.DrawFn) -> Generations:
    n = draw(st.integers(0, 60))
    kept = draw(st.one_of(st.just(n), st.integers(0, n)))
    return Generations(n, draw(st.integers(1, 9)), kept, draw(st.integers(0, 2**32)))


limits = st.sampled_from([0, 8, shuffle.LISTED])


def generations(renewal: Generations, epochs: int) -> list[list[int]]:
    """For each sample, its generation in every epoch."""
    everyone = range(renewal.n)
    return [[renewal.generation(index, e) for e in range(epochs)] for index in everyone]


@settings(deadline=None)
@given(renewal=renewals(), limit=limits)
def test_first_versions_serve_up_to_reuse_epochs_and_later_ones_exactly(
    renewal: Generations, limit: int
) -> None:
    epochs = 4 * renewal.reuse + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        lives = generations(renewal, epochs)
        kept = [renewal.keeps(index) for index in range(renewal.n)]
    assert sum(kept) == renewal.kept
    firsts: Counter[int] = Counter()
    for keeps, life in zip(kept, lives, strict=True):
        if not keeps:
            assert life == list(range(epochs))
            continue
        runs = [(generation, len(list(run))) for generation, run in groupby(life)]
        assert [generation for generation, _ in runs] == list(range(len(runs)))
        (_, first), *later, (_, unfinished) = runs
        assert 1 <= first <= renewal.reuse
        assert all(used == renewal.reuse for _, used in later)
        assert 1 <= unfinished <= renewal.reuse
        firsts[first] += 1
    # Each turn has its equal part of the first versions too.
    counts = [firsts[used] for used in range(1, renewal.reuse + 1)]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(renewal=renewals(), limit=limits)
def test_what_is_fresh_is_what_has_another_generation_than_before(
    renewal: Generations, limit: int
) -> None:
    epochs = 2 * renewal.reuse + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        for index, life in enumerate(generations(renewal, epochs)):
            changed = [True, *(now != last for last, now in pairwise(life))]
            assert [renewal.is_fresh(index, epoch) for epoch in range(epochs)] == changed
        for epoch in range(epochs):
            fresh = sum(renewal.is_fresh(index, epoch) for index in range(renewal.n))
            assert renewal.fresh(epoch) == fresh
    assert renewal.fresh(0) == renewal.n


@settings(deadline=None)
@given(renewal=renewals())
def test_epochs_after_the_first_prepare_equally_many(renewal: Generations) -> None:
    counts = [renewal.fresh(epoch) for epoch in range(1, 3 * renewal.reuse + 1)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts[: renewal.reuse]) == renewal.kept + renewal.reuse * (renewal.n - renewal.kept)


@settings(deadline=None)
@given(renewal=renewals(), epoch=st.integers(0, 40), limit=limits)
def test_one_by_one_and_all_at_once_agree(renewal: Generations, epoch: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        single = [renewal.generation(index, epoch) for index in range(renewal.n)]
        found = renewal.generations(np.arange(renewal.n), epoch)
    assert found.dtype == np.int64
    assert found.tolist() == single


@settings(deadline=None)
@given(
    n=st.integers(shuffle.LISTED + 1, 1 << 50), reuse=st.integers(1, 1 << 30),
    share=st.floats(0, 1), epoch=st.integers(0, 1000), data=st.data(),
)  # fmt: skip
def test_numbers_of_any_size_agree(
    n: int, reuse: int, share: float, epoch: int, data: st.DataObject
) -> None:
    renewal = Generations(n, reuse, int(n * share), seed=0)
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=10))
    single = [renewal.generation(index, epoch) for index in indices]
    assert renewal.generations(np.array(indices, dtype=np.int64), epoch).tolist() == single
    assert all(0 <= generation <= epoch for generation in single)


@pytest.mark.parametrize("kept", [0, 100_001, 200_000])
def test_many_samples_are_renewed_by_the_same_rules(kept: int) -> None:
    renewal = Generations(200_000, 3, kept, seed=5)
    everyone = np.arange(renewal.n)
    lives = np.stack([renewal.generations(everyone, epoch) for epoch in range(10)])
    fresh = (np.diff(lives, axis=0) == 1).sum(axis=1).tolist()
    assert fresh == [renewal.fresh(epoch) for epoch in range(1, 10)]
    assert max(fresh) - min(fresh) <= 1
    keeps = lives[-1] < 9
    assert keeps.sum() == kept
    # Nine renewals by turns of three: every kept sample has had its three.
    assert bool((lives[-1, keeps] == 3).all())
    some = range(0, renewal.n, 1999)
    assert [renewal.generation(index, 7) for index in some] == lives[7, ::1999].tolist()
    assert [renewal.keeps(index) for index in some] == keeps[::1999].tolist()


@pytest.mark.parametrize("n", [50, 200_000])
def test_without_reuse_every_epoch_is_a_generation(n: int) -> None:
    renewal = Generations(n, 1, n // 2, seed=0)
    for epoch in (0, 1, 7):
        assert renewal.fresh(epoch) == n
        assert renewal.generation(3, epoch) == epoch
        assert renewal.generations(np.arange(20), epoch).tolist() == [epoch] * 20


def test_more_may_be_kept_without_changing_who_was_kept() -> None:
    few, more = Generations(100, 3, 20, seed=1), Generations(100, 3, 60, seed=1)
    assert all(more.keeps(index) for index in range(100) if few.keeps(index))


def test_seeds_renew_in_another_sequence() -> None:
    one, other = (Generations(300, 3, 300, seed).generations(np.arange(300), 1) for seed in (0, 1))
    assert one.sum() == other.sum() == 100
    assert 100 < (one != other).sum() < 170  # 133 are expected


def test_what_checkpoints_go_on_with_never_changes() -> None:
    renewal = Generations(1_000_003, 3, 900_000, seed=3)
    places = np.array([0, 1, 2, 500_000, 1_000_002])
    samples = [920695, 593367, 173618, 832553, 386432]
    assert renewal.queued(places).tolist() == samples
    assert renewal.generations(np.array(samples), 8).tolist() == [3, 3, 3, 3, 8]


def test_a_renewal_travels_and_says_the_same() -> None:
    renewal = Generations(40, 3, 30, seed=2)
    travelled = pickle.loads(pickle.dumps(renewal))
    assert travelled == renewal
    assert repr(travelled) == "Generations(n=40, reuse=3, kept=30, seed=2)"
    assert generations(travelled, 5) == generations(renewal, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n is -1; give a whole number, 0 or more"),
        ({"reuse": 0}, "reuse is 0; give a whole number, 1 or more"),
        ({"reuse": 2.5}, "reuse is 2.5"),
        ({"kept": -1}, "kept is -1"),
        ({"kept": 11}, "11 samples are to be kept, and the source has 10. Give 10 or fewer"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Generations(**{"n": 10, "reuse": 3, "kept": 10, "seed": 0, **arguments})
