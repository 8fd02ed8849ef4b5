"""Orders: pure functions with the right distribution; those of users are checked."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import PipelineError
from penstock.order import Order, Sequential, Shuffled, Weighted, check

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
weight_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(0.0, 1e300, allow_subnormal=True)), min_size=1, max_size=40
).filter(any)


def test_all_orders_implement_the_protocol() -> None:
    for order in (Sequential(), Shuffled(), Weighted([1.0])):
        assert isinstance(order, Order)
    assert not isinstance([1, 2, 3], Order)


@settings(deadline=None)
@given(n=st.integers(0, 300), seed=seeds, epoch=epochs)
def test_sequential_and_shuffled_have_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert Sequential().indices(n, seed, epoch).tolist() == list(range(n))
    shuffled = Shuffled().indices(n, seed, epoch)
    assert shuffled.dtype == np.int64
    assert sorted(shuffled.tolist()) == list(range(n))
    assert Sequential().length(n) == Shuffled().length(n) == n


@settings(deadline=None)
@given(seed=seeds, epoch=epochs)
def test_a_shuffle_depends_on_its_arguments_only(seed: int, epoch: int) -> None:
    first = Shuffled().indices(64, seed, epoch).tolist()
    np.random.seed(1)
    assert Shuffled().indices(64, seed, epoch).tolist() == first
    # There are 64! sequences: two equal ones would be one random stream used twice.
    assert Shuffled().indices(64, seed, epoch + 1).tolist() != first
    assert Shuffled().indices(64, seed + 1, epoch).tolist() != first


@pytest.mark.parametrize("place", range(4))
def test_a_shuffle_puts_every_sample_at_every_place_equally_often(place: int) -> None:
    runs = 4000
    found = [Shuffled().indices(4, 0, epoch)[place] for epoch in range(runs)]
    counts = np.bincount(found, minlength=4)
    # Five standard deviations of a binomial; the seed is fixed, so the result never varies.
    assert np.abs(counts - runs / 4).max() < 5 * np.sqrt(runs * 3 / 16)


@settings(deadline=None)
@given(weights=weight_lists, seed=seeds, epoch=epochs, data=st.data())
def test_a_weighted_order_never_draws_a_weight_of_zero(
    weights: list[float], seed: int, epoch: int, data: st.DataObject
) -> None:
    positive = [place for place, weight in enumerate(weights) if weight > 0]
    n = len(weights)

    drawn = Weighted(weights, samples=data.draw(st.integers(1, 60))).indices(n, seed, epoch)
    assert drawn.dtype == np.int64
    assert set(drawn.tolist()) <= set(positive)

    samples = data.draw(st.integers(1, len(positive)))
    order = Weighted(weights, samples, replacement=False)
    alone = order.indices(n, seed, epoch).tolist()
    assert len(alone) == len(set(alone)) == samples == order.length(n)
    assert set(alone) <= set(positive)
    assert order.indices(n, seed, epoch).tolist() == alone


def test_the_default_length_of_a_weighted_epoch() -> None:
    weights = [0.0, 2.0, 1.0, 0.0]
    assert Weighted(weights).length(4) == len(Weighted(weights).indices(4, 0, 0)) == 4
    alone = Weighted(weights, replacement=False)
    assert alone.length(4) == 2
    assert sorted(alone.indices(4, 0, 0).tolist()) == [1, 2]


def test_weighted_frequencies_are_those_of_the_weights() -> None:
    weights = np.array([1.0, 0.0, 2.0, 3.0, 10.0])
    samples = 200_000
    drawn = Weighted(weights, samples).indices(5, seed=3, epoch=1)
    share = weights / weights.sum()
    deviation = np.sqrt(samples * share * (1 - share))
    assert (np.abs(np.bincount(drawn, minlength=5) - samples * share) <= 5 * deviation).all()


def test_draws_without_replacement_are_successive_weighted_draws() -> None:
    weights = [1.0, 2.0, 5.0]
    runs = 20_000
    pairs = [
        tuple(Weighted(weights, 2, replacement=False).indices(3, 9, epoch).tolist())
        for epoch in range(runs)
    ]
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            chance = weights[first] / 8 * weights[second] / (8 - weights[first])
            deviation = np.sqrt(runs * chance * (1 - chance))
            assert abs(pairs.count((first, second)) - runs * chance) < 5 * deviation


def test_weights_are_a_read_only_copy() -> None:
    given_weights = np.array([1.0, 0.0])
    order = Weighted(given_weights, samples=5)
    given_weights[:] = [0.0, 1.0]
    assert order.indices(2, 0, 0).tolist() == [0] * 5
    with pytest.raises(ValueError, match="read-only"):
        order.weights[0] = 3.0  # type: ignore[index]


def test_a_weighted_order_can_be_pickled_and_has_a_short_repr() -> None:
    order = Weighted(np.linspace(0, 1, 1000), samples=10)
    assert repr(order) == "Weighted(1000 weights, samples=10, replacement=True)"
    unpickled = pickle.loads(pickle.dumps(order))
    assert unpickled.indices(1000, 4, 2).tolist() == order.indices(1000, 4, 2).tolist()
    assert (repr(Sequential()), repr(Shuffled())) == ("Sequential()", "Shuffled()")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, float("nan")],), "Weight 1 of Weighted is nan"),
        (([float("inf")],), "Weight 0 of Weighted is inf"),
        (([1.0, 2.0, -0.5],), "Weight 2 of Weighted is -0.5"),
        (([0.0, 0.0],), "All 2 weights of Weighted are zero"),
        (([],), "All 0 weights"),
        (([[1.0]],), r"shape \(1, 1\)"),
        ((["heavy"],), "not numbers"),
        (([1.0], 0), "samples is 0; give a whole number, 1 or more"),
        (([1.0], 1.5), "samples is 1.5"),
        (([1.0, 0.0, 1.0], 3, False), "only 2 of its 3 weights"),
    ],
)
def test_invalid_weights_are_an_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Weighted(*arguments)


def test_weights_for_another_number_of_samples_are_an_error() -> None:
    with pytest.raises(PipelineError, match="has 2 weights, but the source has 3 samples"):
        Weighted([1.0, 2.0]).indices(3, 0, 0)


class UserOrder:
    """Stands for a user's order."""


@settings(deadline=None)
@given(
    indices=hnp.arrays(
        dtype=st.sampled_from([np.int8, np.uint8, np.int32, np.int64, np.uint64]),
        shape=st.integers(0, 20),
        elements=st.integers(0, 99),
    )
)
def test_indices_of_any_integer_type_are_accepted_and_copied(indices: Any) -> None:
    checked = check(indices, 100, UserOrder())
    assert checked.dtype == np.int64
    assert checked.tolist() == indices.tolist()
    assert not np.shares_memory(checked, indices)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1, 5, -1], r"UserOrder\.indices returned 5 at place 2, but the source has 5 samples"),
        ([0, -1], "returned -1 at place 1"),
        (np.array([2**63 + 1], dtype=np.uint64), "returned 9223372036854775809 at place 0"),
        ([0.0, 1.0], "returned float64 values"),
        ([True, False], "np.flatnonzero turns a mask into indices"),
        ([[0, 1]], r"shape \(1, 2\)"),
        (3, r"shape \(\)"),
        (None, r"shape \(\)"),
        ([[0], [1, 2]], "NumPy cannot make an array"),
        (["a"], "Return whole numbers"),
    ],
)
def test_invalid_indices_of_an_order_are_an_error_that_names_them(
    indices: Any, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        check(indices, 5, UserOrder())
