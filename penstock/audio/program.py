"""Audio operations as one program of the compiled kernel, which runs them without Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.stops.stop import KernelWork

(
    DECODE,
    RESAMPLE_TO,
    RANDOM_PLACE,
    FIXED_PLACE,
    PAD_ONLY,
    MIX,
    GAIN,
    NORMALIZE,
    MEL,
    MASK,
) = range(10)
"""The kinds of steps, as in ``native/sound/program.h``."""

_MOST_STEPS = 16

_SUFFIXES = (".wav", ".wave", ".flac")
"""Files that the kernel decodes. It leaves other files to Python, in threads that hold the GIL;
worker processes decode such files faster."""


class SoundStep(NamedTuple):
    """An operation as the compiled kernel runs it.

    ``key`` is that of ``Keyed``. ``numbers``: the parameters, by kind as in ``read_numbers`` of
    ``native/sound_types.h``. ``tables``: those of a mel spectrogram.
    """

    kind: int
    key: bytes
    numbers: tuple[Any, ...]
    tables: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SoundWork(KernelWork):
    """Audio operations in the order in which they stand."""

    steps: tuple[SoundStep, ...]

    def joined(self, below: KernelWork) -> SoundWork | None:
        if not isinstance(below, SoundWork) or below.reads_files:
            return None
        steps = (*self.steps, *below.steps)
        return SoundWork(steps) if len(steps) <= _MOST_STEPS else None

    @property
    def reads_files(self) -> bool:
        return self.steps[0].kind == DECODE

    @property
    def fills_rows(self) -> bool:
        # All rows have one length, which only a crop gives to clips of other lengths. Clips that
        # were kept have been cropped above, or differ in length and cannot be stacked anyway.
        cropped = any(step.kind in (RANDOM_PLACE, FIXED_PLACE) for step in self.steps)
        return cropped or not self.reads_files

    @property
    def makes_input(self) -> bool:
        return True

    def fits(self, column: NDArray[Any]) -> bool:
        return column.ndim in (3, 4) and column.dtype == np.float32 and column.flags.c_contiguous

    def suits(self, name: str, peek: Callable[[], bytes] | None) -> bool:
        if peek is not None:
            return peek()[:4] in (b"RIFF", b"fLaC")
        return name.lower().endswith(_SUFFIXES)

    def program(self) -> Any:
        return native.kernel().SoundProgram(self.steps)


def one_step(
    kind: int, key: bytes, numbers: tuple[Any, ...], tables: tuple[Any, ...] = ()
) -> SoundWork:
    """The work of one operation."""
    return SoundWork((SoundStep(kind, key, numbers, tables),))
