"""Shuffling without a list: the sample at any place of a random sequence, worked out by itself.

A permutation of a million takes 40 ms and 8 MB before the first batch can start. Above ``LISTED``
samples the sequence is instead a bijection that is evaluated where it is needed: a Feistel network,
stepped on while it points past the end.

There are two networks. That of ``shuffled`` covers the next power of two, so up to every second
step points past the end; it stays as it is, because checkpoints rely on its sequences. That of
``Permutation`` covers a near-square of hardly more than n, so almost no step does, and it can be
undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from penstock.keyed import Key, Keyed

LISTED = 1 << 16
"""Up to here a true permutation costs less than a millisecond and is uniform over all of them."""

_ROUNDS = 6
"""Four make a Feistel network a good random permutation (Luby and Rackoff); two to spare.

An even number, so that the halves end on the side where they began."""

_KEPT = 8
"""Lists that are remembered, of 0.5 MB at most: a run with refurbish needs one and two an epoch."""

_STAGE = "order/shuffle"

_Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]
_Network = Callable[[_Words, int, int, tuple[_Words, ...]], _Words]


def _word(value: int) -> _Words:
    # An array of no dimensions: for a few hundred numbers, np.uint64(...) doubles every step.
    return np.array(value, dtype=np.uint64)


_WORD = (1 << 64) - 1
_MIX, _MIX_AGAIN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_WORD, _MIX_AGAIN_WORD = _word(_MIX), _word(_MIX_AGAIN)
_1, _27, _30, _31 = _word(1), _word(27), _word(30), _word(31)


def shuffled(n: int, seed: int, epoch: int, places: _Indices) -> _Indices:
    """The samples at these places of an epoch's sequence.

    >>> everywhere = np.arange(100_000)
    >>> found = shuffled(100_000, seed=0, epoch=0, places=everywhere)
    >>> bool((np.sort(found) == everywhere).all()), bool((found == everywhere).all())
    (True, False)
    """
    if n <= LISTED:
        return _listed(n, seed, _STAGE, epoch)[places]
    keys = _round_keys(seed, _STAGE, epoch)
    bits = (n - 1).bit_length()
    out = _feistel(places.astype(np.uint64), bits, keys)
    # Each step lands within n more often than not, so this ends after a few.
    while len(past := np.flatnonzero(out >= n)):
        out[past] = _feistel(out[past], bits, keys)
    return out.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A random sequence of ``n`` samples that can be read either way.

    Stages are independent of one another, and so are the epochs of a stage.

    >>> row = Permutation(100_000, seed=0, stage="example")
    >>> found = row.samples(np.array([7, 99_999]))
    >>> row.places(found).tolist(), row.place(int(found[0]))
    ([7, 99999], 7)
    """

    n: int
    seed: int
    stage: str
    epoch: int = 0

    def samples(self, places: _Indices) -> _Indices:
        """Which samples stand at these places."""
        n = self.n
        if n <= LISTED:
            return _listed(n, self.seed, self.stage, self.epoch)[places]
        return _within(n, _crossed, places, _round_keys(self.seed, self.stage, self.epoch))

    def places(self, samples: _Indices) -> _Indices:
        """At which places these samples stand."""
        n = self.n
        if n <= LISTED:
            return _inverse(n, self.seed, self.stage, self.epoch)[samples]
        return _within(n, _uncrossed, samples, _round_keys(self.seed, self.stage, self.epoch))

    def place(self, sample: int) -> int:
        """At which place one sample stands: 4 us, where ``places`` takes 60 for a single one."""
        n = self.n
        if n <= LISTED:
            found: int = _inverse(n, self.seed, self.stage, self.epoch).item(sample)
            return found
        rows, columns, keys = _backwards(n, self.seed, self.stage, self.epoch)
        while True:
            sample = _uncrossed_one(sample, rows, columns, keys)
            if sample < n:
                return sample


@lru_cache(maxsize=_KEPT)
def _listed(n: int, seed: int, stage: str, epoch: int) -> _Indices:
    generator = Keyed(seed, stage).fresh(Key(index=0, epoch=epoch))
    found = generator.permutation(n).astype(np.int64, copy=False)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=_KEPT)
def _inverse(n: int, seed: int, stage: str, epoch: int) -> _Indices:
    found = np.empty(n, dtype=np.int64)
    found[_listed(n, seed, stage, epoch)] = np.arange(n, dtype=np.int64)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=64)
def _round_keys(seed: int, stage: str, epoch: int) -> tuple[_Words, ...]:
    generator = Keyed(seed, stage).fresh(Key(index=0, epoch=epoch))
    return tuple(map(_word, generator.integers(0, 2**64, size=_ROUNDS, dtype=np.uint64).tolist()))


@lru_cache(maxsize=64)
def _backwards(n: int, seed: int, stage: str, epoch: int) -> tuple[int, int, tuple[int, ...]]:
    """What undoing the network needs, in Python's own numbers."""
    keys = _round_keys(seed, stage, epoch)
    return *_sides(n), tuple(int(key) for key in reversed(keys))


def _feistel(values: _Words, bits: int, keys: tuple[_Words, ...]) -> _Words:
    """A bijection of numbers of so many bits; the halves change places in every round."""
    high, low = bits // 2, bits - bits // 2
    left = values >> _word(low)
    right = values & _word((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) >> _word(64 - high))
        high, low = low, high
    joined: _Words = (left << _word(low)) | right
    return joined


def _within(n: int, network: _Network, values: _Indices, keys: tuple[_Words, ...]) -> _Indices:
    """What a network over the near-square makes of numbers below ``n``, itself below ``n``."""
    sides = _sides(n)
    out = network(values.astype(np.uint64), *sides, keys)
    while len(past := np.flatnonzero(out >= n)):
        out[past] = network(out[past], *sides, keys)
    return out.astype(np.int64)


def _sides(n: int) -> tuple[int, int]:
    """Rows and columns of the near-square: it has less than a row more than ``n`` cells."""
    columns = isqrt(max(0, n - 1)) + 1
    return -(-n // columns), columns


def _crossed(values: _Words, rows: int, columns: int, keys: tuple[_Words, ...]) -> _Words:
    """A bijection of the cells of a rectangle (Black and Rogaway): remainders in place of bits."""
    height, width = _word(rows), _word(columns)
    left, right = values // width, values % width
    for key in keys:
        # Half of a word, so that no sum overflows.
        left += _mixed(right ^ key) >> _1
        left %= height
        left, right = right, left
        height, width = width, height
    joined: _Words = left * width + right
    return joined


def _uncrossed(values: _Words, rows: int, columns: int, keys: tuple[_Words, ...]) -> _Words:
    """``_crossed`` undone: the rounds from last to first."""
    height, width = _word(rows), _word(columns)
    left, right = values // width, values % width
    for key in reversed(keys):
        right += width - (_mixed(left ^ key) >> _1) % width
        right %= width
        left, right = right, left
        height, width = width, height
    joined: _Words = left * width + right
    return joined


def _uncrossed_one(value: int, height: int, width: int, keys: tuple[int, ...]) -> int:
    """``_uncrossed`` of one number, with its keys from last to first."""
    left, right = divmod(value, width)
    for key in keys:
        word = left ^ key
        word = (word ^ word >> 30) * _MIX & _WORD
        word = (word ^ word >> 27) * _MIX_AGAIN & _WORD
        left, right = (right - ((word ^ word >> 31) >> 1)) % width, left
        height, width = width, height
    return left * width + right


def _mixed(words: _Words) -> _Words:
    """Every bit of the result depends on every bit of a word (the finalizer of SplitMix64).

    It is worked out in ``words`` itself: of few numbers, making new arrays is half the time.
    """
    words ^= words >> _30
    words *= _MIX_WORD
    words ^= words >> _27
    words *= _MIX_AGAIN_WORD
    words ^= words >> _31
    return words
