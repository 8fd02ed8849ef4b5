"""The objects of a source by index: their URLs, sizes and versions, and the way to their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.fingerprint import fingerprint
from penstock.source.names import Names
from penstock.source.objects.connection import Fetcher
from penstock.source.objects.listing import look_up
from penstock.source.objects.protocol import UNKNOWN, FetchFailure, WantedObject


class RemoteObjects:
    """Objects of one store, by index.

    ``sizes`` and ``etags`` are ``None`` for objects that were named, not listed: they are asked for
    when the identity of the data is.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        paths: Names,
        sizes: NDArray[np.int64] | None = None,
        etags: Names | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._paths = paths
        self._sizes = sizes
        self._etags = etags

    def __len__(self) -> int:
        return len(self._paths)

    def url(self, index: int) -> str:
        return f"{self._fetcher.root}/{self._paths[index]}"

    def wanted(self, index: int) -> WantedObject:
        if self._sizes is None or self._etags is None:
            return WantedObject(self._paths[index])
        size, etag = self._sizes.item(index), self._etags[index]
        return WantedObject(self._paths[index], UNKNOWN, UNKNOWN, size, etag)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The contents of these objects. Raises SourceError."""
        return self._fetcher.read([self.wanted(index) for index in indices])

    def contents(self, indices: NDArray[np.int64]) -> list[Any]:
        """The contents of these objects; ``None`` for one that cannot be fetched."""
        wanted = [self.wanted(index) for index in indices.tolist()]
        found = self._fetcher.read(wanted, partial=True)
        return [None if isinstance(one, FetchFailure) else one for one in found]

    def expect(self, indices: Iterable[int]) -> None:
        """Fetch these objects ahead, in this order."""
        self._fetcher.expect([self.wanted(index) for index in indices])

    def forget(self) -> None:
        """Fetch nothing ahead of what was announced."""
        self._fetcher.forget()

    def peek(self) -> bytes:
        """The first object's content."""
        return self.read([0])[0]

    def identity(self) -> str:
        """A fingerprint of the paths, sizes and versions of all objects."""
        if self._sizes is None or self._etags is None:
            self._look_up()
        return fingerprint(("objects", self._fetcher.root, self._paths, self._sizes, self._etags))

    def _look_up(self) -> None:
        found = look_up([self._paths[i] for i in range(len(self))], self._fetcher)
        self._sizes, self._etags = found.sizes, found.etags

    def hold(self, samples: int) -> None:
        """These objects are samples of their own, which no order reads in sequence."""

    def stats(self) -> Any:
        """What the fetcher has done so far."""
        return self._fetcher.stats()
