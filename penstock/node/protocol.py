"""What members and the node say to each other: the words, and what travels in them.

A member says ``join``, then ``begin`` an epoch, ``want`` its batches in turn, ``took`` one, and
``released`` it when nothing looks at it any more; ``all`` has several of these, because each
message wakes the node. The node answers ``welcome`` (and with it whether it needs the pipeline,
which then comes as ``code``) or ``refused``; ``first`` to ``begin``; and sends ``batch`` or
``failed`` for what was wanted, ``broken`` if the group cannot go on. Whoever only looks says
``look``, and is answered with ``status``; ``stop`` ends the node.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.node.state import Name
from penstock.order.deal import BatchKeys

VERSION = 2
"""Of these messages. Node and members must have the same."""

RELEASE = f"{penstock.__version__} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""Who speaks: what one release packs, only the same can be sure to unpack."""


def common(size: int, unit: int, cuts: bool) -> int:
    """The batch size that a member of this size asks for, in a group that prepares ``unit``.

    ``cuts`` says that it can make its batches of others.

    >>> common(32, 64, True), common(128, 64, True), common(48, 64, True), common(32, 64, False)
    (64, 64, 48, 32)
    """
    return unit if cuts and (size % unit == 0 or unit % size == 0) else size


def keys_out(keys: BatchKeys) -> list[Any]:
    """Keys as a message has them."""
    return [keys.epoch, keys.number, *map(_out, (keys.indices, keys.replicas, keys.spent))]


def named(part: str, message: Sequence[Any]) -> Name:
    """The name of the batch that these keys make: the same in every process for the same samples in
    the same place."""
    epoch, number, indices, replicas, _ = message
    digest = hashlib.blake2b(digest_size=8)
    for one in (indices, replicas):
        digest.update(b"-" if one is None else one + b"+")
    return Name(part, epoch, number, digest.hexdigest())


def keys_in(message: Sequence[Any]) -> BatchKeys:
    epoch, number, *arrays = message
    indices, replicas, spent = map(_in, arrays)
    if indices is None:
        raise ValueError("a batch without samples")
    return BatchKeys(epoch, number, indices, replicas, spent)


def _out(array: NDArray[np.int64] | None) -> bytes | None:
    return None if array is None else array.astype("<i8", copy=False).tobytes()


def _in(data: bytes | None) -> NDArray[np.int64] | None:
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64)
