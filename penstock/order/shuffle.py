"""Shuffling without a list: the sample at any place of a random sequence, worked out by itself.

A permutation of a million takes 40 ms and 8 MB before the first batch can start. Above ``LISTED``
samples the sequence is instead a bijection that is evaluated where it is needed: a Feistel network
over the next power of two, stepped on while it points past the end.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.random import Key, Keyed

LISTED = 1 << 16
"""Up to here a true permutation costs less than a millisecond and is uniform over all of them."""

_ROUNDS = 6
"""Four make a Feistel network a good random permutation (Luby and Rackoff); two to spare."""

_Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]


def shuffled(n: int, seed: int, epoch: int, places: _Indices) -> _Indices:
    """The samples at these places of an epoch's sequence.

    >>> everywhere = np.arange(100_000)
    >>> found = shuffled(100_000, seed=0, epoch=0, places=everywhere)
    >>> bool((np.sort(found) == everywhere).all()), bool((found == everywhere).all())
    (True, False)
    """
    if n <= LISTED:
        return _listed(n, seed, epoch)[places]
    keys = _round_keys(seed, epoch)
    bits = (n - 1).bit_length()
    out = _feistel(places.astype(np.uint64), bits, keys)
    # Each step lands within n more often than not, so this ends after a few.
    while len(past := np.flatnonzero(out >= n)):
        out[past] = _feistel(out[past], bits, keys)
    return out.astype(np.int64)


@lru_cache(maxsize=4)
def _listed(n: int, seed: int, epoch: int) -> _Indices:
    generator = Keyed(seed, "order/shuffle").fresh(Key(index=0, epoch=epoch))
    found = generator.permutation(n).astype(np.int64, copy=False)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    generator = Keyed(seed, "order/shuffle").fresh(Key(index=0, epoch=epoch))
    return tuple(generator.integers(0, 2**64, size=_ROUNDS, dtype=np.uint64))


def _feistel(values: _Words, bits: int, keys: tuple[np.uint64, ...]) -> _Words:
    """A bijection of numbers of so many bits; the halves change places in every round."""
    high, low = bits // 2, bits - bits // 2
    left = values >> np.uint64(low)
    right = values & np.uint64((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) >> np.uint64(64 - high))
        high, low = low, high
    joined: _Words = (left << np.uint64(low)) | right
    return joined


def _mixed(words: _Words) -> _Words:
    """Every bit of the result depends on every bit of a word (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed
