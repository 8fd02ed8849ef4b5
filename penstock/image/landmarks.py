"""What was learnt of a JPEG the last time, so that the next crop of it need not be led there again.

Entropy-coded data has no table of contents: to reach a crop, all that lies above and beside it must
be read. Once it has been, it is known where each row of blocks begins, and later epochs go straight
there; a random crop takes a fifth less time. The pixels are the same, bit by bit, because what is
known is known of these bytes: files are recognised by a hash of 128 bits of all that they contain.
"""

from __future__ import annotations

from typing import Any

import xxhash
from numpy.typing import NDArray

from penstock import config
from penstock.image import kernel

OVERHEAD = 180
"""Bytes that a file's entry takes beside its marks."""

FEWEST_BYTES = 8_192
"""Of smaller files there is little to pass over."""


class Landmarks:
    """The marks of many files, up to a budget of bytes; those that came first stay.

    Who comes second finds what the first has left: threads share them without a lock.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._marks: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def known(self, key: int) -> bytes | None:
        """The marks of a file; none yet is empty, and ``None`` says that there is no room."""
        found = self._marks.get(key)
        if found is None and self.used < self.budget:
            return b""
        return found

    def add(self, key: int, marks: bytes) -> None:
        """Keep these in place of fewer."""
        before = self._marks.get(key)
        if before is None:
            self.used += OVERHEAD + len(marks)
        elif len(marks) <= len(before):
            return
        else:
            self.used += len(marks) - len(before)
        self._marks[key] = marks


_landmarks: Landmarks | None = None


def of_process() -> Landmarks:
    """Those of this process: one file is the same to all its loaders."""
    global _landmarks
    if _landmarks is None:
        _landmarks = Landmarks(config.landmarks())
    return _landmarks


def region(data: Any, box: tuple[int, int, int, int], out: NDArray[Any], **options: Any) -> None:
    """As ``kernel.region``, with its options, and faster for files that were seen before."""
    landmarks = of_process()
    key, marks = 0, None
    if len(data) >= FEWEST_BYTES and landmarks.budget:
        key = xxhash.xxh3_128_intdigest(data)
        marks = landmarks.known(key)
    more = kernel.region(data, box, out, marks=marks, **options)
    if more is not None:
        landmarks.add(key, more)
