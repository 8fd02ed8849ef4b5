"""Values in LMDB, as one transaction sees them: whole, or in pieces where they will be replaced.

A large value needs consecutive pages, and what it leaves free when it is replaced fits only a
smaller one: with a third of 500 decoded photographs replaced 30 times the file grew to 1.48 times
its content, and went on growing. In pieces of equal size it is 1.09 times, and stays there.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.store.value import PIECE, Buffer, Head, head, pack_key, payload

# Big-endian, so that the pieces of a value lie side by side and in their order.
_NUMBER = struct.Struct(">I")


class Samples:
    """The values of one transaction; ``pieces`` is the database of all pieces but the first."""

    __slots__ = ("_pieces", "_transaction")

    def __init__(self, transaction: Any, pieces: Any) -> None:
        self._transaction = transaction
        self._pieces = pieces

    def head(self, key: int) -> Head | None:
        """What the header of a value says; ``None`` where there is none, or it is damaged."""
        first = self._transaction.get(pack_key(key))
        return None if first is None else head(first)

    def get(self, key: int, tag: int | None = None) -> tuple[memoryview | None, bool]:
        """A copy of a value if there is one, and of this tag where one is given; and whether
        what is there is sound. The tag is looked at before anything else."""
        packed = pack_key(key)
        first = self._transaction.get(packed)
        if first is None:
            return None, True
        if tag is not None:
            found = head(first)
            if found is not None and found.tag != tag:
                return None, True
        value = payload(key, first, lambda: self._rest(packed))
        return value, value is not None

    def put(self, key: int, framed: Buffer, tag: int | None) -> None:
        """Put a value, in place of any that is there."""
        packed, view = pack_key(key), memoryview(framed)
        end = len(view) if tag is None else PIECE
        self._transaction.put(packed, view[:end])
        number = 0
        for number, start in enumerate(range(end, len(view), PIECE), start=1):
            piece = packed + _NUMBER.pack(number)
            self._transaction.put(piece, view[start : start + PIECE], db=self._pieces)
        self._cut(packed, number + 1)

    def delete(self, key: int) -> bool:
        """Remove a value; says whether it was there."""
        packed = pack_key(key)
        self._cut(packed, 1)
        return bool(self._transaction.delete(packed))

    def _rest(self, packed: bytes) -> list[memoryview]:
        """The pieces of a value after its first."""
        found = []
        with self._transaction.cursor(db=self._pieces) as cursor:
            more = cursor.set_key(packed + _NUMBER.pack(1))
            while more and cursor.key()[: len(packed)] == packed:
                found.append(cursor.value())
                more = cursor.next()
        return found

    def _cut(self, packed: bytes, number: int) -> None:
        """Remove the pieces of a value from this one on."""
        with self._transaction.cursor(db=self._pieces) as cursor:
            found = cursor.set_range(packed + _NUMBER.pack(number))
            while found and cursor.key()[: len(packed)] == packed:
                found = cursor.delete()
