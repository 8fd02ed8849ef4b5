"""Theorem 1: the formula against exact and simulated counts of different samples."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.diversity.theorem import share, strength, unique

counts = st.one_of(st.integers(1, 50).map(float), st.floats(1.0, 1e300))
reuses = st.integers(1, 5)
epochs_of = st.integers(1, 500)


def exact(partial: int, final: int, reuse: int, generations: int) -> Fraction:
    """Theorem 1 as printed in the paper, in fractions."""
    all_of_them = partial * final
    part = Fraction(final, all_of_them)
    never = 1 - part + part * (1 - Fraction(1, final)) ** reuse
    return all_of_them * (1 - never**generations)


def simulated(partial: int, final: int, reuse: int, epochs: int, trials: int) -> float:
    rng = np.random.default_rng(0)
    above = np.repeat(rng.integers(0, partial, (trials, epochs // reuse)), reuse, axis=1)
    below = rng.integers(0, final, (trials, epochs))
    seen = np.sort(above * final + below, axis=1)
    return float((1 + (np.diff(seen, axis=1) != 0).sum(axis=1)).mean())


@pytest.mark.parametrize(
    ("partial", "final", "reuse", "epochs"),
    [
        (1, 1, 1, 6),
        (6, 4, 1, 12),
        (6, 4, 2, 12),
        (6, 4, 3, 12),
        (50, 2, 3, 60),
        (3, 1, 4, 8),
        (1, 9, 5, 10),
        (200, 30, 5, 20),
    ],
)
def test_the_formula_agrees_with_a_simulation(
    partial: int, final: int, reuse: int, epochs: int
) -> None:
    found = simulated(partial, final, reuse, epochs, trials=40_000)
    # The mean of 40,000 counts that lie within the number of epochs: five standard errors.
    assert unique(partial, final, reuse, epochs) == pytest.approx(found, abs=epochs / 40)


@given(st.integers(1, 40), st.integers(1, 40), reuses, st.integers(1, 30))
def test_the_formula_is_exact_for_small_numbers(
    partial: int, final: int, reuse: int, generations: int
) -> None:
    found = unique(partial, final, reuse, reuse * generations)
    assert found == pytest.approx(float(exact(partial, final, reuse, generations)), rel=1e-12)


@pytest.mark.parametrize("size", [1e3, 1e9, 1e15, 1e17, 1e100, 1e300, math.inf])
@pytest.mark.parametrize("reuse", [1, 2, 5])
def test_very_many_outcomes_reach_the_limits(size: float, reuse: int) -> None:
    # Nothing random below the split: one version for every generation.
    assert unique(size, 1.0, reuse, 100) == pytest.approx(100 / reuse, rel=200 / size)
    # Very many outcomes below it: a new version every epoch, whatever is above.
    assert unique(1.0, size, reuse, 100) == pytest.approx(100, rel=200 / size)
    assert unique(size, size, reuse, 100) == pytest.approx(100, rel=200 / size)
    # Two outcomes below it, like a flip: r uses have 2 (1 - 2 ** -r) different versions.
    wanted = 2 * (1 - 0.5**reuse) * 100 / reuse
    assert unique(size, 2.0, reuse, 100) == pytest.approx(wanted, rel=200 / size)


@given(counts, counts, reuses, epochs_of)
def test_there_are_never_more_versions_than_epochs_or_outcomes(
    partial: float, final: float, reuse: int, epochs: int
) -> None:
    found = unique(partial, final, reuse, epochs)
    assert 1.0 - 1e-9 <= found <= min(epochs, partial * final) * (1 + 1e-9)


@given(counts, counts, reuses, epochs_of)
def test_more_reuse_never_leaves_more_versions(
    partial: float, final: float, reuse: int, epochs: int
) -> None:
    less, more = (share(partial, final, r, epochs) for r in (reuse, reuse + 1))
    assert 0.0 < more <= less * (1 + 1e-9) <= 1 + 1e-9
    assert share(partial, final, 1, epochs) == 1.0


@given(counts, counts, st.floats(1.0, 1e6), reuses, epochs_of)
def test_infinite_outcomes_above_the_split_leave_the_smallest_share(
    partial: float, final: float, more: float, reuse: int, epochs: int
) -> None:
    least = share(math.inf, final, reuse, epochs)
    assert least <= share(partial, final, reuse, epochs) * (1 + 1e-9)
    assert least <= share(partial, final * more, reuse, epochs) * (1 + 1e-9)


def test_a_reuse_beyond_the_epochs_counts_as_the_epochs() -> None:
    assert unique(1e9, 1e9, 5, 1) == pytest.approx(1.0)
    assert unique(1e9, 1.0, 5, 3) == pytest.approx(1.0)


def test_strength_is_the_share_of_the_logarithm_below_the_split() -> None:
    assert strength([8.0], [2.0]) == pytest.approx(0.25)
    assert strength([2.0, 2.0], [4.0, 16.0]) == pytest.approx(0.75)
    assert strength([], [5.0]) == 1.0
    assert strength([5.0], []) == 0.0
    assert strength([], []) == 1.0
    assert strength([1e300] * 4, [1e300] * 6) == pytest.approx(0.6)
