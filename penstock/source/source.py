"""What a source is: samples by index, each with a name, all with one identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from penstock.operation import Spec


class Source:
    """Samples by index.

    A source travels to worker processes by pickle: what cannot travel (open files) is dropped in
    ``__getstate__`` and opened again when first needed. ``read`` is called from several threads
    at once where ``threadsafe`` is true, and then spends its time outside the GIL.
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
        """What a person would call this sample: a path, a row of a file."""
        return f"sample {index}"

    def identity(self) -> str:
        """A fingerprint of the data: it changes when the data does, and at no other time."""
        raise NotImplementedError

    def fields(self) -> dict[str | int, Spec] | Spec:
        """What is known of a sample before it is read, by field; ``None`` is nothing."""
        return None
