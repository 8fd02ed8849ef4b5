"""What a check found: how bad it is, in words, and the way out."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How much a finding matters."""

    OK = 0
    NOTE = 1  # worth knowing; nothing has to be done
    WARNING = 2  # costs speed or memory, or breaks something that not everybody uses
    PROBLEM = 3  # breaks a plain training run

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do, and where possible the command or setting that does it, ready to paste."""

    how: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: ``text`` is short, ``why`` explains, ``details`` lists."""

    level: Level
    topic: str
    name: str
    text: str
    why: str = ""
    details: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
