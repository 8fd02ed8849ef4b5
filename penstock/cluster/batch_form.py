"""A prepared batch as plain data for another machine, and back. Nothing of it is unpickled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.cluster.protocol import LARGEST_ANSWER, LARGEST_LAYOUT, MOST_KEYS, MOST_LEAVES
from penstock.engine.slots import Layout, Leaf
from penstock.store.plain import NotPlain, check_content, pack_plain, plain_dtype, unpack_sample
from penstock.tree import flatten

_MOST_SIDES = 32


def pack_layout(layout: Layout) -> bytes:
    """A layout as plain data. Raises NotPlain.

    >>> layout = Layout((0, {"label": 1}), (Leaf((2, 3), np.dtype("u1")), Leaf((), None)), 8)
    >>> layout_of(pack_layout(layout)) == layout
    True
    """
    leaves = []
    for leaf in layout.leaves:
        if leaf.dtype is not None:
            try:
                plain_dtype(leaf.dtype.str)
            except ValueError as error:
                raise NotPlain(str(error)) from None
        leaves.append((leaf.shape, "" if leaf.dtype is None else leaf.dtype.str))
    packed = bytes(pack_plain((layout.skeleton, tuple(leaves), layout.rows)).tobytes())
    if len(packed) > LARGEST_LAYOUT or len(leaves) > MOST_LEAVES:
        raise NotPlain(f"a batch of {len(leaves)} arrays")
    return packed


def layout_of(packed: bytes) -> Layout:
    """The layout that another machine has sent. Raises ValueError."""
    try:
        skeleton, described, rows = read_plain(packed)
        leaves = tuple(_leaf(*one) for one in described)
    except TypeError as error:
        raise ValueError(f"a layout of another form: {error}") from None
    if type(rows) is not int or not 0 < rows <= MOST_KEYS:
        raise ValueError("a layout without rows")
    numbers, _ = flatten(skeleton)
    if len(leaves) > MOST_LEAVES or numbers != [*range(len(leaves))]:
        raise ValueError("a layout whose structure does not fit its fields")
    layout = Layout(skeleton, leaves, rows)
    if layout.nbytes > 2 * LARGEST_ANSWER:
        raise ValueError(f"a layout of {layout.nbytes} bytes")
    return layout


def _leaf(shape: Any, dtype: Any) -> Leaf:
    if type(shape) is not tuple or len(shape) > _MOST_SIDES or type(dtype) is not str:
        raise ValueError("a field without a shape and a type")
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError("a field of an odd shape")
    if math.prod(shape) > LARGEST_ANSWER:
        raise ValueError("a field of too many values")
    return Leaf(shape, plain_dtype(dtype) if dtype else None)


def column_bytes(layout: Layout, buffer: Any, rows: int) -> list[memoryview]:
    """The bytes of each array of a batch with ``rows`` rows, as views of its slot."""
    view = memoryview(buffer).cast("B")
    return [
        view[place : place + leaf.nbytes * rows]
        for leaf, place in zip(layout.leaves, layout.places, strict=False)
        if leaf.dtype is not None
    ]


def check_columns(layout: Layout, buffer: Any, rows: int) -> None:
    """Raise ValueError if an array that was received has bytes that NumPy cannot stand."""
    arrays = [leaf for leaf in layout.leaves if leaf.dtype is not None]
    for leaf, view in zip(arrays, column_bytes(layout, buffer, rows), strict=True):
        if leaf.dtype is not None and leaf.dtype.kind in "bU":
            check_content(np.frombuffer(view, np.uint8), leaf.dtype)


def copy_into(targets: list[memoryview], pieces: Iterator[memoryview]) -> None:
    """Copy received bytes into these places, one after the other. Raises ValueError."""
    places = iter(targets)
    target = next(places, memoryview(b""))
    for received in pieces:
        piece = received.cast("B")
        while piece.nbytes:
            while not target.nbytes:
                following = next(places, None)
                if following is None:
                    raise ValueError("more bytes than the layout has")
                target = following
            count = min(piece.nbytes, target.nbytes)
            target[:count] = piece[:count]
            piece, target = piece[count:], target[count:]
    if target.nbytes or any(left.nbytes for left in places):
        raise ValueError("fewer bytes than the layout has")


def read_plain(packed: Any) -> Any:
    """A value that another machine has sent. Raises ValueError, also for a pickle."""
    return unpack_sample(packed, lambda: False)


def objects_of(packed: bytes, layout: Layout, rows: int) -> dict[int, list[Any]]:
    """The fields of text and bytes that another machine has sent. Raises ValueError."""
    objects = read_plain(packed)
    fields = {i for i, leaf in enumerate(layout.leaves) if leaf.dtype is None}
    if type(objects) is not dict or set(objects) != fields:
        raise ValueError("other fields than the layout has")
    for column in objects.values():
        if type(column) is not list or len(column) != rows:
            raise ValueError("a field with another number of rows")
        if not all(isinstance(value, (str, bytes)) for value in column):
            raise ValueError("a field of neither text nor bytes")
    return objects
