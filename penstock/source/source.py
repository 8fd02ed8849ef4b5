"""The contract of a source: samples by index, a name for each, and an identity of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.operation import Spec
from penstock.source.listing import Listing


@dataclass(frozen=True)
class FileSamples:
    """Samples that are the contents of files: bytes, or ``(bytes, label)``.

    ``labels`` returns the labels of these indices; ``None``: samples have none. ``contents``: files
    that are in memory already, by index.
    """

    listing: Listing
    labels: Callable[[NDArray[np.int64]], NDArray[Any]] | None
    contents: Mapping[int, bytes] = field(default_factory=dict)


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
        """A fingerprint of the data. It changes if and only if the data changes.

        A source of files with a ``listing`` inherits this method: the data is identified by the
        names, sizes and modification times of all files, which are asked for in this call.
        """
        listing = self.listing
        if listing is None:
            raise NotImplementedError
        return self.identify(listing.all_stats())

    @property
    def listing(self) -> Listing | None:
        """The files that hold the data; ``None`` if ``identity`` is all that is known of it.

        With a listing, checkpoints do not call ``identity``: see ``DataIdentity``.
        """
        return None

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        """A fingerprint of the listing and these stats of its files; ``None``: of the names."""
        raise NotImplementedError

    def file_samples(self) -> FileSamples | None:
        """The files, if each sample is one; the compiled kernel then reads them by itself."""
        return None

    def fields(self) -> dict[str | int, Spec] | Spec:
        """What is known of a sample before it is read, by field; ``None`` if nothing is known."""
        return None
