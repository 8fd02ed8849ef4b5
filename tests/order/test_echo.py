"""Echoing: each group has the copies that its factor says, no further apart than the window."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import PipelineError
from penstock.order import EchoSequence

factors = st.one_of(
    st.integers(1, 5), st.floats(1, 5, allow_nan=False), st.sampled_from([1.0, 1.25, 2.5, 4.999])
)
windows = st.one_of(st.integers(1, 12), st.integers(1, 10**12))
sizes = st.integers(0, 60)
seeds = st.integers(0, 2**32)
epochs = st.integers(0, 3)
echoes = st.builds(EchoSequence, factor=factors, window=windows, seed=seeds)


def pairs(echo: EchoSequence, groups: int, epoch: int) -> list[tuple[int, int]]:
    numbers, copies = echo.sequence(groups, epoch)
    return list(zip(numbers.tolist(), copies.tolist(), strict=True))


@settings(deadline=None)
@given(echo=echoes, groups=sizes, epoch=epochs)
def test_every_group_has_as_many_copies_as_the_factor_says(
    echo: EchoSequence, groups: int, epoch: int
) -> None:
    factor = echo.factor_of(epoch)
    counts = echo.counts(groups, epoch).tolist()
    assert len(counts) == groups
    assert set(counts) <= {math.floor(factor), math.ceil(factor)}
    found = pairs(echo, groups, epoch)
    assert sorted(found) == [(g, c) for g in range(groups) for c in range(counts[g])]
    assert echo.most == math.ceil(factor)
    assert echo.total(groups, epoch) == len(found)
    assert EchoSequence(factor, echo.window, echo.seed).total(groups, epoch) == len(found)


@settings(deadline=None)
@given(echo=echoes, groups=sizes, epoch=epochs)
def test_shuffling_leaves_every_copy_in_its_window(
    echo: EchoSequence, groups: int, epoch: int
) -> None:
    found = pairs(echo, groups, epoch)
    unshuffled = sorted(found)
    for start in range(0, len(found), echo.window):
        window = slice(start, start + echo.window)
        assert sorted(found[window]) == unshuffled[window]
    for place, pair in enumerate(found):
        assert abs(place - unshuffled.index(pair)) < echo.window


@settings(deadline=None)
@given(factor=factors, groups=sizes, seed=seeds, epoch=epochs)
def test_with_a_window_of_1_copies_follow_each_other(
    factor: float, groups: int, seed: int, epoch: int
) -> None:
    found = pairs(EchoSequence(factor, 1, seed), groups, epoch)
    assert found == sorted(found)


@settings(deadline=None)
@given(echo=echoes, groups=st.integers(1, 60), fewer=st.integers(0, 60), epoch=epochs)
def test_a_window_does_not_depend_on_the_groups_after_it(
    echo: EchoSequence, groups: int, fewer: int, epoch: int
) -> None:
    fewer = min(fewer, groups)
    counts = echo.counts(groups, epoch)
    assert echo.counts(fewer, epoch).tolist() == counts[:fewer].tolist()
    # Windows that are full in both are the same in both.
    shared = int(counts[:fewer].sum()) // echo.window * echo.window
    assert pairs(echo, fewer, epoch)[:shared] == pairs(echo, groups, epoch)[:shared]


@pytest.mark.parametrize("factor", [1.1, 1.5, 2.25, 3.9])
def test_a_fraction_of_the_groups_has_one_more_copy(factor: float) -> None:
    groups, fraction = 100_000, factor % 1
    for epoch in range(3):
        more = groups_with_one_more(EchoSequence(factor, 1, seed=7), groups, epoch)
        # Five standard deviations of a binomial: one seed in two million falls outside.
        assert abs(more - fraction * groups) < 5 * math.sqrt(groups * fraction * (1 - fraction))


def groups_with_one_more(echo: EchoSequence, groups: int, epoch: int) -> int:
    """The number of groups that have one copy more than the others."""
    counts = Counter(echo.counts(groups, epoch).tolist())
    return counts[math.ceil(echo.factor_of(epoch))]


def test_windows_are_shuffled_evenly() -> None:
    numbers, _ = EchoSequence(1, window=3, seed=3).sequence(60_000, epoch=0)
    found = Counter(map(tuple, (numbers.reshape(-1, 3) % 3).tolist()))
    assert len(found) == 6
    # 20,000 windows and 6 possible orders: five standard deviations are 264.
    assert all(abs(count - 20_000 / 6) < 264 for count in found.values())


def test_an_incomplete_last_window_is_shuffled_too() -> None:
    numbers = EchoSequence(1, window=100, seed=0).sequence(150, epoch=0)[0].tolist()
    assert sorted(numbers[100:]) == list(range(100, 150)) != numbers[100:]


def test_epochs_seeds_and_stages_make_different_choices() -> None:
    def chosen(echo: EchoSequence, epoch: int) -> tuple[Any, ...]:
        return tuple(pairs(echo, 50, epoch))

    sequences = {
        chosen(EchoSequence(1.5, 8, 0), 0),
        chosen(EchoSequence(1.5, 8, 0), 1),
        chosen(EchoSequence(1.5, 8, 1), 0),
        chosen(EchoSequence(1.5, 8, 0, stage="order/echo/2"), 0),
    }
    assert len(sequences) == 4


def test_a_chosen_factor_may_differ_by_epoch_and_never_exceeds_the_limit() -> None:
    chosen = {0: 1.0, 1: 3, 2: 2.5, 3: 99.0}
    echo = EchoSequence(chosen.__getitem__, window=4, seed=0, limit=5)
    assert (echo.fixed, echo.most) == (False, 5)
    assert [echo.factor_of(epoch) for epoch in range(4)] == [1.0, 3.0, 2.5, 5.0]
    assert [echo.total(10, epoch) for epoch in (0, 1, 3)] == [10, 30, 50]
    assert set(echo.counts(100, 2).tolist()) == {2, 3}
    assert EchoSequence(2, 4, 0).fixed
    assert EchoSequence(chosen.__getitem__, 4, 0).most == 8


def test_a_new_factor_does_not_reuse_the_sequence_of_the_old_one() -> None:
    chosen = [2.0]
    echo = EchoSequence(lambda epoch: chosen[0], window=1, seed=0)
    assert len(echo.sequence(10, 0)[0]) == 20
    chosen[0] = 3.0
    assert (len(echo.sequence(10, 0)[0]), echo.total(10, 0)) == (30, 30)


def test_the_sequences_of_at_most_two_epochs_are_kept() -> None:
    echo = EchoSequence(1.5, window=4, seed=0)
    first = [echo.sequence(100, epoch)[0] for epoch in range(4)]
    assert sorted(epoch for _, epoch, _ in echo._sequences) == [2, 3]
    assert echo.sequence(100, 3)[0] is first[3]
    assert echo.sequence(100, 0)[0] is not first[0]
    assert echo.sequence(100, 0)[0].tolist() == first[0].tolist()


def test_kept_sequences_are_read_only() -> None:
    for found in EchoSequence(2, 4, 0).sequence(10, 0):
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1


def test_integer_types_are_wide_enough_for_their_numbers() -> None:
    numbers, copies = EchoSequence(300, 1, 0).sequence(2, 0)
    assert copies.tolist() == [*range(300), *range(300)]
    assert numbers.tolist() == [0] * 300 + [1] * 300
    for groups in (255, 256, 257, 300):
        assert EchoSequence(1, 1, 0).sequence(groups, 0)[0].tolist() == list(range(groups))
    for most in (255, 256, 257):
        assert EchoSequence(most, 1, 0).sequence(1, 0)[1].tolist() == list(range(most))


def test_pickling_leaves_out_the_kept_sequences() -> None:
    echo = EchoSequence(1.5, window=4, seed=0)
    before = pairs(echo, 20, 0)
    unpickled = pickle.loads(pickle.dumps(echo))
    assert unpickled == echo
    assert unpickled._sequences == {}
    assert pairs(unpickled, 20, 0) == before


FINGERPRINT = """
import hashlib
from penstock.order import EchoSequence
digest = hashlib.sha256()
for factor in (1, 1.5, 3):
    for window in (1, 7, 1000):
        for part in EchoSequence(factor, window, 17).sequence(103, 5):
            digest.update(repr(part.tolist()).encode())
result = digest.hexdigest()
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_echoes_the_same(hash_seed: str) -> None:
    namespace: dict[str, Any] = {}
    exec(FINGERPRINT, namespace)
    root = str(Path(penstock.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", FINGERPRINT + "\nimport sys; sys.stdout.write(result)"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == namespace["result"]


@pytest.mark.parametrize("factor", [0.99, 0, -2, math.inf, -math.inf, math.nan, True, "2", None])
def test_an_invalid_factor_is_an_error(factor: Any) -> None:
    with pytest.raises(
        PipelineError, match=r"The factor of echo\(\) is .*a number of 1 or more, such as 2"
    ):
        EchoSequence(factor, 1, 0)
    echo = EchoSequence(lambda epoch: factor, 1, 0)
    with pytest.raises(PipelineError, match=r"The factor of echo\(\) for epoch 3 is "):
        echo.sequence(4, 3)


def test_numpy_numbers_are_valid_factors() -> None:
    for factor in (np.float32(2), np.int64(2), np.float64(2.0)):
        assert EchoSequence(factor, 1, 0) == EchoSequence(2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window is 0; give a whole number, 1 or more"),
        ({"window": 2.0}, "window is 2.0"),
        ({"seed": "lucky"}, "seed is 'lucky'; give a whole number"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_invalid_arguments_are_an_error_when_the_echo_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        EchoSequence(**{"factor": 2, "window": 4, "seed": 0, **arguments})
