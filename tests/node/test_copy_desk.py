"""What a job takes for the answer of the node to its question who copies a batch."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.device.shared_copy import UseShared
from penstock.engine.pools.wire import Wire
from penstock.node.copies import UseCopy
from penstock.node.copy_desk import NodeCopyDesk
from penstock.node.directory import NodeDirectory
from penstock.node.protocol import VOCABULARY, AskCopy, CopyEnded, ShareCopies, Want
from penstock.order.plan import BatchKeys

FIRST, SECOND = (BatchKeys(0, n, np.array([n], np.int64), None) for n in range(2))


class Directory(NodeDirectory):
    """Connects to the end of a socket that the test has."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        self.node = Wire(ours, VOCABULARY)

    def connect(self) -> socket.socket | None:
        return self._theirs

    def received(self) -> object:
        found = self.node.receive()
        return None if found is None else found[0]

    def use(self, keys: BatchKeys, place: int) -> None:
        """Tell the job to use the copy of job 7 in this place."""
        self.node.send(UseCopy(1, Want.of(keys).named(""), 7, place, 1, "uint8[8]", None))


@pytest.fixture
def directory() -> Iterator[Directory]:
    found = Directory()
    yield found
    found.node.close()


def test_a_late_answer_is_not_taken_for_that_to_the_next_question(directory: Directory) -> None:
    desk = NodeCopyDesk("d", "0/1 x 8", directory)
    desk.patience = 0.01
    desk.join("gpu")
    assert isinstance(directory.received(), ShareCopies)
    assert desk.ask(FIRST) is None  # the node says nothing
    assert isinstance(directory.received(), AskCopy)
    assert isinstance(directory.received(), CopyEnded)

    desk.patience = 60.0
    directory.use(FIRST, 0)
    # Another loop over the same batches. The place may have another batch by now.
    assert desk.ask(FIRST) is None
    directory.use(SECOND, 1)
    assert desk.ask(SECOND) == UseShared(7, 1, 1, "uint8[8]")
    assert isinstance(directory.received(), AskCopy)
    ended = directory.received()
    assert isinstance(ended, CopyEnded)
    assert ended == CopyEnded(*Want.of(FIRST).named("")[1:])
    # Now that the late answer has come, the batch can be asked for again.
    directory.use(FIRST, 2)
    assert desk.ask(FIRST) == UseShared(7, 2, 1, "uint8[8]")
    desk.abandon()
