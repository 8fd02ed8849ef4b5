"""Writes one tar shard and its indexes: all of it, or nothing under its name."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable

import numpy as np

from penstock.pack.members import Members
from penstock.source.manifest import PackedShard
from penstock.source.packed_folder import PackedFolder
from penstock.source.tar_index import (
    BLOCK,
    NUMBERS,
    IndexBuilder,
    as_number,
    dali_path,
    sidecar_path,
    write_dali,
    write_index,
)

_RECORD = 20 * BLOCK
"""Archives are padded to a multiple of it, as tar does."""


def write_shard(
    folder: PackedFolder, name: str, first: int, samples: Iterable[tuple[str, Members]]
) -> PackedShard:
    """Write samples, each with its key, and return what was written.

    The bytes depend on the samples only. The shard appears under its name as the last step, when
    its indexes are there.
    """
    builder = IndexBuilder(f"{folder.shown}/{name}")
    digest = hashlib.sha256()
    at, starts = 0, []
    with folder.writing(name) as part:
        with open(part, "wb", buffering=1 << 20) as file:

            def put(content: bytes) -> None:
                nonlocal at
                file.write(content)
                digest.update(content)
                at += len(content)

            for key, members in samples:
                starts.append(at)
                for extension, content in members.items():
                    member = f"{key}.{extension}"
                    put(header(member, len(content)))
                    is_number = extension.rpartition(".")[2] in NUMBERS
                    number = as_number(content) if is_number else None
                    builder.add(member, at, len(content), number)
                    put(content)
                    put(bytes(-at % BLOCK))
            end = at
            put(bytes(2 * BLOCK))
            put(bytes(-at % _RECORD))
            file.flush()
            os.fsync(file.fileno())
        index = builder.index()
        ours = io.BytesIO()
        write_index(ours, index)
        folder.put(sidecar_path(name), ours.getvalue())
        folder.put(dali_path(name), write_dali(index).encode())
        folder.put(f"{name}.idx", np.array([*starts, end], dtype="<u8").tobytes())
    return PackedShard(name, first, len(index), at, digest.hexdigest())


def header(name: str, size: int) -> bytes:
    """A tar header of a file; with an extended one before it if the name or size is too long."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= 100 and size < 8**11:
        return _block(encoded, size, b"0")
    record = b""
    for key, value in ((b"path", encoded), (b"size", str(size).encode())):
        record += _record(key, value)
    head = _block(b"PaxHeader", len(record), b"x") + record + bytes(-len(record) % BLOCK)
    return head + _block(encoded[:100], size if size < 8**11 else 0, b"0")


def _record(key: bytes, value: bytes) -> bytes:
    """A record of an extended header; its length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    block = bytearray(BLOCK)
    block[: len(name)] = name
    for start, width, number in ((100, 8, 0o644), (108, 8, 0), (116, 8, 0), (124, 12, size)):
        block[start : start + width] = b"%0*o\0" % (width - 1, number)
    block[136:148] = b"%011o\0" % 0  # the time: samples have none, and bytes must not depend on it
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
