"""Keyed randomness: a random choice depends on its key, never on when it is made."""

from __future__ import annotations

import pickle
import random as python_random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.keyed import (
    GlobalPeek,
    Key,
    Keyed,
    Keys,
    SeededCalls,
    SpareGenerators,
    _can_exchange,
    _UnseededTorch,
    preserved_globals,
    seed_globals,
    watched_globals,
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


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Calls of functions that return states are counted."""
    with pytest.MonkeyPatch.context() as patch, preserved_globals():
        patch.setattr(python_random, "getstate", python_random.getstate)
        patch.setattr(np.random, "get_state", np.random.get_state)
        patch.setattr(torch, "get_rng_state", torch.get_rng_state)
        patch.setattr(torch.random, "get_rng_state", torch.random.get_rng_state)
        patch.setattr(_UnseededTorch, "_found", {})
        patch.setattr(GlobalPeek, "_watched", False)
        patch.setattr(GlobalPeek, "_counts_torch", None)
        GlobalPeek.watch()
        yield


@pytest.fixture
def watched() -> Iterator[None]:
    with as_in_a_worker():
        yield


def _forked_draw() -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(1))


def _undone_draw() -> float:
    generator = torch.default_generator
    state = generator.get_state()
    drawn = float(torch.rand(1))
    generator.set_state(state)
    return drawn


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: 0,
    "python": python_random.random,
    "gauss": lambda: python_random.gauss(0, 1),
    "a whole round": lambda: python_random.getrandbits(32 * 624),
    "numpy": np.random.random,
    "numpy, a whole round": lambda: np.random.bytes(4 * 624),
    "torch": lambda: float(torch.rand(1)),
    "torch, normal": lambda: float(torch.randn(())),
    "torch, a whole round": lambda: int(torch.randint(9, (624,)).sum()),
    "torch's seed": torch.initial_seed,
    "torch's seed, from the generator": lambda: torch.default_generator.initial_seed(),
    "torch's state": lambda: hash(torch.get_rng_state().numpy().tobytes()),
    "torch, own seed": lambda: (torch.manual_seed(1), float(torch.rand(1))),
    "torch, forked": _forked_draw,
    "torch, undone": _undone_draw,
    "python's state": lambda: hash(python_random.getstate()),
    "numpy's state": lambda: hash(str(np.random.get_state())),
    "own seeds": lambda: (python_random.seed(1), python_random.random()),
    "an error": lambda: 1 // python_random.choice([0, 0, 1]),
}


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([*["nothing"] * 12, *DRAWS]), min_size=1, max_size=40),
        min_size=1,
        max_size=6,
    )
)
def test_results_and_states_are_those_of_seeding_every_call(tasks: list[list[str]]) -> None:
    def run(calls: Callable[[Keys, Callable[[int], Any]], list[Any]]) -> list[Any]:
        made: list[Any] = []
        for epoch, task in enumerate(tasks):
            keys = Keys(epoch, list(range(len(task))), [epoch % 2] * len(task))
            try:
                made += calls(keys, lambda index, task=task: DRAWS[task[index]]())  # type: ignore[misc]
                made += [python_random.random(), np.random.random(), torch.initial_seed()]
                made += [float(torch.rand(1))]
            except ZeroDivisionError:
                made.append("failed")
        return made

    with as_in_a_worker():
        lazy = SeededCalls(Keyed(0, "source"))
        assert lazy._states is not None
        assert run(lazy) == run(seed_every)


def seed_every(keys: Keys, call: Callable[[int], Any]) -> list[Any]:
    results = []
    for key in keys:
        seed_globals(Keyed(0, "source").at(key))
        results.append(call(key.index))
    return results


@pytest.mark.usefixtures("watched")
def test_calls_that_draw_nothing_are_made_once_and_seeded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    seeded: list[Any] = []
    monkeypatch.setattr("penstock.keyed.seed_globals", seeded.append)
    lazy = SeededCalls(Keyed(0, "source"))
    for epoch in range(4):
        lazy(Keys(epoch, list(range(64))), made.append)
    assert made == list(range(64)) * 4
    # After 1, 1, 2, 4, 8, 16 and 32 calls of the first task, once for every task.
    assert len(seeded) == 7 + 3


@pytest.mark.usefixtures("watched")
def test_a_first_call_that_draws_is_not_made_twice() -> None:
    lazy = SeededCalls(Keyed(0, "source"))
    made: list[int] = []

    def draw(index: int) -> float:
        made.append(index)
        return np.random.random()

    lazy(Keys(0, list(range(8))), draw)
    assert made == list(range(8))


@pytest.mark.usefixtures("watched")
def test_calls_that_draw_from_torch_alone_leave_the_others_to_be_seeded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lazy = SeededCalls(Keyed(0, "source"))
    lazy(Keys(0, list(range(8))), lambda index: float(torch.rand(1)))
    seeded: list[Any] = []
    monkeypatch.setattr("penstock.keyed.seed_globals", seeded.append)
    drawn = lazy(Keys(0, list(range(8))), lambda index: float(torch.rand(1)))
    assert len(seeded) == 1
    monkeypatch.undo()
    assert drawn == seed_every(Keys(0, list(range(8))), lambda index: float(torch.rand(1)))


@pytest.mark.parametrize("replicas", [None, [0, 3, 2**20]])
def test_the_kernel_draws_the_seeds_that_numpy_draws(
    replicas: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, keys = Keyed(7, "source"), Keys(2**63 - 1, [0, 5, 2**40], replicas)
    seeds = keyed.torch_seeds(keys)
    monkeypatch.setattr("penstock.keyed.kernel", lambda: None)
    assert seeds == keyed.torch_seeds(keys)
    with preserved_globals():
        for key, seed in zip(keys, seeds, strict=True):
            seed_globals(keyed.at(key))
            assert torch.initial_seed() == seed


def test_the_seed_of_torch_is_found_in_its_memory_and_its_state_is_kept() -> None:
    with as_in_a_worker():
        torch.manual_seed(3)
        torch.randn(3)
        before = torch.default_generator.get_state()
        assert _UnseededTorch.available(torch) is not None
        assert torch.equal(torch.default_generator.get_state(), before)


def test_a_draw_of_torch_that_was_undone_is_seen() -> None:
    with as_in_a_worker():
        found = _UnseededTorch.available(torch)
        assert found is not None
        _undone_draw()  # what is in the gap now, another one would put there again
        before = found.marked()
        torch.initial_seed()
        assert found.look() == before
        _undone_draw()
        assert found.look() != before
        before = found.marked()
        state = torch.default_generator.get_state()
        torch.rand(700)
        assert found.look()[0][5:8] == before[0][5:8]
        torch.default_generator.set_state(state)


@pytest.mark.usefixtures("watched")
def test_every_call_seeds_torch_if_its_generator_has_another_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_UnseededTorch, "_SEARCHED", 8)
    assert _UnseededTorch.available(torch) is None
    lazy, keys = SeededCalls(Keyed(0, "source")), Keys(0, list(range(20)))
    assert lazy(keys, lambda index: torch.initial_seed()) == seed_every(
        keys, lambda index: torch.initial_seed()
    )


def test_every_call_is_seeded_where_states_are_not_watched() -> None:
    assert GlobalPeek.found() is not None
    assert not GlobalPeek.watches()
    keys = Keys(0, list(range(20)))
    with preserved_globals():
        lazy = SeededCalls(Keyed(0, "source"))
        assert lazy(keys, lambda _: python_random.getstate()) == seed_every(
            keys, lambda _: python_random.getstate()
        )


@pytest.mark.parametrize(
    "draw",
    [
        lambda index: index,
        lambda _: python_random.random(),
        lambda _: np.random.normal(),
        lambda _: float(torch.rand(1)),
        lambda _: torch.get_rng_state().sum().item(),
        lambda _: torch.initial_seed(),
        lambda _: _undone_draw(),
        lambda _: hash(str(np.random.get_state())),
    ],
)
def test_states_are_watched_for_a_while_in_the_users_process(draw: Callable[[int], Any]) -> None:
    functions = python_random.getstate, np.random.get_state, torch.get_rng_state
    torchs_second = torch.random.get_rng_state
    lazy, keys = SeededCalls(Keyed(0, "source")), Keys(0, list(range(20)))
    with watched_globals():
        assert GlobalPeek.watches()
        found = lazy(keys, draw)
    assert found == seed_every(keys, draw)
    assert not GlobalPeek.watches()
    assert functions == (python_random.getstate, np.random.get_state, torch.get_rng_state)
    assert torch.random.get_rng_state == torchs_second


@pytest.mark.parametrize("in_memory", [True, False])
def test_global_generators_are_kept(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr(GlobalPeek, "_known", (np.random.mtrand._rand._bit_generator, None))
    python_random.gauss(0, 1)
    np.random.standard_normal()  # each leaves a second number

    def draw() -> list[Any]:
        drawn = [python_random.gauss(0, 1), python_random.random(), float(torch.rand(1))]
        return [*drawn, np.random.standard_normal(), *np.random.random(700)]

    with preserved_globals():
        expected = draw()
    with preserved_globals():
        python_random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        draw()
    with preserved_globals():
        np.random.set_bit_generator(np.random.MT19937(9))  # type: ignore[attr-defined]
        draw()
        if not in_memory:
            return
    assert draw() == expected


def test_other_threads_draw_while_states_are_kept() -> None:
    ended, errors = threading.Event(), []

    def draw() -> None:
        try:
            while not ended.is_set():
                np.random.seed(3)
                np.random.get_state()
                np.random.normal(size=3)
        except Exception as error:
            errors.append(error)

    with preserved_globals():
        threads = [threading.Thread(target=draw) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            with watched_globals():
                np.random.random()
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert type(np.random.mtrand._rand._bit_generator).__name__ == "MT19937"


@pytest.mark.usefixtures("watched")
def test_a_call_that_fails_only_with_the_seeds_of_another_is_made_again() -> None:
    keyed = Keyed(0, "source")
    seed_globals(keyed.at(Key(20)))
    right = np.random.random()

    def call(index: int) -> int:
        if index == 20 and np.random.random() != right:
            raise ValueError("drawn with other seeds")
        return index

    assert SeededCalls(keyed)(Keys(0, list(range(32))), call) == list(range(32))
