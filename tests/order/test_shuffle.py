"""Shuffling place by place: a bijection for any size, different in every epoch, and uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order import Cursor, Deal, Shuffled, shuffle
from penstock.order.shuffle import LISTED, Permutation, shuffled


@settings(max_examples=15, deadline=None)
@given(n=st.integers(LISTED - 3, LISTED * 3), seed=st.integers(0, 2**32), epoch=st.integers(0, 99))
def test_every_sample_has_one_place(n: int, seed: int, epoch: int) -> None:
    found = shuffled(n, seed, epoch, np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


@pytest.mark.parametrize("n", [LISTED + 1, 1 << 17, (1 << 17) + 1, 1_000_003])
def test_single_places_agree_with_the_whole_sequence(n: int) -> None:
    whole = Shuffled().indices(n, 3, 1)
    places = np.array([0, 5, n - 1, n // 2, 5])
    assert np.array_equal(Shuffled().at(n, 3, 1, places), whole[places])
    assert np.array_equal(np.sort(whole), np.arange(n))


def test_epochs_and_seeds_are_uncorrelated() -> None:
    n = 200_000
    base = shuffled(n, 0, 0, np.arange(n))
    for seed, epoch in ((0, 1), (1, 0), (2**40, 7)):
        other = shuffled(n, seed, epoch, np.arange(n))
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.02
        assert (base == other).sum() < 15  # one is expected by chance


def test_samples_are_spread_evenly_over_the_places() -> None:
    n = 131_072 + 777
    counts = np.zeros((16, 16))
    for epoch in range(4):
        found = shuffled(n, 9, epoch, np.arange(n))
        np.add.at(counts, (np.arange(n) * 16 // n, found * 16 // n), 1)
    expected = 4 * n / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 225 degrees of freedom: 4.5 standard deviations to either side.
    assert 225 - 4.5 * 21.2 < chi_square < 225 + 4.5 * 21.2
    steps = np.diff(shuffled(n, 9, 0, np.arange(n)))
    assert abs(np.abs(steps).mean() / (n / 3) - 1) < 0.01


@pytest.mark.parametrize("world", [1, 3])
def test_batches_of_many_samples_are_the_sequence_in_order(world: int) -> None:
    n = LISTED + 50
    sequence = Shuffled().indices(n, 4, 2)
    seen = np.zeros(n, dtype=int)
    for rank in range(world):
        deal = Deal(Shuffled(), n, 4, 1000, rank=rank, world=world)
        batches = list(deal.batches(Cursor(epoch=2)))
        mine = np.concatenate([batch.indices for batch in batches])
        padded = np.concatenate((sequence, sequence[:world]))[rank::world][: len(mine)]
        assert np.array_equal(mine, padded)
        assert [batch.number for batch in batches] == list(range(deal.length(Cursor(epoch=2))))
        np.add.at(seen, mine, 1)
    assert seen.min() == 1
    assert seen.sum() == -(-n // world) * world


def test_the_sequence_that_checkpoints_rely_on_never_changes() -> None:
    places = np.array([0, 1, 2, 500_000, 1_000_002])
    found = shuffled(1_000_003, 3, 1, places)
    assert found.tolist() == [692908, 454444, 767478, 431330, 18355]


@settings(deadline=None)
@given(
    n=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 99),
    listed=st.booleans(), data=st.data(),
)  # fmt: skip
def test_places_and_samples_of_a_permutation_are_inverse(
    n: int, seed: int, epoch: int, listed: bool, data: st.DataObject
) -> None:
    permutation = Permutation(n, seed, "test", epoch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "LISTED", LISTED if listed else 0)
        found = permutation.samples(np.arange(n))
        assert np.array_equal(np.sort(found), np.arange(n))
        assert np.array_equal(permutation.places(found), np.arange(n))
        place = data.draw(st.integers(0, n - 1))
        assert permutation.place(int(found[place])) == place
        assert permutation.samples(np.array([place, place])).tolist() == [found[place]] * 2


@settings(deadline=None)
@given(n=st.integers(LISTED + 1, 1 << 50), seed=st.integers(0, 2**32), data=st.data())
def test_places_and_samples_are_inverse_for_very_many_samples(
    n: int, seed: int, data: st.DataObject
) -> None:
    permutation = Permutation(n, seed, "test")
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    found = permutation.samples(places)
    assert np.array_equal(permutation.places(found), places)
    assert [permutation.place(sample) for sample in found.tolist()] == places.tolist()
    assert bool(((found >= 0) & (found < n)).all())


@pytest.mark.parametrize("n", [50_000, 200_000])
def test_stages_epochs_and_seeds_of_permutations_are_uncorrelated(n: int) -> None:
    everywhere = np.arange(n)
    base = Permutation(n, 0, "one").samples(everywhere)
    others = (
        Permutation(n, 0, "other"),
        Permutation(n, 0, "one", 1),
        Permutation(n, 1, "one"),
    )
    for other in others:
        found = other.samples(everywhere)
        assert abs(np.corrcoef(base, found)[0, 1]) < 0.025
        assert (base == found).sum() < 15  # one is expected by chance


@pytest.mark.parametrize("n", [131_072 + 777, 1 << 18, 360 * 360 + 1])
def test_permutations_spread_samples_evenly_over_the_places(n: int) -> None:
    counts = np.zeros((16, 16))
    last_digits = np.zeros((8, 8))
    for epoch in range(4):
        found = Permutation(n, 9, "test", epoch).samples(np.arange(n))
        np.add.at(counts, (np.arange(n) * 16 // n, found * 16 // n), 1)
        np.add.at(last_digits, (np.arange(n) % 8, found % 8), 1)
    # 225 and 49 degrees of freedom: 4.5 standard deviations to either side.
    for table, freedom in ((counts, 225), (last_digits, 49)):
        expected = 4 * n / table.size
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert abs(chi_square - freedom) < 4.5 * np.sqrt(2 * freedom)
    steps = np.diff(Permutation(n, 9, "test").samples(np.arange(n)))
    assert abs(np.abs(steps).mean() / (n / 3) - 1) < 0.01
