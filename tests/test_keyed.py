"""Keyed randomness: a random choice depends on its key, never on when it is made."""

from __future__ import annotations

import pickle
import random as python_random
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.keyed import Key, Keyed, Keys, preserved_globals, seed_globals

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


def test_keys_are_cut_and_picked_with_their_replicas() -> None:
    some = Keys(3, [5, 6, 7, 8], [0, 0, 1, 0])
    assert list(some.cut(1, 2)) == [Key(6, 3, 0), Key(7, 3, 1)]
    assert list(some.pick([3, 2])) == [Key(8, 3, 0), Key(7, 3, 1)]
    assert list(Keys(3, [5]).pick([0])) == [Key(5, 3, 0)]
