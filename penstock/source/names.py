"""A compact list of file names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4096
"""Names that are encoded together: one by one, a million take a second."""


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
        texts: list[NDArray[np.uint8]] = [np.zeros(0, dtype=np.uint8)]
        ends: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        rest, size = iter(names), 0
        while chunk := list(islice(rest, _CHUNK)):
            text, places = _encoded(chunk)
            texts.append(text)
            ends.append(places + size)
            size += len(text)
        self._text: NDArray[np.uint8] = np.concatenate(texts)
        self._ends: NDArray[np.int64] = np.concatenate(ends)
        # Writing to them would change the names. Fingerprints do not depend on it.
        self._text.flags.writeable = self._ends.flags.writeable = False

    @classmethod
    def packed(cls, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> Names:
        """The names of these arrays, which ``text`` and ``ends`` of another list returned."""
        if text.dtype != np.uint8 or ends.dtype != np.int64 or text.ndim != 1 or ends.ndim != 1:
            raise ValueError("packed names are an array of bytes and one of ends")
        if len(ends) and (ends[-1] != len(text) or ends[0] < 0 or (np.diff(ends) < 0).any()):
            raise ValueError("the ends of packed names do not fit their text")
        names = cls([])
        names._text, names._ends = text, ends
        text.flags.writeable = ends.flags.writeable = False
        return names

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


def _encoded(names: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of these names, one after the other, and the end of each."""
    joined = np.frombuffer(os.fsencode("\0".join(names)), dtype=np.uint8)
    between = joined == 0
    places = np.flatnonzero(between)
    if len(places) == len(names) - 1:
        ends = np.append(places, len(joined)) - np.arange(len(names))
        return joined[~between], ends
    # A name that has a zero byte itself: no file has such a name, which is found out later.
    encoded = [os.fsencode(name) for name in names]
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), np.cumsum(sizes)
