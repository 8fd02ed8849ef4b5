"""Frames: which part of a picture is wanted and in what size, before any pixel is decoded."""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Frame(NamedTuple):
    """``box`` of the picture is resized to ``full`` (height, width), and ``part`` of that is kept.

    Operations that only choose and resize are told by what they make of a frame, so that a run of
    them comes down to one.

    >>> whole = Frame.of(300, 400)
    >>> whole.resized(150, 200).cut(Box(10, 20, 128, 128))
    Frame(box=Box(top=0, left=0, height=300, width=400), full=(150, 200),
          part=Box(top=10, left=20, height=128, width=128))
    """

    box: Box
    full: tuple[int, int]
    part: Box

    @classmethod
    def of(cls, height: int, width: int) -> Frame:
        """All of a picture."""
        whole = Box(0, 0, height, width)
        return cls(whole, (height, width), whole)

    @property
    def size(self) -> tuple[int, int]:
        return self.part.height, self.part.width

    def cut(self, box: Box) -> Frame | None:
        """A part of what is kept; ``None`` where it reaches beyond."""
        top, left, height, width = box
        if top < 0 or left < 0 or top + height > self.part.height or left + width > self.part.width:
            return None
        return self._replace(part=Box(self.part.top + top, self.part.left + left, height, width))

    def resized(self, height: int, width: int) -> Frame | None:
        """What is kept in another size; ``None`` where it was resized already."""
        if self.full != (self.box.height, self.box.width):
            return None
        box = Box(self.box.top + self.part.top, self.box.left + self.part.left, *self.size)
        return Frame(box, (height, width), Box(0, 0, height, width))
