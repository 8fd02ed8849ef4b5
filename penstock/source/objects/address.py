"""URLs of objects, taken apart: which store, and the path within it."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from penstock.errors import PipelineError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

BUCKETS = {"s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "adl", "http", "https", "memory"}
"""Schemes that obstore knows. All others are left to fsspec."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL.

    >>> is_url("s3://bucket/train"), is_url("/data/train"), is_url("C:/data")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(url: str) -> str | None:
    """The path of a ``file://`` URL; ``None`` for other URLs.

    >>> local_path("file:///data/a%20b"), local_path("s3://bucket/a")
    ('/data/a b', None)
    """
    parts = urlsplit(url)
    if parts.scheme.lower() != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise PipelineError(
            f"{url!r} names a file on the machine {parts.netloc}. Give a file of this machine: "
            "file:///path."
        )
    return unquote(parts.path)


class Address(NamedTuple):
    """A store and a path in it. ``root``: the URL of the store.

    >>> Address.of("s3://bucket/train/cats/")
    Address(root='s3://bucket', path='train/cats')
    >>> Address.of("https://example.org:8080/data").root
    'https://example.org:8080'
    """

    root: str
    path: str

    @classmethod
    def of(cls, url: str) -> Address:
        parts = urlsplit(url)
        if not parts.netloc and parts.scheme.lower() != "memory":
            raise PipelineError(
                f"{url!r} names no bucket or host. Give a URL such as s3://bucket/folder."
            )
        if parts.query or parts.fragment:
            raise PipelineError(
                f"{url!r} has a query or fragment ({parts.query or parts.fragment!r}), which "
                "names of objects cannot have. Leave it out; signed URLs are not supported."
            )
        return cls(f"{parts.scheme.lower()}://{parts.netloc}", parts.path.strip("/"))

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    @property
    def known(self) -> bool:
        """Whether obstore knows the scheme."""
        return self.scheme in BUCKETS

    def url(self, path: str) -> str:
        """The URL of an object in the same store."""
        return f"{self.root}/{path}"
