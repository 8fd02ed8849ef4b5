"""Batches as plain data: what is sent arrives, and nonsense of another machine is refused."""

from __future__ import annotations

from collections import namedtuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.batch_form import (
    check_columns,
    column_bytes,
    copy_into,
    layout_of,
    objects_of,
    pack_layout,
)
from penstock.engine.slots import Layout, Leaf
from penstock.serialize import pack
from penstock.store.plain import NotPlain, pack_plain

PIXELS, FLAG, TEXT = Leaf((2, 3), np.dtype("u1")), Leaf((), np.dtype("?")), Leaf((), None)
LAYOUT = Layout((0, {"flag": 1, "text": [2]}), (PIXELS, FLAG, TEXT), 4)

Pair = namedtuple("Pair", "left right")


def packed(value: Any) -> bytes:
    return bytes(pack_plain(value).tobytes())


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 4), cuts=st.lists(st.integers(0, 28), max_size=4))
def test_the_rows_of_a_batch_arrive_however_their_bytes_are_cut(rows: int, cuts: list[int]) -> None:
    source, target = np.arange(LAYOUT.nbytes, dtype=np.uint8), np.zeros(LAYOUT.nbytes, np.uint8)
    sent = b"".join(column_bytes(LAYOUT, source, rows))
    assert len(sent) == LAYOUT.row_nbytes * rows
    places = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    pieces = [memoryview(sent[a:b]) for a, b in pairwise(places)]
    copy_into(column_bytes(LAYOUT, target, rows), iter(pieces))
    assert b"".join(column_bytes(LAYOUT, target, rows)) == sent


@pytest.mark.parametrize("size", [6, 8])
def test_fewer_or_more_bytes_than_the_layout_has_are_refused(size: int) -> None:
    places = column_bytes(LAYOUT, bytearray(LAYOUT.nbytes), 1)
    with pytest.raises(ValueError, match="bytes than the layout has"):
        copy_into(places, iter([memoryview(bytes(size))]))


def test_layouts_arrive_as_they_were() -> None:
    assert layout_of(pack_layout(LAYOUT)) == LAYOUT


@pytest.mark.parametrize(
    "layout",
    [
        Layout(Pair(0, 1), (PIXELS, FLAG), 4),
        Layout(0, (Leaf((), np.dtype([("a", "u1")])),), 4),
    ],
    ids=["named-tuple", "structured-array"],
)
def test_layouts_that_need_code_are_not_sent(layout: Layout) -> None:
    with pytest.raises(NotPlain):
        pack_layout(layout)


@pytest.mark.parametrize(
    "sent",
    [
        packed((0, (((2,), "|u1"),), 0)),
        packed((0, (((2,), "|u1"),), True)),
        packed((0, (((2,), "|u1"),), 1 << 40)),
        packed(((0, 1), (((2,), "|u1"),), 4)),
        packed(((0, 0), (((2,), "|u1"), ((2,), "|u1")), 4)),
        packed((0, (((-2,), "|u1"),), 4)),
        packed((0, (((1 << 40,), "|u1"),), 4)),
        packed((0, (((2,), "|O8"),), 4)),
        packed((0, (((2,), 7),), 4)),
        packed((0, ((2, "|u1"),), 4)),
        packed((0, (), 4)),
        packed("a layout"),
        b"",
        b"\0" * 40,
        bytes(pack((0, (((2,), "|u1"),), 4)).tobytes()),
    ],
)
def test_nonsense_in_place_of_a_layout_is_refused(sent: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        layout_of(sent)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_in_place_of_a_layout_are_refused(sent: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        layout_of(sent)


def test_truth_values_other_than_0_and_1_are_refused() -> None:
    slot = bytearray(LAYOUT.nbytes)
    check_columns(LAYOUT, slot, 2)
    slot[LAYOUT.places[1]] = 2
    with pytest.raises(ValueError, match="truth values"):
        check_columns(LAYOUT, slot, 2)


def test_fields_of_text_arrive_and_others_are_refused() -> None:
    assert objects_of(packed({2: ["a", b"b"]}), LAYOUT, 2) == {2: ["a", b"b"]}
    for wrong in ({}, {1: ["a", "b"]}, {2: ["a"]}, {2: ["a", 7]}, {2: ("a", "b")}, ["a", "b"]):
        with pytest.raises(ValueError):  # noqa: PT011
            objects_of(packed(wrong), LAYOUT, 2)
