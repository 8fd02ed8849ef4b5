"""The contract of a source: samples by index, a name for each, and an identity of the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.operation import Spec
from penstock.order import Order
from penstock.source.listing import Listing
from penstock.source.ranges import FileRanges

Numbers = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Returns the values of a field that holds numbers, for these indices."""


@dataclass(frozen=True)
class FileSamples:
    """Samples of which one field is the content of a file, and the other fields are numbers.

    - ``content_field``: that field: 0 in tuples, a key in dicts; ``None``: the sample is the bytes
      alone.
    - ``others``: the other fields, after it in a tuple; in a dict in the order of ``names``.
    - ``listing``: the files; ``None``: ``read`` returns their contents.
    - ``read``: the contents for these indices, without a copy; ``None``: one cannot be read.
    - ``peek``: the first bytes of one content, for files without names.
    - ``contents``: files that are in memory already, by index.
    - ``ranges``: in place of ``listing``, if the contents are parts of files.
    """

    listing: Listing | None
    content_field: str | int | None
    others: Mapping[str | int, Numbers] = field(default_factory=dict)
    names: Sequence[str] = ()
    read: Callable[[NDArray[np.int64]], list[Any]] | None = None
    peek: Callable[[], bytes] | None = None
    contents: Mapping[int, bytes] = field(default_factory=dict)
    ranges: FileRanges | None = None

    def kernel_paths(self) -> Any:
        """Where the compiled kernel finds the contents; ``None`` if ``read`` returns them."""
        files = self.ranges if self.listing is None else self.listing
        return None if files is None else files.kernel_paths()

    def content(self, sample: Any) -> Any:
        """The field of a sample that is the content of a file, or what was made of it."""
        return sample if self.content_field is None else sample[self.content_field]

    def samples(self, values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Samples with these values in place of the contents."""
        if self.content_field is None:
            return list(values)
        wanted = np.array(indices, dtype=np.int64)
        columns: dict[Any, Sequence[Any]] = {self.content_field: values}
        for name, numbers in self.others.items():
            columns[name] = numbers(wanted).tolist()
        if not self.names:
            return list(zip(*columns.values(), strict=True))
        rows = zip(*(columns[name] for name in self.names), strict=True)
        return [dict(zip(self.names, row, strict=True)) for row in rows]


class FetchedAhead(Protocol):
    """Samples of an object store, fetched ahead of the workers in the order of the batches."""

    def expect(self, indices: Iterable[int]) -> None:
        """Fetch these samples ahead, in this order, after those announced before."""

    def hold(self, samples: int) -> None:
        """An order keeps a window of this number of samples: make room for them."""

    def forget(self) -> None:
        """Samples that were announced are not needed any more."""

    def stats(self) -> Any:
        """What was fetched so far."""


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
    together: ClassVar[bool] = False
    """All samples of a batch are read by one call of ``read_together``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices, in this order."""
        raise NotImplementedError

    def origin(self) -> str:
        """Where the data is, for people: a folder, a file or a URL; empty if that is not known."""
        listing = self.listing
        if listing is None or not len(listing):
            return ""
        return os.path.commonpath([os.path.abspath(listing.path(i)) for i in listing.sample()])

    def read_together(self, indices: list[int]) -> Any:
        """All samples of a batch, in the form that its collate function takes."""
        return self.read(indices)

    def reader(self) -> Callable[[int], Any]:
        """A function that reads the sample at one index."""
        return lambda index: self.read([index])[0]

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

    @property
    def shards(self) -> NDArray[np.int64] | None:
        """The number of samples in each shard, in order; ``None``: it has no shards.

        Samples of a shard are stored one after the other, so that reading them in their order is
        faster than at random. ``Reservoir`` needs it.
        """
        return None

    def ordered(self, order: Order) -> Order:
        """The order in which a loader asks for samples, given the order that the user chose."""
        over = getattr(order, "over", None)
        return order if over is None else over(self.shards, type(self).__name__)

    @property
    def parts(self) -> Mapping[str, Any] | None:
        """What decides the shares of the parts of a mix, for checkpoints; ``None``: no mix."""
        return None

    def will_need(self, indices: NDArray[np.int64]) -> None:
        """Say that these samples are read soon, so that storage can begin. May do nothing."""

    @property
    def objects(self) -> FetchedAhead | None:
        """Fetches samples of an object store ahead of the workers; ``None`` for other sources."""
        return None

    def fields(self) -> dict[str | int, Spec] | Spec:
        """What is known of a sample before it is read, by field; ``None`` if nothing is known."""
        return None
