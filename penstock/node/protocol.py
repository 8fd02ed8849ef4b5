"""What members and the node say to each other, as small records.

A member sends ``Join``, then ``BeginEpoch`` for each epoch, ``Want`` for its batches in turn,
``Took`` when the loop has one, and ``Released`` when nothing looks at it any more. The node answers
``Welcome`` or ``Refused`` to ``Join``, and ``First`` to ``BeginEpoch``. It sends ``BatchGiven`` or
``BatchFailed`` for each batch that was wanted, and ``Broken`` if the group cannot go on. A command
that only looks at the node sends ``Look`` or ``EndNode``, and is answered with ``Status``.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.engine.pools.wire import Vocabulary
from penstock.node.state import Lag, Name
from penstock.order import BatchKeys

VERSION = 3
"""Version of these messages. Node and members must have the same."""

RELEASE = f"{penstock.__version__} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""Only the same release is sure to unpack what another one packs."""


class Join(NamedTuple):
    """From a new member. ``unit``: the group's batch size, where the member was in it before."""

    version: int
    release: str
    group: str
    description: dict[str, Any]
    part: str
    size: int
    cuts: bool
    unit: int | None
    lag: Lag


class Welcome(NamedTuple):
    """``needs_code``: the node does not have the pipeline yet."""

    needs_code: bool
    unit: int
    part: str


class Refused(NamedTuple):
    """The node does not do what it was asked for."""

    reason: str


class Code(NamedTuple):
    """The pipeline, whose descriptor comes along, and where the job was started."""

    path: list[str]
    directory: str


class BeginEpoch(NamedTuple):
    """A member begins an epoch. ``first``: with which batch; ``None`` lets the node choose."""

    epoch: int
    length: int | None
    first: int | None
    done: int


class First(NamedTuple):
    """The batch that a member begins an epoch with."""

    epoch: int
    first: int


class Want(NamedTuple):
    """A member will need this batch. Arrays are little-endian 64-bit integers."""

    epoch: int
    number: int
    indices: bytes
    replicas: bytes | None
    spent: bytes | None

    @classmethod
    def of(cls, keys: BatchKeys) -> Want:
        indices = _bytes(keys.indices) or b""
        return cls(keys.epoch, keys.number, indices, _bytes(keys.replicas), _bytes(keys.spent))

    def keys(self) -> BatchKeys:
        indices = _array(self.indices)
        if indices is None:
            raise ValueError("a batch without samples")
        replicas, spent = _array(self.replicas), _array(self.spent)
        return BatchKeys(self.epoch, self.number, indices, replicas, spent)

    def named(self, part: str) -> Name:
        """The name of this batch: the same in every process for the same samples in the same
        place."""
        digest = hashlib.blake2b(digest_size=8)
        for data in (self.indices, self.replicas):
            digest.update(b"-" if data is None else data + b"+")
        return Name(part, self.epoch, self.number, digest.hexdigest())


class Took(NamedTuple):
    """The training loop of a member has this batch now."""

    epoch: int
    number: int
    digest: str


class Released(NamedTuple):
    """Nothing in a member's process looks at this batch any more."""

    epoch: int
    number: int
    digest: str


class Rewind(NamedTuple):
    """A member wants nothing of what it asked for before."""


class Several(NamedTuple):
    """Several messages in one, because each message wakes the node."""

    messages: list[list[Any]]


class BatchGiven(NamedTuple):
    """A batch: where it lies. A new slot comes as a descriptor, a new ``layout`` packed.

    ``whole``: the slot holds a packed value of ``nbytes``, and no rows. ``beside``: fields that are
    not in the slot, packed.
    """

    epoch: int
    number: int
    digest: str
    slot: int | None
    layout: bytes | None
    whole: bool
    rows: int
    nbytes: int
    beside: bytes | None
    bad: list[tuple[int, str, str, str]]


class BatchFailed(NamedTuple):
    """A batch that could not be prepared, with the packed error."""

    epoch: int
    number: int
    digest: str
    error: bytes


class Broken(NamedTuple):
    """The group cannot go on, with the packed error."""

    error: bytes


class Look(NamedTuple):
    """Asks for the status of the node."""


class EndNode(NamedTuple):
    """Asks the node to end."""


class Status(NamedTuple):
    """The status of the node, as plain data."""

    status: dict[str, Any]


VOCABULARY = Vocabulary(
    join=Join,
    welcome=Welcome,
    refused=Refused,
    code=Code,
    begin=BeginEpoch,
    first=First,
    want=Want,
    took=Took,
    released=Released,
    rewind=Rewind,
    several=Several,
    given=BatchGiven,
    failed=BatchFailed,
    broken=Broken,
    look=Look,
    end=EndNode,
    status=Status,
)

ABOUT_BATCHES = (Want, Took, Released, Rewind)
"""Messages that a group decides about; several of them are handled together."""


def common(size: int, unit: int, cuts: bool) -> int:
    """The batch size that a member of this size asks for, in a group that prepares ``unit``.

    ``cuts``: the member can make its batches of others.

    >>> common(32, 64, True), common(128, 64, True), common(48, 64, True), common(32, 64, False)
    (64, 64, 48, 32)
    """
    return unit if cuts and (size % unit == 0 or unit % size == 0) else size


def _bytes(array: NDArray[np.int64] | None) -> bytes | None:
    return None if array is None else array.astype("<i8", copy=False).tobytes()


def _array(data: bytes | None) -> NDArray[np.int64] | None:
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64)
