"""A compact list of file names."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Names:
    """A list of file names held as one array of bytes.

    A million paths take tens of megabytes; as strings they would take hundreds. They are sent to
    workers as two arrays, which can be shared. The module and name of this class are part of the
    fingerprints of sources.

    >>> names = Names(["cat.jpg", "dog.jpg"])
    >>> len(names), names[1]
    (2, 'dog.jpg')
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, names: Iterable[str]) -> None:
        text = bytearray()
        ends = array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        self._text: NDArray[np.uint8] = np.frombuffer(bytes(text), dtype=np.uint8)
        self._ends: NDArray[np.int64] = np.frombuffer(ends, dtype=np.int64)

    @property
    def text(self) -> NDArray[np.uint8]:
        """The bytes of all names, one after the other."""
        return self._text

    @property
    def ends(self) -> NDArray[np.int64]:
        """For each name the number of bytes up to its end."""
        return self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"name {index} is out of range: there are {len(self._ends)} names")
        start = self._ends.item(index - 1) if index else 0
        return os.fsdecode(self._text[start : self._ends.item(index)].tobytes())
