"""A job whose files differ from those of the group is refused, and waits for their identity."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PipelineError
from penstock.node.directory import NodeDirectory
from penstock.source import listing as listings


def length(data: bytes) -> int:
    return len(data)


def test_a_job_with_a_changed_file_is_refused(
    node_directory: NodeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the stats of all files show the change.
    monkeypatch.setattr(listings, "SAMPLE", 4)
    paths = [tmp_path / f"{number:02}.bin" for number in range(20)]
    for path in paths:
        path.write_bytes(b"x")
    pipeline = ps.from_files(paths).map(length, random=False).batch(4)
    listing = pipeline.source.listing
    assert listing is not None
    unsampled = next(index for index in range(20) if index not in listing.sample())
    with pipeline.loader(share="a") as loader:
        next(iter(loader))
        with pipeline.loader(share="a") as same:
            next(iter(same))
        paths[unsampled].write_bytes(b"another content")
        with (
            pipeline.loader(share="a") as other,
            pytest.raises(PipelineError, match="the data is not the same"),
        ):
            next(iter(other))
