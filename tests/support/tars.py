"""Tar shards as other programs write them, made with Python's own module."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

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
