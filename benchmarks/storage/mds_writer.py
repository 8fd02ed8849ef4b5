"""Writes photographs as MDS shards, so that the benchmark needs no package of a peer for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = {"image": "bytes", "label": "int"}


def write_mds(folder: Path, samples: Iterable[tuple[bytes, int]], limit: int) -> None:
    """Write shards of about ``limit`` bytes, and ``index.json``."""
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    part: list[bytes] = []
    size = 0
    for content, label in samples:
        row = struct.pack("<I", len(content)) + content + struct.pack("<q", label)
        part.append(row)
        size += len(row)
        if size >= limit:
            shards.append(_write(folder, len(shards), part))
            part, size = [], 0
    if part:
        shards.append(_write(folder, len(shards), part))
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _write(folder: Path, number: int, rows: list[bytes]) -> dict[str, Any]:
    name = f"shard.{number:05d}.mds"
    columns: dict[str, Any] = {
        "column_encodings": list(COLUMNS.values()),
        "column_names": list(COLUMNS),
        "column_sizes": [None, 8],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    config = json.dumps(columns, sort_keys=True).encode()
    at = 4 + 4 * (len(rows) + 1) + len(config)
    offsets = [at]
    for row in rows:
        at += len(row)
        offsets.append(at)
    head = struct.pack(f"<{1 + len(offsets)}I", len(rows), *offsets) + config
    (folder / name).write_bytes(head + b"".join(rows))
    raw = {"basename": name, "bytes": at, "hashes": {}}
    return {**columns, "raw_data": raw, "samples": len(rows), "zip_data": None}
