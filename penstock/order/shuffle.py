"""Shuffling without a list: computes the sample at any place of a random sequence.

Listing a permutation of a million samples takes 40 ms and 8 MB before the first batch can start.
Above ``LISTED`` samples the sequence is therefore a bijection that is evaluated only for the places
needed: a Feistel network, applied again while its result is not below n (cycle walking).

There are two networks. The one of ``shuffled`` covers the next power of two, so up to every second
result is not below n; checkpoints rely on its sequences, so it must not change. The one of
``Permutation`` covers a near-square of hardly more than n cells, so almost every result is below n,
and it can be inverted.
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
"""Up to this size a listed permutation costs less than 1 ms; it is uniform over all of them."""

_ROUNDS = 6
"""Four rounds make a Feistel network a good random permutation (Luby and Rackoff); two to spare.

The number is even, so that the halves end on the side where they began."""

_LISTS_KEPT = 8
"""Lists that are cached, of 0.5 MB at most: with refurbish a run needs one, and two per epoch."""

_STAGE = "order/shuffle"

_Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]
_Network = Callable[[_Words, int, int, tuple[_Words, ...]], _Words]


def _word(value: int) -> _Words:
    # A zero-dimensional array: on a few hundred numbers, operations with the scalar
    # np.uint64(value) take twice as long.
    return np.array(value, dtype=np.uint64)


_WORD = (1 << 64) - 1
_MIX, _MIX_AGAIN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX_WORD, _MIX_AGAIN_WORD = _word(_MIX), _word(_MIX_AGAIN)
_1, _27, _30, _31 = _word(1), _word(27), _word(30), _word(31)


def shuffled(n: int, seed: int, epoch: int, places: _Indices) -> _Indices:
    """The samples at these places of an epoch's sequence.

    >>> places = np.arange(100_000)
    >>> samples = shuffled(100_000, seed=0, epoch=0, places=places)
    >>> bool((np.sort(samples) == places).all()), bool((samples == places).all())
    (True, False)
    """
    if n <= LISTED:
        return _listed(n, seed, _STAGE, epoch)[places]
    keys = _round_keys(seed, _STAGE, epoch)
    bits = (n - 1).bit_length()
    out = _feistel(places.astype(np.uint64), bits, keys)
    # More than half of the results are below n, so the loop ends after a few rounds.
    while len(past := np.flatnonzero(out >= n)):
        out[past] = _feistel(out[past], bits, keys)
    return out.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A random sequence of ``n`` samples: from place to sample and from sample to place.

    The sequences of different stages are independent, and so are those of different epochs.

    >>> permutation = Permutation(100_000, seed=0, stage="example")
    >>> samples = permutation.samples(np.array([7, 99_999]))
    >>> permutation.places(samples).tolist(), permutation.place(int(samples[0]))
    ([7, 99999], 7)
    """

    n: int
    seed: int
    stage: str
    epoch: int = 0

    def samples(self, places: _Indices) -> _Indices:
        """The samples at these places."""
        n = self.n
        if n <= LISTED:
            return _listed(n, self.seed, self.stage, self.epoch)[places]
        return _within(n, _crossed, places, _round_keys(self.seed, self.stage, self.epoch))

    def places(self, samples: _Indices) -> _Indices:
        """The places of these samples."""
        n = self.n
        if n <= LISTED:
            return _inverse(n, self.seed, self.stage, self.epoch)[samples]
        return _within(n, _uncrossed, samples, _round_keys(self.seed, self.stage, self.epoch))

    def place(self, sample: int) -> int:
        """The place of one sample, in 4 us; ``places`` takes 60 us for a single one."""
        n = self.n
        if n <= LISTED:
            place: int = _inverse(n, self.seed, self.stage, self.epoch).item(sample)
            return place
        rows, columns, keys = _inverse_network(n, self.seed, self.stage, self.epoch)
        while True:
            sample = _uncrossed_one(sample, rows, columns, keys)
            if sample < n:
                return sample


@lru_cache(maxsize=_LISTS_KEPT)
def _listed(n: int, seed: int, stage: str, epoch: int) -> _Indices:
    generator = Keyed(seed, stage).fresh(Key(index=0, epoch=epoch))
    samples = generator.permutation(n).astype(np.int64, copy=False)
    samples.flags.writeable = False
    return samples


@lru_cache(maxsize=_LISTS_KEPT)
def _inverse(n: int, seed: int, stage: str, epoch: int) -> _Indices:
    places = np.empty(n, dtype=np.int64)
    places[_listed(n, seed, stage, epoch)] = np.arange(n, dtype=np.int64)
    places.flags.writeable = False
    return places


@lru_cache(maxsize=64)
def _round_keys(seed: int, stage: str, epoch: int) -> tuple[_Words, ...]:
    generator = Keyed(seed, stage).fresh(Key(index=0, epoch=epoch))
    return tuple(map(_word, generator.integers(0, 2**64, size=_ROUNDS, dtype=np.uint64).tolist()))


@lru_cache(maxsize=64)
def _inverse_network(n: int, seed: int, stage: str, epoch: int) -> tuple[int, int, tuple[int, ...]]:
    """Rows, columns and keys from last to first for ``_uncrossed_one``, as Python ints."""
    keys = _round_keys(seed, stage, epoch)
    return *_sides(n), tuple(int(key) for key in reversed(keys))


def _feistel(values: _Words, bits: int, keys: tuple[_Words, ...]) -> _Words:
    """A bijection of the numbers of ``bits`` bits; the halves change places in every round."""
    high, low = bits // 2, bits - bits // 2
    left = values >> _word(low)
    right = values & _word((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) >> _word(64 - high))
        high, low = low, high
    joined: _Words = (left << _word(low)) | right
    return joined


def _within(n: int, network: _Network, values: _Indices, keys: tuple[_Words, ...]) -> _Indices:
    """Apply a network over the near-square to numbers below ``n`` until all results are below."""
    sides = _sides(n)
    out = network(values.astype(np.uint64), *sides, keys)
    while len(past := np.flatnonzero(out >= n)):
        out[past] = network(out[past], *sides, keys)
    return out.astype(np.int64)


def _sides(n: int) -> tuple[int, int]:
    """Rows and columns of the near-square, which exceeds ``n`` cells by less than one row."""
    columns = isqrt(max(0, n - 1)) + 1
    return -(-n // columns), columns


def _crossed(values: _Words, rows: int, columns: int, keys: tuple[_Words, ...]) -> _Words:
    """A bijection of the cells of a rectangle (Black and Rogaway): remainders in place of bits."""
    height, width = _word(rows), _word(columns)
    left, right = values // width, values % width
    for key in keys:
        # Halved, so that the sum does not overflow.
        left += _mixed(right ^ key) >> _1
        left %= height
        left, right = right, left
        height, width = width, height
    joined: _Words = left * width + right
    return joined


def _uncrossed(values: _Words, rows: int, columns: int, keys: tuple[_Words, ...]) -> _Words:
    """The inverse of ``_crossed``: its rounds undone from last to first."""
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
    """``_uncrossed`` for one Python int, with the keys from last to first."""
    left, right = divmod(value, width)
    for key in keys:
        word = left ^ key
        word = (word ^ word >> 30) * _MIX & _WORD
        word = (word ^ word >> 27) * _MIX_AGAIN & _WORD
        left, right = (right - ((word ^ word >> 31) >> 1)) % width, left
        height, width = width, height
    return left * width + right


def _mixed(words: _Words) -> _Words:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the word.

    Computed in place: for few numbers, allocating new arrays takes half of the time.
    """
    words ^= words >> _30
    words *= _MIX_WORD
    words ^= words >> _27
    words *= _MIX_AGAIN_WORD
    words ^= words >> _31
    return words
