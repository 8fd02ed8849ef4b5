"""Arrow tables and Hugging Face datasets: values, selections, identity, pickling, refusals."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec
from penstock.source.arrow import ArrowSource

pa = pytest.importorskip("pyarrow")

N = 11


def table(start: int = 0) -> Any:
    """Rows in three batches; the first column as Hugging Face stores images."""
    rows = range(start, start + N)
    made = pa.table(
        {
            "image": [{"bytes": b"%d" % i, "path": None} for i in rows],
            "label": [i % 3 for i in rows],
            "text": [f"t{i}" for i in rows],
        }
    )
    return pa.concat_tables([made.slice(0, 4), made.slice(4, 5), made.slice(9)])


def row(index: int) -> dict[str, Any]:
    return {"image": b"%d" % index, "label": index % 3, "text": f"t{index}"}


def test_rows_are_dicts_and_files_are_their_bytes() -> None:
    source = ArrowSource(table())
    assert source.read([9, 0, 4, 9]) == [row(9), row(0), row(4), row(9)]
    assert len(source) == N
    assert source.fields() == {
        "image": BytesSpec(),
        "label": ArraySpec.of((), np.int64),
        "text": None,
    }
    assert source.name(3) == "row 3 of the table"
    assert source.shards is not None
    assert source.shards.tolist() == [4, 5, 2]
    with pytest.raises(IndexError, match="row 11 is out of range: there are 11 rows"):
        source.read([11])
    again = pickle.loads(pickle.dumps(source))
    assert again.read([5]) == [row(5)]
    assert again.identity() == source.identity() != ArrowSource(table(1)).identity()
    assert ArrowSource(table(), ["label"]).identity() != source.identity()
    versions = [ArrowSource(table(i), version="1").identity() for i in range(2)]
    assert versions[0] == versions[1]


def test_a_column_of_files_and_numbers_goes_to_the_kernel_without_a_copy() -> None:
    source = ArrowSource(table(), ["image", "label"])
    files = source.file_samples()
    assert files is not None
    assert files.read is not None
    views = files.read(np.array([10, 2]))
    assert [bytes(view) for view in views] == [b"10", b"2"]
    assert all(isinstance(view, memoryview) for view in views)
    assert files.others["label"](np.array([10, 2])).tolist() == [1, 2]
    assert files.peek is not None
    assert files.peek() == b"0"
    assert ArrowSource(table()).file_samples() is None  # text is neither


def test_a_reservoir_reads_the_batches_of_a_table_in_sequence() -> None:
    pipeline = ps.from_arrow(table(), columns=["label", "text"]).batch(4)
    with pipeline.loader(workers=0, order=ps.Reservoir(window=5)) as loader:
        seen = [text for batch in loader for text in batch["text"]]
    assert sorted(seen) == sorted(f"t{i}" for i in range(N))


def test_rows_without_bytes_are_named() -> None:
    made = pa.table(
        {"image": [{"bytes": b"a", "path": None}, {"bytes": None, "path": "b.png"}, None]}
    )
    source = ArrowSource(made)
    assert source.fields() == {"image": None}
    assert source.file_samples() is None
    assert source.read([0, 2]) == [{"image": b"a"}, {"image": None}]
    with pytest.raises(SourceError, match=r"row 1 of the table has the path 'b.png' and no bytes"):
        source.read([1])


def test_wrong_arguments_are_refused() -> None:
    for given, message in (
        ([1, 2], r"from_arrow\(\) got a list; give a pyarrow.Table or a Dataset"),
        (table().to_batches()[0], "got a RecordBatch"),
    ):
        with pytest.raises(PipelineError, match=message):
            ps.from_arrow(given)
    with pytest.raises(PipelineError, match=r"the table has no column 'nix'. The columns of the"):
        ps.from_arrow(table(), columns=["nix"])
    with pytest.raises(SourceError, match="The table is empty"):
        ps.from_arrow(table().slice(0, 0))


def test_a_dataset_of_hugging_face_with_what_was_selected() -> None:
    datasets = pytest.importorskip("datasets")
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(num_classes=3),
        "text": datasets.Value("string"),
    }
    data = datasets.Dataset.from_dict(table().to_pydict(), features=datasets.Features(features))
    source = ArrowSource(data)
    assert source.read([7]) == [row(7)]
    chosen = data.shuffle(seed=1).select([3, 0, 2])
    picked = pickle.loads(pickle.dumps(ArrowSource(chosen)))
    texts = chosen.remove_columns("image")["text"]
    assert [one["text"] for one in picked.read([0, 1, 2])] == list(texts)
    assert picked.shards is None
    assert picked.identity() != source.identity()
    numbers = ArrowSource(chosen, ["image", "label"]).file_samples()
    assert numbers is not None
    assert numbers.others["label"](np.arange(3)).tolist() == [int(t[1:]) % 3 for t in texts]
    with pytest.raises(PipelineError, match="a Dataset with a transform"):
        ps.from_arrow(data.with_transform(lambda batch: batch))
    with pytest.raises(PipelineError, match=r"got a DatasetDict.*one split of it, such as 'train'"):
        ps.from_arrow(datasets.DatasetDict({"train": data}))
    with pytest.raises(PipelineError, match="got a IterableDataset"):
        ps.from_arrow(data.to_iterable_dataset())
