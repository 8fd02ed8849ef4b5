"""MDS shards as MosaicML Streaming writes them, made from the format."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIXED = {"int": 8, "int64": 8, "float32": 4, "uint8": 1, "ndarray:float32:2,3": 24}


def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    samples: Sequence[Mapping[str, bytes]],
    per_shard: int,
) -> Path:
    """Write shards of encoded samples, and ``index.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [FIXED.get(encoding) for encoding in columns.values()]
    shards = []
    for number, first in enumerate(range(0, len(samples), per_shard)):
        part = samples[first : first + per_shard]
        name = f"shard.{number:05d}.mds"
        data = shard_bytes(columns, sizes, part)
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": sizes,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(part),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    write_index(folder, shards)
    return folder


def write_index(folder: Path, shards: list[dict[str, Any]]) -> None:
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def shard_bytes(
    columns: Mapping[str, str], sizes: Sequence[int | None], samples: Sequence[Mapping[str, bytes]]
) -> bytes:
    config = json.dumps({"column_names": list(columns)}).encode()
    bodies = []
    for sample in samples:
        values = [sample[name] for name in columns]
        head = b"".join(
            struct.pack("<I", len(v)) for v, size in zip(values, sizes, strict=True) if not size
        )
        bodies.append(head + b"".join(values))
    at = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [at]
    for body in bodies:
        at += len(body)
        offsets.append(at)
    return struct.pack(f"<{1 + len(offsets)}I", len(samples), *offsets) + config + b"".join(bodies)
