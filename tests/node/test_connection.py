"""A member's connection: slots are reused, and each batch shows what the node put there."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.engine.pools.wire import Wire
from penstock.engine.slots import Layout, Slot
from penstock.node.connection import Connection, Leases
from penstock.node.peer import Peer
from penstock.node.protocol import VOCABULARY, BatchGiven, Released
from penstock.node.staging import StagedBatch
from penstock.node.state import BatchName
from penstock.serialize import pack

SAMPLE = (np.zeros((2, 3), np.float32), 7)


class Ends:
    """A connection, and the node's end of it."""

    def __init__(self) -> None:
        members, nodes = Wire.pair()
        self.connection = Connection(Wire(members, VOCABULARY))
        self.peer = Peer(1, Wire(nodes, VOCABULARY), os.getpid())
        self.leases: Leases = {}
        self.number = 0

    def transfer(self, staged: StagedBatch) -> Any:
        """Give a batch at the node's end; return it as the member gets it."""
        self.number += 1
        name = BatchName("", 0, self.number, "x")
        self.peer.give(name, staged)
        received = self.connection.wire.receive()
        assert received is not None
        given, fds = received
        assert isinstance(given, BatchGiven)
        assert (given.epoch, given.number, given.digest) == name[1:]
        return self.connection.value(name, given, fds, self.leases)

    def next_message(self) -> Any:
        """The next message that the node's end receives."""
        self.connection.flush()
        received = self.peer.wire.receive()
        assert received is not None
        return received[0]

    def close(self) -> None:
        self.connection.close()
        self.peer.wire.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def staged(slot: Slot, layout: Layout, value: float, rows: int | None = None) -> StagedBatch:
    """A batch in which every number is ``value``."""
    for column in layout.columns(slot.map):
        assert column is not None
        column[:] = value
    count = layout.rows if rows is None else rows
    return StagedBatch(slot, layout, count, count * 28, None, [])


@pytest.fixture
def layout() -> Layout:
    layout = Layout.of(SAMPLE, 4)
    assert layout is not None
    return layout


@pytest.mark.parametrize("tidy", [True, False])
def test_a_reused_slot_shows_the_new_batch(ends: Ends, layout: Layout, tidy: bool) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    for value in (1, 2, 3):
        images, labels = ends.transfer(staged(slot, layout, value))
        assert images.shape == (4, 2, 3)
        assert (images == value).all()
        assert labels.tolist() == [value] * 4
        images[:] = 99  # a job may overwrite its batch, and only this job sees that
        labels[:] = 99
        assert np.all(layout.columns(slot.map)[0] == value)
        assert len(ends.leases) == 1
        del images, labels
        gc.collect()
        assert len(ends.leases) == 0
        assert ends.next_message() == Released(0, ends.number, "x")
        if tidy:
            ends.connection.tidy()


def test_tidying_does_not_change_a_batch_in_use(ends: Ends, layout: Layout) -> None:
    slots = [Slot(number, layout.nbytes, shared=True) for number in (1, 2)]
    first, _ = ends.transfer(staged(slots[0], layout, 1))
    first[:] = 50
    second, _ = ends.transfer(staged(slots[1], layout, 2))
    del second, _
    gc.collect()
    ends.connection.tidy()
    assert (first == 50).all()
    assert list(ends.leases) != []


def test_a_batch_given_again_while_in_use_has_memory_of_its_own(ends: Ends, layout: Layout) -> None:
    batch = staged(Slot(5, layout.nbytes, shared=True), layout, 1)
    first, _ = ends.transfer(batch)
    first[:] = 50
    second, _ = ends.transfer(batch)
    assert (second == 1).all()
    second[:] = 60
    third, _ = ends.transfer(batch)
    assert (third == 1).all()
    assert (first == 50).all()
    assert (second == 60).all()


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("extended", [True, False])
def test_a_batch_keeps_its_memory_when_another_of_its_slot_is_dropped(
    ends: Ends, layout: Layout, dropped: int, tidy: bool, extended: bool
) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    batch = staged(slot, layout, 1)
    held = [ends.transfer(batch)[0]]
    held[0][:] = 50
    if extended:
        larger = Layout.of(SAMPLE, 4_000)
        assert larger is not None
        os.ftruncate(slot.fd, larger.nbytes)
        slot.refresh()
        batch = staged(slot, larger, 1)
    held.append(ends.transfer(batch)[0])
    held[1][:] = 60
    del held[dropped]
    gc.collect()
    assert len(ends.leases) == 1
    assert ends.next_message() == Released(0, dropped + 1, "x")
    if tidy:
        ends.connection.tidy()
    again, _ = ends.transfer(batch)
    assert (again == 1).all()
    again[:] = 70
    assert (held[0] == (60, 50)[dropped]).all()


def test_mappings_of_one_slot_leave_no_descriptors(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    batch = staged(slot, layout, 1)
    ends.transfer(batch)
    gc.collect()
    before = descriptors_of(slot)
    held = [ends.transfer(batch) for _ in range(5)]
    assert len(ends.leases) == 5
    del held
    gc.collect()
    assert descriptors_of(slot) == before


def descriptors_of(slot: Slot) -> int:
    """How many descriptors of the slot's file this process has."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing had a descriptor too
            count += os.path.sameopenfile(int(fd), slot.fd)
    return count


def test_a_short_batch_has_only_its_rows(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    ends.transfer(staged(slot, layout, 1))
    gc.collect()
    ends.connection.tidy()
    images, labels = ends.transfer(staged(slot, layout, 2, rows=3))
    assert images.shape == (3, 2, 3)
    assert labels.tolist() == [2, 2, 2]


def test_views_of_one_layout_are_not_used_for_another(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, 4_096, shared=True)
    ends.transfer(staged(slot, layout, 1))
    gc.collect()
    ends.connection.tidy()
    other = Layout.of((np.zeros(5, np.int16), 1.5), 4)
    assert other is not None
    integers, floats = ends.transfer(staged(slot, other, 2))
    assert (integers.shape, integers.dtype, floats.dtype) == ((4, 5), np.int16, np.float64)
    assert integers.tolist() == [[2] * 5] * 4


def test_all_of_an_extended_slot_is_mapped(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    ends.transfer(staged(slot, layout, 1))
    gc.collect()
    ends.connection.tidy()
    packed = pack({"x": np.arange(10_000)})
    os.ftruncate(slot.fd, packed.nbytes)
    slot.refresh()
    assert isinstance(slot.map, mmap.mmap)
    packed.write_into(memoryview(slot.map))
    value = ends.transfer(StagedBatch(slot, None, 1, packed.nbytes, None, []))
    assert value["x"].tolist() == list(range(10_000))


def test_fields_of_text_are_sent_beside_the_slot(ends: Ends) -> None:
    layout = Layout.of((np.zeros(3, np.uint8), "text"), 2)
    assert layout is not None
    slot = Slot(5, layout.nbytes, shared=True)
    for words in (["a", "b"], ["c", "d"]):
        beside = bytes(pack({1: words}).tobytes())
        numbers, texts = ends.transfer(StagedBatch(slot, layout, 2, 6, beside, []))
        assert (numbers.shape, texts) == ((2, 3), words)
        del numbers, texts
        gc.collect()
        ends.connection.tidy()
