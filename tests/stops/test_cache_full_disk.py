"""Caches on a full disk: a miss and one warning, and training goes on with the right samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps

SAMPLES = 60
NBYTES = 100_000


def block(value: Any) -> Any:
    return np.full(NBYTES, value, np.uint8)


def run(where: Path, **workers: Any) -> tuple[int, int]:
    """Hits and admitted samples of two epochs."""
    pipeline = (
        ps.from_dataset(np.arange(SAMPLES), random=False, version="1")
        .map(block, random=False, version="1")
        .cache("1GB", where=str(where))
        .batch(10)
    )
    with pipeline.loader(seed=0, **workers) as loader:
        for _ in range(2):
            seen = [row for batch in loader for row in batch]
            assert sorted(int(row[0]) for row in seen) == list(range(SAMPLES))
            assert all((row == row[0]).all() for row in seen)
        cache = loader.stats().caches[0]
        return cache.hits, cache.admitted


@pytest.mark.parametrize("filled", [False, True])
def test_threads_train_on_with_a_full_disk(tiny_disk: Path, filled: bool) -> None:
    if filled:
        with pytest.raises(OSError, match="No space"):
            (tiny_disk / "filler").write_bytes(bytes(4_000_000))
    with pytest.warns(RuntimeWarning, match="No space left") as found:
        hits, admitted = run(tiny_disk / "kept", workers=2, kind="threads")
    assert len(found) == 1
    assert (0 < admitted < 20 and hits >= admitted) or (filled and hits == admitted == 0)


@pytest.mark.parametrize("filled", [False, True])
def test_processes_train_on_with_a_full_disk(tiny_disk: Path, filled: bool) -> None:
    if filled:
        with pytest.raises(OSError, match="No space"):
            (tiny_disk / "filler").write_bytes(bytes(4_000_000))
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert run(tiny_disk / "kept", workers=2, kind="processes") == (0, 0)
    else:
        # The workers give the warning, each in its own process.
        hits, admitted = run(tiny_disk / "kept", workers=2, kind="processes")
        assert 0 < admitted < 20
        assert hits >= admitted
