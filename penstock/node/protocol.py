"""The messages between members and the node, as small records.

A member sends ``Join``, then ``BeginEpoch`` for each epoch, ``Want`` for each batch in the order of
its plan, ``Took`` when the training loop has taken a batch, and ``Released`` when the last view of
it is gone. The node answers ``Join`` with ``Welcome`` or ``Refused``, and ``BeginEpoch`` with
``First``. It sends ``BatchGiven`` or ``BatchFailed`` for each wanted batch, and ``Broken`` if the
group cannot go on. A command that is not a member sends ``GetStatus`` or ``EndNode``; the node
answers both with ``Status``.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.engine.pools.wire import Vocabulary
from penstock.node.state import BatchName, Lag
from penstock.order import BatchKeys

VERSION = 3
"""Version of these messages. The node refuses members of another version."""

RELEASE = f"{penstock.__version__} on Python {sys.version_info.major}.{sys.version_info.minor}"
"""The node refuses members of another release: pickled pipelines are not portable between them."""


class Join(NamedTuple):
    """A process asks to become a member of a group.

    ``part``: rank and world. ``size``: its batch size. ``cuts``: it can make its batches from
    batches of another size. ``unit``: the group's batch size, if it was a member before.
    """

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
    """The process is now a member. ``needs_code``: the node does not have the pipeline yet.

    ``unit``: the group's batch size. ``part``: which batches the member takes, as in their names.
    """

    needs_code: bool
    unit: int
    part: str


class Refused(NamedTuple):
    """The node refuses a request."""

    reason: str


class Code(NamedTuple):
    """The pipeline: packed, in a shared file whose descriptor is sent along.

    ``path`` and ``directory``: import path and working directory of the job.
    """

    path: list[str]
    directory: str


class BeginEpoch(NamedTuple):
    """A member begins an epoch of ``length`` batches, of which it has had ``done``.

    ``first``: the batch it begins with; ``None`` lets the node choose.
    """

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

    def named(self, part: str) -> BatchName:
        """The name of this batch, equal in all processes for equal samples at one position."""
        digest = hashlib.blake2b(digest_size=8)
        for data in (self.indices, self.replicas):
            digest.update(b"-" if data is None else data + b"+")
        return BatchName(part, self.epoch, self.number, digest.hexdigest())


class Took(NamedTuple):
    """The training loop of a member has taken this batch."""

    epoch: int
    number: int
    digest: str


class Released(NamedTuple):
    """A member's process no longer uses this batch."""

    epoch: int
    number: int
    digest: str


class Rewind(NamedTuple):
    """A member withdraws all its earlier requests for batches."""


class Several(NamedTuple):
    """Several messages in one, because each message wakes the node."""

    messages: list[list[Any]]


class BatchGiven(NamedTuple):
    """A prepared batch, in a slot. The descriptor of a new slot is sent along.

    ``layout``: packed, if it is another than that of the batch before. ``whole``: the slot holds a
    packed value of ``nbytes`` instead of rows. ``beside``: packed fields that are not in the slot.
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


class GetStatus(NamedTuple):
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
    look=GetStatus,
    end=EndNode,
    status=Status,
)

ABOUT_BATCHES = (Want, Took, Released, Rewind)
"""Messages that go to a group; several that came together are handled together."""


def requested_size(size: int, unit: int, cuts: bool) -> int:
    """Size of the batches that a member asks for, in a group with batches of ``unit`` samples.

    ``size``: the member's batch size. ``cuts``: it can make its batches from batches of another
    size.

    >>> [requested_size(32, 64, True), requested_size(128, 64, True)]
    [64, 64]
    >>> [requested_size(48, 64, True), requested_size(32, 64, False)]
    [48, 32]
    """
    return unit if cuts and (size % unit == 0 or unit % size == 0) else size


def _bytes(array: NDArray[np.int64] | None) -> bytes | None:
    return None if array is None else array.astype("<i8", copy=False).tobytes()


def _array(data: bytes | None) -> NDArray[np.int64] | None:
    return None if data is None else np.frombuffer(data, "<i8").astype(np.int64)
