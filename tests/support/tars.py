"""Tar shards as other programs write them, made with Python's own module."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.source.ranges import LocalRanges
from penstock.source.source import Source

Sample = tuple[str, Mapping[str, bytes]]
"""The key of a sample, and its contents by extension."""


def write_tar(path: Path, samples: Iterable[Sample], *, format: int = tarfile.PAX_FORMAT) -> Path:
    """Write a shard."""
    with tarfile.open(path, "w", format=format) as archive:
        for key, contents in samples:
            for extension, content in contents.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def numbered(first: int, last: int) -> list[Sample]:
    """Samples with a text and a class: ("000007", {"txt": "text 7", "cls": "7"})."""
    return [
        (f"{i:06d}", {"txt": f"text {i}".encode(), "cls": str(i).encode()})
        for i in range(first, last)
    ]


def parts(source: Source) -> list[bytes]:
    """The bytes that the compiled kernel reads for each sample."""
    files = source.file_samples()
    assert files is not None
    assert files.ranges is not None
    places = [files.ranges.place(index) for index in range(len(source))]
    return [LocalRanges(path).read([part])[0] for path, part in places]
