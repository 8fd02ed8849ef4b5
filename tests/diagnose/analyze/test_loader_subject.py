"""What an analysis of Penstock's own loader reads, and what it counts as preparation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.loader import Loader
from penstock.pipeline import from_dataset


class Samples:
    """A dataset with code of its own."""

    def __init__(self, paths: list[str] | None = None) -> None:
        self.reads = 0
        if paths:
            self.samples = paths

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return np.full(4, index)


@pytest.fixture
def dataset() -> Samples:
    return Samples()


def loader_of(dataset: Any, cache: int = 0) -> Loader:
    pipeline = from_dataset(dataset, version="1", random=False)
    if cache:
        pipeline = pipeline.cache(cache)
    return pipeline.batch(8).loader(workers=0, seed=0)


def taken(batches: Iterator[Any] | None, count: int) -> None:
    assert batches is not None
    with closing(batches):  # type: ignore[type-var]
        for _ in islice(batches, count):
            pass


def test_the_code_of_a_dataset_counts_as_preparation(dataset: Samples) -> None:
    # Its sleeps were said to be slow storage, and "memory serves 71 % of the present reads".
    with loader_of(dataset) as loader:
        subject = LoaderSubject(loader)
        subject.choose_samples()
        before = dataset.reads
        taken(subject.cached(), 3)
        assert dataset.reads >= before + 24
        assert subject.prep_includes_reading
        assert subject.cold() is None
        assert subject.reading(1, cold=True) is None
        assert any("fetch counts as prep" in note for note in subject.notes)
        assert any(row.kind == "source" for row in subject.operations())


def test_files_that_a_dataset_names_can_still_be_cold(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.bin") for number in range(64)]
    for path in paths:
        Path(path).write_bytes(bytes(100))
    with loader_of(Samples(paths)) as loader:
        subject = LoaderSubject(loader)
        subject.choose_samples()
        assert subject.setup.sample_bytes == 100
        taken(subject.cold(), 2)
        reads = subject.reading(1, cold=False)
        assert reads is not None
        assert next(reads) == 100
        assert not subject.notes


def test_what_a_cache_above_the_dataset_holds_is_fetched(dataset: Samples) -> None:
    with loader_of(dataset, cache=10**6) as loader:
        subject = LoaderSubject(loader)
        subject.choose_samples()
        before = dataset.reads
        taken(subject.cached(), 3)
        assert dataset.reads == before
        assert not subject.prep_includes_reading
