"""A member's line: batches lie in slots that are used again, and each shows what was put there."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.engine.pools.wire import Wire
from penstock.engine.slots import Layout, Slot
from penstock.node.group import Peer
from penstock.node.line import Leases, Line
from penstock.node.staging import Staged
from penstock.node.state import Name
from penstock.serialize import pack

SAMPLE = (np.zeros((2, 3), np.float32), 7)


class Ends:
    """A line, and the node's end of it."""

    def __init__(self) -> None:
        mine, others = Wire.pair()
        self.line = Line(Wire(mine))
        self.peer = Peer(1, Wire(others), os.getpid())
        self.leases: Leases = {}
        self.number = 0

    def hand_over(self, staged: Staged) -> Any:
        """A batch from one end to the other."""
        self.number += 1
        name = Name("", 0, self.number, "x")
        self.peer.give(name, staged)
        received = self.line.wire.receive()
        assert received is not None
        (word, *said), fds = received
        assert word == "batch"
        return self.line.value(name, said[3:], fds, self.leases)

    def heard(self) -> list[Any]:
        """What the node has been told since."""
        self.line.flush()
        received = self.peer.wire.receive()
        assert received is not None
        return received[0]

    def close(self) -> None:
        self.line.close()
        self.peer.wire.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def staged(slot: Slot, layout: Layout, value: float, rows: int | None = None) -> Staged:
    """A batch in which every number is this one."""
    for column in layout.columns(slot.map):
        assert column is not None
        column[:] = value
    count = layout.rows if rows is None else rows
    return Staged(slot, layout, count, count * 28, None, [])


@pytest.fixture
def layout() -> Layout:
    found = Layout.of(SAMPLE, 4)
    assert found is not None
    return found


@pytest.mark.parametrize("tidy", [True, False])
def test_a_slot_that_is_used_again_shows_the_new_batch(
    ends: Ends, layout: Layout, tidy: bool
) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    for value in (1, 2, 3):
        images, labels = ends.hand_over(staged(slot, layout, value))
        assert images.shape == (4, 2, 3)
        assert (images == value).all()
        assert labels.tolist() == [value] * 4
        images[:] = 99  # a job may write over what it has got, and only this job sees it
        labels[:] = 99
        assert (layout.columns(slot.map)[0] == value).all()
        assert len(ends.leases) == 1
        del images, labels
        gc.collect()
        assert len(ends.leases) == 0
        assert ends.heard()[0] == "released"
        if tidy:
            ends.line.tidy()


def test_what_is_still_looked_at_stays_while_the_line_is_tidied(ends: Ends, layout: Layout) -> None:
    slots = [Slot(number, layout.nbytes, shared=True) for number in (1, 2)]
    first, _ = ends.hand_over(staged(slots[0], layout, 1))
    first[:] = 50
    second, _ = ends.hand_over(staged(slots[1], layout, 2))
    del second, _
    gc.collect()
    ends.line.tidy()
    assert (first == 50).all()
    assert list(ends.leases) != []


def test_a_short_batch_has_its_rows_alone(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    ends.hand_over(staged(slot, layout, 1))
    gc.collect()
    ends.line.tidy()
    images, labels = ends.hand_over(staged(slot, layout, 2, rows=3))
    assert images.shape == (3, 2, 3)
    assert labels.tolist() == [2, 2, 2]


def test_views_of_one_layout_are_not_given_for_another(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, 4_096, shared=True)
    ends.hand_over(staged(slot, layout, 1))
    gc.collect()
    ends.line.tidy()
    other = Layout.of((np.zeros(5, np.int16), 1.5), 4)
    assert other is not None
    few, halves = ends.hand_over(staged(slot, other, 2))
    assert (few.shape, few.dtype, halves.dtype) == ((4, 5), np.int16, np.float64)
    assert few.tolist() == [[2] * 5] * 4


def test_a_slot_that_was_made_longer_is_seen_in_full(ends: Ends, layout: Layout) -> None:
    slot = Slot(5, layout.nbytes, shared=True)
    ends.hand_over(staged(slot, layout, 1))
    gc.collect()
    ends.line.tidy()
    packed = pack({"x": np.arange(10_000)})
    os.ftruncate(slot.fd, packed.nbytes)
    slot.refresh()
    assert isinstance(slot.map, mmap.mmap)
    packed.write_into(memoryview(slot.map))
    value = ends.hand_over(Staged(slot, None, 1, packed.nbytes, None, []))
    assert value["x"].tolist() == list(range(10_000))


def test_fields_of_objects_come_beside(ends: Ends) -> None:
    layout = Layout.of((np.zeros(3, np.uint8), "text"), 2)
    assert layout is not None
    slot = Slot(5, layout.nbytes, shared=True)
    for words in (["a", "b"], ["c", "d"]):
        beside = bytes(pack({1: words}).tobytes())
        numbers, texts = ends.hand_over(Staged(slot, layout, 2, 6, beside, []))
        assert (numbers.shape, texts) == ((2, 3), words)
        del numbers, texts
        gc.collect()
        ends.line.tidy()
