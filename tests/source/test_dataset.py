"""Datasets of other libraries, and other objects with __len__ and __getitem__."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from penstock.errors import FingerprintError, PipelineError, SourceError
from penstock.source import DatasetSource, FilesSource, FolderSource


class Squares:
    def __init__(self, count: int, power: int = 2) -> None:
        self.count = count
        self.power = power

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return int(index**self.power)


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


def test_samples_come_from_getitem_with_plain_integers() -> None:
    source = DatasetSource(Squares(10))
    assert len(source) == 10
    assert source.read(np.array([3, 1, 3])) == [9, 1, 9]  # type: ignore[arg-type]
    assert source.fields() is None
    assert source.name(3) == "sample 3 of Squares"


def test_getitems_is_used_if_the_dataset_has_it() -> None:
    assert DatasetSource(Batched(10)).read([3, 1]) == [-3, -1]


def test_getitems_must_return_a_sample_for_each_index() -> None:
    class Short(Squares):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [0]

    with pytest.raises(SourceError, match="returned 1 samples for 2 indices"):
        DatasetSource(Short(10)).read([3, 1])


def test_lists_tuples_and_arrays_are_datasets_that_threads_may_share() -> None:
    for dataset in (["a", "b"], ("a", "b"), np.array(["a", "b"])):
        source = DatasetSource(dataset)
        assert source.read([1, 0]) == ["b", "a"]
        assert source.threadsafe is True
    rows = DatasetSource(np.arange(6).reshape(3, 2)).read([2])
    assert rows[0].tolist() == [4, 5]
    assert DatasetSource(Squares(1)).threadsafe is False
    safe = DatasetSource(Squares(1), threadsafe=True)
    assert safe.threadsafe is True
    assert cloudpickle.loads(cloudpickle.dumps(safe)).threadsafe is True
    assert DatasetSource.threadsafe is False


def test_torch_datasets_are_read() -> None:
    data = pytest.importorskip("torch.utils.data")
    import torch

    pairs = data.TensorDataset(torch.arange(6).float(), torch.arange(6))
    source = DatasetSource(pairs)
    assert [(float(x), int(y)) for x, y in source.read([4, 2])] == [(4.0, 4), (2.0, 2)]
    assert DatasetSource(data.Subset(Squares(10), [5, 6])).read([1]) == [36]
    other = data.TensorDataset(torch.arange(6).float(), torch.arange(6) + 1)
    assert source.identity() != DatasetSource(other).identity()


def test_the_identity_depends_on_the_whole_state() -> None:
    first = DatasetSource(Squares(10)).identity()
    assert first == DatasetSource(Squares(10)).identity()
    other = {
        DatasetSource(Squares(11)).identity(),
        DatasetSource(Squares(10, 3)).identity(),
        DatasetSource(Batched(10)).identity(),
        DatasetSource([0, 1]).identity(),
        DatasetSource((0, 1)).identity(),
    }
    assert len(other | {first}) == 6


def test_a_version_replaces_the_fingerprint_of_the_data() -> None:
    dataset = Squares(10)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(FingerprintError, match="attribute 'lock' of a Squares"):
        DatasetSource(dataset).identity()
    assert DatasetSource(dataset, "1").identity() == DatasetSource(dataset, "1").identity()
    assert DatasetSource(dataset, "1").identity() != DatasetSource(dataset, "2").identity()
    # Other data with the same version: their samples must not be mixed.
    assert DatasetSource(Squares(11), "1").identity() != DatasetSource(dataset, "1").identity()


def test_samples_of_an_image_folder_are_named_by_their_files() -> None:
    dataset = Squares(2)
    dataset.samples = [("a/1.jpg", 0), ("b/2.jpg", 1)]  # type: ignore[attr-defined]
    assert DatasetSource(dataset).name(1) == "b/2.jpg"
    dataset.samples = [1.0, 2.0]  # type: ignore[attr-defined]
    assert DatasetSource(dataset).name(1) == "sample 1 of Squares"


def test_an_object_that_cannot_be_read_by_index_is_refused_with_the_remedy() -> None:
    class Lengthless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(PipelineError, match=r"a Lengthless, has no __len__\. .*needs __len__\(\)"):
        DatasetSource(Lengthless())
    with pytest.raises(PipelineError, match="has no __len__ and no __getitem__"):
        DatasetSource(3)
    with pytest.raises(PipelineError, match=r"a generator, can be iterated but not .* stream"):
        DatasetSource(i for i in range(3))
    with pytest.raises(PipelineError, match=r"read by key.*list\(d\.values\(\)\)"):
        DatasetSource({"train": [1]})
    with pytest.raises(PipelineError, match=r"give an instance: Squares\(\)"):
        DatasetSource(Squares)
    with pytest.raises(PipelineError, match="not its name"):
        DatasetSource("mnist")
    with pytest.raises(SourceError, match="The list is empty"):
        DatasetSource([])


def test_a_torch_iterable_dataset_is_refused_with_a_hint_at_streams() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    with pytest.raises(PipelineError, match="stream"):
        DatasetSource(Stream())


def test_hugging_face_datasets_are_identified_by_their_own_fingerprint() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    source = DatasetSource(data)
    assert source.read([2, 0]) == [{"x": 3, "y": "c"}, {"x": 1, "y": "a"}]
    again = datasets.Dataset.from_dict({"x": [1, 2, 3], "y": ["a", "b", "c"]})
    assert DatasetSource(again).identity() == source.identity()
    assert DatasetSource(data.select([0, 1])).identity() != source.identity()
    with pytest.raises(PipelineError, match="one of the splits"):
        DatasetSource(datasets.DatasetDict(train=data))
    with pytest.raises(PipelineError, match="stream"):
        DatasetSource(data.to_iterable_dataset())


def test_sources_can_be_pickled_and_read_in_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in ("cat/a.jpg", "dog/b.jpg"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(name.encode())
    sources = [
        FolderSource(folder),
        FilesSource([folder / "dog/b.jpg", folder / "cat/a.jpg"], labels=[5, 6]),
        DatasetSource([("x", 1), ("y", 2)]),
        DatasetSource(np.arange(4.0)),
    ]
    (tmp_path / "sources.pickle").write_bytes(cloudpickle.dumps(sources))
    code = (
        "import pickle, sys\n"
        "for source in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    print(source.read([1, 0]), source.name(1), source.identity(), source.threadsafe)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "sources.pickle")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{s.read([1, 0])} {s.name(1)} {s.identity()} {s.threadsafe}" for s in sources
    ]
