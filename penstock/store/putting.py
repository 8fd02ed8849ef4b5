"""What becomes of values that are put: they are taken, they replace others, or they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.store.value import MAX_NBYTES, Buffer, Head, Value, cost, frame, header_nbytes


class Shelf(Protocol):
    """Where values are put, as it is while nobody else changes it."""

    def head(self, key: int) -> Head | None: ...

    def put(self, key: int, framed: Buffer, tag: int | None) -> None: ...


class Item(NamedTuple):
    """A value ready to be written; ``tag`` is ``None`` where it has none."""

    key: int
    framed: Buffer
    tag: int | None
    price: int

    @classmethod
    def of(cls, key: int, value: Value, tag: int | None = None) -> Item:
        framed = frame(key, value, tag)
        return cls(key, framed, tag, cost(len(framed) - header_nbytes(tag), tagged=tag is not None))


class Taken(NamedTuple):
    """What was done: whether each item is in the store now, and how many found no room."""

    held: list[bool]
    refused: int


def put_all(shelf: Shelf, items: Sequence[Item], room: int | None) -> Taken:
    """Put what ``room`` allows; nothing at all where it is ``None``.

    What an item replaces makes room for it. LMDB gives those pages out again only after this
    transaction, so the file needs slack for as much as one transaction puts.
    """
    held: list[bool] = []
    refused = 0
    for key, framed, tag, price in items:
        old = shelf.head(key)
        # One tag further on: whoever puts this was late, and must not undo what came after.
        if old is not None and (tag is None or old.tag in (tag, tag + 1)):
            held.append(tag in (None, old.tag))
            continue
        freed = 0 if old is None else cost(old.length, tagged=old.tag is not None)
        if room is None or price > room + freed or len(framed) > MAX_NBYTES:
            held.append(False)
            refused += 1
            continue
        shelf.put(key, framed, tag)
        room += freed - price
        held.append(True)
    return Taken(held, refused)
