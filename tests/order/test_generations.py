"""Generations: each prepared version serves ``reuse`` epochs, and every epoch renews its part."""

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
def all_generations(draw: st.DrawFn) -> Generations:
    n = draw(st.integers(0, 60))
    kept = draw(st.one_of(st.just(n), st.integers(0, n)))
    return Generations(n, draw(st.integers(1, 9)), kept, draw(st.integers(0, 2**32)))


limits = st.sampled_from([0, 8, shuffle.LISTED])


def lives_of(generations: Generations, epochs: int) -> list[list[int]]:
    """For each sample, its generation in every epoch."""
    everyone = range(generations.n)
    return [[generations.generation(index, e) for e in range(epochs)] for index in everyone]


@settings(deadline=None)
@given(generations=all_generations(), limit=limits)
def test_first_versions_serve_up_to_reuse_epochs_and_later_ones_exactly(
    generations: Generations, limit: int
) -> None:
    epochs = 4 * generations.reuse + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        lives = lives_of(generations, epochs)
        kept = [generations.keeps(index) for index in range(generations.n)]
    assert sum(kept) == generations.kept
    firsts: Counter[int] = Counter()
    for keeps, life in zip(kept, lives, strict=True):
        if not keeps:
            assert life == list(range(epochs))
            continue
        runs = [(generation, len(list(run))) for generation, run in groupby(life)]
        assert [generation for generation, _ in runs] == list(range(len(runs)))
        (_, first), *later, (_, unfinished) = runs
        assert 1 <= first <= generations.reuse
        assert all(used == generations.reuse for _, used in later)
        assert 1 <= unfinished <= generations.reuse
        firsts[first] += 1
    # The first versions are divided equally over the turns too.
    counts = [firsts[used] for used in range(1, generations.reuse + 1)]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(generations=all_generations(), limit=limits)
def test_a_sample_is_fresh_if_its_generation_differs_from_the_epoch_before(
    generations: Generations, limit: int
) -> None:
    epochs = 2 * generations.reuse + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        for index, life in enumerate(lives_of(generations, epochs)):
            changed = [True, *(now != last for last, now in pairwise(life))]
            assert [generations.is_fresh(index, epoch) for epoch in range(epochs)] == changed
        for epoch in range(epochs):
            fresh = sum(generations.is_fresh(index, epoch) for index in range(generations.n))
            assert generations.fresh(epoch) == fresh
    assert generations.fresh(0) == generations.n


@settings(deadline=None)
@given(generations=all_generations())
def test_epochs_after_the_first_prepare_equally_many_samples(generations: Generations) -> None:
    counts = [generations.fresh(epoch) for epoch in range(1, 3 * generations.reuse + 1)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts[: generations.reuse]) == generations.kept + generations.reuse * (
        generations.n - generations.kept
    )


@settings(deadline=None)
@given(generations=all_generations(), epoch=st.integers(0, 40), limit=limits)
def test_generation_and_generations_agree(generations: Generations, epoch: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", limit)
        single = [generations.generation(index, epoch) for index in range(generations.n)]
        found = generations.generations(np.arange(generations.n), epoch)
    assert found.dtype == np.int64
    assert found.tolist() == single


@settings(deadline=None)
@given(
    n=st.integers(shuffle.LISTED + 1, 1 << 50), reuse=st.integers(1, 1 << 30),
    share=st.floats(0, 1), epoch=st.integers(0, 1000), data=st.data(),
)  # fmt: skip
def test_generation_and_generations_agree_for_very_large_numbers(
    n: int, reuse: int, share: float, epoch: int, data: st.DataObject
) -> None:
    generations = Generations(n, reuse, int(n * share), seed=0)
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=10))
    single = [generations.generation(index, epoch) for index in indices]
    assert generations.generations(np.array(indices, dtype=np.int64), epoch).tolist() == single
    assert all(0 <= generation <= epoch for generation in single)


@pytest.mark.parametrize("kept", [0, 100_001, 200_000])
def test_many_samples_are_renewed_by_the_same_rules(kept: int) -> None:
    generations = Generations(200_000, 3, kept, seed=5)
    everyone = np.arange(generations.n)
    lives = np.stack([generations.generations(everyone, epoch) for epoch in range(10)])
    fresh = (np.diff(lives, axis=0) == 1).sum(axis=1).tolist()
    assert fresh == [generations.fresh(epoch) for epoch in range(1, 10)]
    assert max(fresh) - min(fresh) <= 1
    keeps = lives[-1] < 9
    assert keeps.sum() == kept
    # Nine epochs in turns of three: every kept sample was renewed three times.
    assert bool((lives[-1, keeps] == 3).all())
    some = range(0, generations.n, 1999)
    assert [generations.generation(index, 7) for index in some] == lives[7, ::1999].tolist()
    assert [generations.keeps(index) for index in some] == keeps[::1999].tolist()


@pytest.mark.parametrize("n", [50, 200_000])
def test_without_reuse_every_epoch_is_a_generation(n: int) -> None:
    generations = Generations(n, 1, n // 2, seed=0)
    for epoch in (0, 1, 7):
        assert generations.fresh(epoch) == n
        assert generations.generation(3, epoch) == epoch
        assert generations.generations(np.arange(20), epoch).tolist() == [epoch] * 20


def test_a_larger_budget_keeps_all_samples_of_a_smaller_one() -> None:
    few, more = Generations(100, 3, 20, seed=1), Generations(100, 3, 60, seed=1)
    assert all(more.keeps(index) for index in range(100) if few.keeps(index))


def test_another_seed_renews_other_samples() -> None:
    one, other = (Generations(300, 3, 300, seed).generations(np.arange(300), 1) for seed in (0, 1))
    assert one.sum() == other.sum() == 100
    assert 100 < (one != other).sum() < 170  # 133 are expected


def test_the_generations_that_checkpoints_rely_on_never_change() -> None:
    generations = Generations(1_000_003, 3, 900_000, seed=3)
    places = np.array([0, 1, 2, 500_000, 1_000_002])
    samples = [920695, 593367, 173618, 832553, 386432]
    assert generations.queued(places).tolist() == samples
    assert generations.generations(np.array(samples), 8).tolist() == [3, 3, 3, 3, 8]


def test_generations_are_the_same_after_pickling() -> None:
    generations = Generations(40, 3, 30, seed=2)
    unpickled = pickle.loads(pickle.dumps(generations))
    assert unpickled == generations
    assert repr(unpickled) == "Generations(n=40, reuse=3, kept=30, seed=2)"
    assert lives_of(unpickled, 5) == lives_of(generations, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n is -1; give a whole number, 0 or more"),
        ({"reuse": 0}, "reuse is 0; give a whole number, 1 or more"),
        ({"reuse": 2.5}, "reuse is 2.5"),
        ({"kept": -1}, "kept is -1"),
        ({"kept": 11}, "kept is 11, but the source has only 10 samples. Give 10 or less"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_invalid_arguments_are_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Generations(**{"n": 10, "reuse": 3, "kept": 10, "seed": 0, **arguments})


@given(generations=all_generations(), epoch=st.integers(0, 40))
def test_the_first_epoch_of_a_version_is_the_one_in_which_it_is_fresh(
    generations: Generations, epoch: int
) -> None:
    kept = np.array([i for i in range(generations.n) if generations.keeps(i)], np.int64)
    if generations.reuse == 1 or not len(kept):
        return
    versions = generations.generations(kept, epoch)
    first = generations.first_epochs(kept, versions)
    for index, version, began in zip(kept, versions, first, strict=True):
        assert began <= epoch
        assert generations.generation(index, began) == version
        assert generations.is_fresh(index, began)
