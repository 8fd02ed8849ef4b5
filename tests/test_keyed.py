"""Keyed randomness: a random choice depends on its key, never on when it is made."""

from __future__ import annotations

import pickle
import random as python_random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.keyed import (
    Key,
    Keyed,
    Keys,
    SpareGenerators,
    _can_exchange,
    preserved_globals,
    seed_globals,
)

keys = st.builds(Key, st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**20))


@given(seed=st.integers(0, 2**63), key=keys, between=keys)
def test_a_choice_does_not_depend_on_what_was_drawn_before(
    seed: int, key: Key, between: Key
) -> None:
    keyed = Keyed(seed, "stage")
    first = keyed.at(key).random(3).tolist()
    # Make the generator buffer every kind of value that it can buffer.
    other = keyed.at(between)
    other.random()
    other.integers(0, 5, dtype=np.uint32)
    other.normal()
    assert keyed.at(key).random(3).tolist() == first
    assert keyed.fresh(key).random(3).tolist() == first
    assert pickle.loads(pickle.dumps(keyed)).at(key).random(3).tolist() == first


@given(a=keys, b=keys)
def test_different_keys_stages_and_seeds_give_different_numbers(a: Key, b: Key) -> None:
    base = Keyed(0, "stage").at(a).random(4).tolist()
    if a != b:
        assert Keyed(0, "stage").at(b).random(4).tolist() != base
    assert Keyed(1, "stage").at(a).random(4).tolist() != base
    assert Keyed(0, "other").at(a).random(4).tolist() != base


def test_the_numbers_are_the_same_in_another_process() -> None:
    code = (
        "from penstock.keyed import Key, Keyed;"
        "print(Keyed(3, 'flip').at(Key(5, 2, 1)).random(3).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Keyed(3, "flip").at(Key(5, 2, 1)).random(3).tolist())


def test_the_numbers_do_not_change_between_releases() -> None:
    """A checkpoint must give the same batches with a later release."""
    drawn = Keyed(0, "map/0").at(Key(index=1, epoch=2, replica=0)).random(2)
    assert drawn.tolist() == EXPECTED


EXPECTED = [0.7415163594382758, 0.958674874117148]


def test_global_generators_are_seeded_by_key_and_restored() -> None:
    python_random.seed(5)
    np.random.seed(5)
    expected = (python_random.random(), np.random.random())
    python_random.seed(5)
    np.random.seed(5)
    seen = []
    for _ in range(2):
        with preserved_globals():
            seed_globals(Keyed(0, "x").at(Key(1)))
            seen.append((python_random.random(), np.random.random()))
    assert seen[0] == seen[1]
    assert (python_random.random(), np.random.random()) == expected


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("normals", [0, 1, 2])
def test_spare_generators_leave_every_state_as_it_was(
    exchanges: bool, normals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.keyed._can_exchange", lambda: exchanges)
    spare = SpareGenerators()

    def draw() -> list[float]:
        drawn = [python_random.random(), python_random.gauss(0, 1), np.random.random()]
        return [*drawn, np.random.standard_normal(), np.random.random(), float(torch.rand(1))]

    def run(times: int) -> list[float]:
        seed_globals(Keyed(0, "stream").at(Key(1)))
        np.random.standard_normal(normals)  # after an odd number, NumPy keeps one for the next call
        python_random.gauss(0, 1)
        for _ in range(times):
            with spare.preserved():
                seed_globals(Keyed(0, "map").at(Key(1)))
                inside.append(draw())
        return draw()

    inside: list[list[float]] = []
    expected = run(0)
    assert run(1) == run(3) == expected
    with preserved_globals():
        seed_globals(Keyed(0, "map").at(Key(1)))
        assert inside == [draw()] * 4


def test_spare_generators_restore_after_an_error() -> None:
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)

    def fail() -> None:
        with SpareGenerators().preserved():
            np.random.seed(4)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert np.random.random() == expected


def test_this_numpy_can_exchange_its_bit_generator() -> None:
    # Otherwise streams with random maps take 0.2 ms more for each sample.
    assert _can_exchange()


def test_keys_are_cut_and_picked_with_their_replicas() -> None:
    some = Keys(3, [5, 6, 7, 8], [0, 0, 1, 0])
    assert list(some.cut(1, 2)) == [Key(6, 3, 0), Key(7, 3, 1)]
    assert list(some.pick([3, 2])) == [Key(8, 3, 0), Key(7, 3, 1)]
    assert list(Keys(3, [5]).pick([0])) == [Key(5, 3, 0)]


def test_global_generators_are_seeded_as_by_their_own_functions() -> None:
    first, second = Keyed(0, "map").fresh(Key(7, 2)).bit_generator.random_raw(2).tolist()
    with preserved_globals():
        python_random.seed(first)
        np.random.seed(second & 0xFFFFFFFF)
        expected = python_random.getstate(), python_random.gauss(0, 1), np.random.random(3).tolist()
        python_random.gauss(0, 1)
        python_random.gauss(0, 1)  # one more is left over for the next call
        seed_globals(Keyed(0, "map").at(Key(7, 2)))
        drawn = python_random.getstate(), python_random.gauss(0, 1), np.random.random(3).tolist()
    assert drawn == expected
