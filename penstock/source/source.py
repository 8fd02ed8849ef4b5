"""The contract of a source: samples by index, a name for each, and an identity of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.operation import Spec
from penstock.source.listing import Listing
from penstock.source.ranges import FileRanges

if TYPE_CHECKING:
    from penstock.source.objects.remote import RemoteObjects

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

    def will_need(self, indices: NDArray[np.int64]) -> None:
        """Say that these samples are read soon, so that storage can begin. May do nothing."""

    @property
    def objects(self) -> RemoteObjects | None:
        """The objects of a store that hold the samples, one each; ``None`` for other sources.

        They are fetched ahead of the workers, in the order of the batches.
        """
        return None

    def fields(self) -> dict[str | int, Spec] | Spec:
        """What is known of a sample before it is read, by field; ``None`` if nothing is known."""
        return None
