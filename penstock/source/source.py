"""The contract of a source: samples by index, a name for each, and an identity of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.operation import Spec


class Source:
    """Samples by index.

    A source is sent to worker processes by pickle. What cannot be pickled (open files) is dropped
    in ``__getstate__`` and opened again when it is first needed. ``threadsafe``: several threads
    may call ``read`` at once, and it spends its time without the GIL.
    """

    threadsafe: ClassVar[bool] = False
    indexed: ClassVar[bool] = True
    """Samples can be asked for by index. A stream's cannot."""
    runs_user_code: ClassVar[bool] = True
    """Reading may run code that is not Penstock's, and so open files by relative paths."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices, in this order."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """A name for the sample that users recognise: a path, or a row of a file."""
        return f"sample {index}"

    def identity(self) -> str:
        """A fingerprint of the data. It changes if and only if the data changes."""
        raise NotImplementedError

    def fields(self) -> dict[str | int, Spec] | Spec:
        """What is known of a sample before it is read, by field; ``None`` if nothing is known."""
        return None
