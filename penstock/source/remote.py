"""Sources whose samples are objects of a bucket or files of a web server, by URL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.files import compact_labels
from penstock.source.folder import IMAGE_EXTENSIONS, Folder
from penstock.source.names import Names
from penstock.source.objects.address import Address
from penstock.source.objects.connection import Fetcher
from penstock.source.objects.listing import ObjectTree, list_objects
from penstock.source.objects.protocol import StorageOptions
from penstock.source.objects.remote import RemoteObjects
from penstock.source.source import FileSamples, Source


class RemoteFolderSource(Folder):
    """The objects below a URL. Samples, classes and their order are those of a local folder.

    ``storage``: settings of the store that the environment does not give. ``version``: a name for
    the state of the bucket, which is then listed only once.
    """

    def __init__(
        self,
        url: str,
        classes: Literal["auto"] | bool = "auto",
        extensions: str | Sequence[str] | None = IMAGE_EXTENSIONS,
        storage: StorageOptions | None = None,
        version: str | None = None,
    ) -> None:
        address = Address.of(url)
        self.root = address.url(address.path).rstrip("/")
        fetcher = Fetcher(address.root, storage or {})
        found = list_objects(address, fetcher, version)
        if not len(found):
            raise SourceError(
                f"There is no object below {self.root}/. Check the URL, and that the credentials "
                "of this environment may list it."
            )
        tree = ObjectTree(found)
        self._scan(tree.list, classes, extensions)
        start = len(self.root) + 1
        paths = [self._paths.path(index)[start:] for index in range(len(self))]
        places = np.array([tree.places[path] for path in paths], np.int64)
        above = f"{address.path}/" if address.path else ""
        self._objects = RemoteObjects(
            fetcher,
            Names(above + path for path in paths),
            found.sizes[places],
            Names(found.etags[place] for place in places.tolist()),
        )

    def read(self, indices: Sequence[int]) -> list[Any]:
        return self._with_labels(self._objects.read(indices), indices)

    @property
    def objects(self) -> RemoteObjects:
        return self._objects

    def identity(self) -> str:
        return fingerprint((self.identify(None), self._objects.identity()))

    def file_samples(self) -> FileSamples | None:
        return _samples(self._objects, self._content_field, self._numbers)


class RemoteFilesSource(Source):
    """Objects of one store, named by their URLs. A sample is ``bytes`` or ``(bytes, label)``."""

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self,
        urls: Sequence[str],
        labels: Sequence[Any] | NDArray[Any] | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        if labels is not None and len(labels) != len(urls):
            raise PipelineError(
                f"There are {len(urls)} URLs and {len(labels)} labels; give one label for each URL."
            )
        root = Address.of(urls[0]).root
        self._objects = RemoteObjects(Fetcher(root, storage or {}), Names(_paths(urls, root)))
        self._labels = None if labels is None else compact_labels(labels)

    def __len__(self) -> int:
        return len(self._objects)

    def read(self, indices: Sequence[int]) -> list[Any]:
        contents = self._objects.read(indices)
        labels = self._labels
        if labels is None:
            return contents
        if isinstance(labels, np.ndarray):
            chosen = labels.take(np.array(indices, np.int64)).tolist()
        else:
            chosen = [labels[index] for index in indices]
        return list(zip(contents, chosen, strict=True))

    def name(self, index: int) -> str:
        return self._objects.url(index)

    @property
    def objects(self) -> RemoteObjects:
        return self._objects

    def identity(self) -> str:
        return fingerprint(("urls", self._objects.identity(), self._labels))

    def file_samples(self) -> FileSamples | None:
        labels = self._labels
        if labels is None:
            return _samples(self._objects, None, {})
        if not isinstance(labels, np.ndarray):
            return None
        return _samples(self._objects, 0, {1: labels.take})

    def fields(self) -> dict[str | int, Spec] | Spec:
        labels = self._labels
        if labels is None:
            return BytesSpec()
        known = isinstance(labels, np.ndarray)
        return {0: BytesSpec(), 1: ArraySpec.of((), labels.dtype) if known else None}  # type: ignore[union-attr]


def _paths(urls: Sequence[str], root: str) -> Iterator[str]:
    for url in urls:
        address = Address.of(url)
        if address.root != root:
            raise PipelineError(
                f"the files are in several stores, {root} and {address.root}. Make one pipeline "
                "for each store."
            )
        yield address.path


def _samples(objects: RemoteObjects, field: int | None, others: Any) -> FileSamples:
    return FileSamples(None, field, others, read=objects.contents, peek=objects.peek)
