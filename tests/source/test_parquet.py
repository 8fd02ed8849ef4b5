"""Parquet: rows by index across files and row groups, each group decoded once."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec
from penstock.source.parquet import ParquetSource, RecentGroups

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, Any], group: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def numbered(path: Path, start: int, count: int, group: int = 4) -> Path:
    rows = range(start, start + count)
    data = pa.array([b"%d" % i for i in rows], pa.binary())
    return write(path, {"data": data, "label": pa.array(rows, pa.int64())}, group)


def counted(source: ParquetSource) -> list[int]:
    """The row groups that are decoded after this call, in order."""
    decoded: list[int] = []
    decode = source._decode

    def count(group: int) -> Any:
        decoded.append(group)
        return decode(group)

    source._decode = count  # type: ignore[method-assign]
    return decoded


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_are_read_in_any_order_across_files_and_row_groups(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("rows")
    start = 0
    for place, count in enumerate(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))):
        numbered(root / f"{place}.parquet", start, count, data.draw(st.integers(1, 5)))
        start += count
    if not start:
        with pytest.raises(SourceError, match="has no rows"):
            ParquetSource(root)
        return
    keeps: list[int | str] = [0, "1GB"]
    keep = data.draw(st.sampled_from(keeps))
    source = ParquetSource(root, keep=keep)
    indices = data.draw(st.lists(st.integers(0, start - 1), max_size=20))
    assert len(source) == start
    assert source.read(indices) == [{"data": b"%d" % i, "label": i} for i in indices]


def test_values_are_python_objects_and_arrays(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        {
            "bytes": pa.array([b"a", None, b""]),
            "fixed": pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
            "text": pa.array(["é", "", None]),
            "int8": pa.array([1, -2, 3], pa.int8()),
            "int64": pa.array([2**62 + 1, None, -1]),
            "float": pa.array([0.5, None, 2.0], pa.float32()),
            "flag": pa.array([True, None, False]),
            "lists": pa.array([[1, 2], [], None], pa.list_(pa.int16())),
            "vector": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
            "holes": pa.array([[1, None], [2], [3]]),
            "words": pa.array([["a"], [], ["b", "c"]]),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "struct": pa.array([{"a": 1, "b": "c"}] * 3),
        },
    )
    rows = ParquetSource(path).read([0, 1, 2])
    assert [row["bytes"] for row in rows] == [b"a", None, b""]
    assert [row["fixed"] for row in rows] == [b"ab", b"cd", b"ef"]
    assert [row["text"] for row in rows] == ["é", "", None]
    assert [row["int8"] for row in rows] == [1, -2, 3]
    assert [row["int64"] for row in rows] == [2**62 + 1, None, -1]
    assert [row["float"] for row in rows] == [0.5, None, 2.0]
    assert [row["flag"] for row in rows] == [True, None, False]
    assert [row["holes"] for row in rows] == [[1, None], [2], [3]]
    assert [row["words"] for row in rows] == [["a"], [], ["b", "c"]]
    assert [row["kind"] for row in rows] == ["x", "y", "x"]
    assert rows[0]["struct"] == {"a": 1, "b": "c"}
    plain = {name: type(value) for name, value in rows[0].items()}
    assert plain["int8"] is int
    assert plain["float"] is float
    assert plain["flag"] is bool
    assert rows[0]["lists"].dtype == np.int16
    assert rows[0]["lists"].tolist() == [1, 2]
    assert rows[1]["lists"].tolist() == []
    assert rows[2]["lists"] is None
    assert rows[2]["vector"].dtype == np.float32
    assert rows[2]["vector"].tolist() == [1.0, 2.0]


def test_changing_a_sample_changes_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"v": pa.array([[1, 2]] * 3, pa.list_(pa.int64(), 2))})
    source = ParquetSource(path)
    source.read([1])[0]["v"][:] = 9
    assert source.read([1])[0]["v"].tolist() == [1, 2]


def test_images_as_hugging_face_stores_them_are_bytes(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = [{"bytes": b"one", "path": None}, {"bytes": b"two", "path": "2.jpg"}]
    whole = write(tmp_path / "whole.parquet", {"image": pa.array(images, kind), "label": [1, 2]})
    source = ParquetSource(whole)
    assert source.read([1, 0]) == [{"image": b"two", "label": 2}, {"image": b"one", "label": 1}]
    assert source.fields() == {"image": BytesSpec(), "label": ArraySpec.of((), "int64")}

    images += [{"bytes": None, "path": "3.jpg"}, None]
    partly = write(tmp_path / "partly.parquet", {"image": pa.array(images, kind)})
    source = ParquetSource(partly)
    assert source.read([1, 3]) == [{"image": b"two"}, {"image": None}]
    assert source.fields() == {"image": None}
    with pytest.raises(SourceError, match=r"row 2 of .*partly.parquet has the path '3.jpg' and"):
        source.read([2])


def test_fields_follow_from_the_schema(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        {
            "bytes": [b"a", b"b"],
            "int": pa.array([1, 2], pa.int8()),
            "huge": pa.array([1, 2], pa.uint64()),
            "float": pa.array([1, 2], pa.float32()),
            "text": ["a", "b"],
            "null": [1, None],
            "vector": pa.array([[1, 2, 3]] * 2, pa.list_(pa.uint8(), 3)),
            "list": pa.array([[1, 2, 3], [1]], pa.list_(pa.uint8())),
        },
        group=1,
    )
    assert ParquetSource(path).fields() == {
        "bytes": BytesSpec(),
        "int": ArraySpec.of((), "int64"),
        "huge": None,
        "float": ArraySpec.of((), "float64"),
        "text": None,
        "null": None,
        "vector": ArraySpec.of((3,), "uint8"),
        "list": ArraySpec.of((None,), "uint8"),
    }


def test_columns_are_chosen_and_unknown_ones_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.parquet", 0, 3)
    assert ParquetSource(path, columns=["label"]).read([2]) == [{"label": 2}]
    assert list(ParquetSource(path, columns=["label", "data"]).read([2])[0]) == ["label", "data"]
    with pytest.raises(
        PipelineError, match=r"no column 'image'\. The columns of .* are: data, label"
    ):
        ParquetSource(path, columns=["image"])
    with pytest.raises(PipelineError, match="columns is empty; name at least one"):
        ParquetSource(path, columns=[])


def test_files_folders_patterns_and_lists_are_found(tmp_path: Path) -> None:
    numbered(tmp_path / "x/b.parquet", 2, 2)
    numbered(tmp_path / "x/a.parquet", 0, 2)
    numbered(tmp_path / "x/deep/c.parquet", 4, 2)
    numbered(tmp_path / "x/_temporary/d.parquet", 6, 2)
    numbered(tmp_path / "odd[1].parquet", 8, 2)

    def labels(paths: Any) -> list[int]:
        source = ParquetSource(paths)
        return [row["label"] for row in source.read(range(len(source)))]

    assert labels(tmp_path / "x") == [0, 1, 2, 3, 4, 5]
    assert labels(str(tmp_path / "x/*.parquet")) == [0, 1, 2, 3]
    assert labels(tmp_path / "odd[1].parquet") == [8, 9]
    assert labels([tmp_path / "x/b.parquet", tmp_path / "x/a.parquet"]) == [2, 3, 0, 1]
    missing: list[Any] = [tmp_path / "none.parquet", str(tmp_path / "*.csv"), []]
    for nothing in missing:
        with pytest.raises(SourceError, match=r"Check the path|at least one path"):
            ParquetSource(nothing)


def test_a_name_is_a_row_of_a_file(tmp_path: Path) -> None:
    first = numbered(tmp_path / "a.parquet", 0, 9)
    second = numbered(tmp_path / "b.parquet", 9, 9)
    source = ParquetSource([first, second])
    assert source.name(8) == f"row 8 of {first}"
    assert source.name(9) == f"row 0 of {second}"
    assert source.name(17) == f"row 8 of {second}"
    for wrong in (-1, 18):
        with pytest.raises(IndexError):
            source.read([wrong])


def test_files_of_different_schemas_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"label": [1], "same": [1]})
    write(tmp_path / "b.parquet", {"label": ["x"], "same": [2]})
    write(tmp_path / "c.parquet", {"same": [3]})
    with pytest.raises(SourceError, match=r"Column 'label' is string in .*b.parquet and int64 in"):
        ParquetSource([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    with pytest.raises(SourceError, match=r"Column 'label' is missing in .*c.parquet"):
        ParquetSource([tmp_path / "a.parquet", tmp_path / "c.parquet"])
    assert ParquetSource(tmp_path, columns=["same"]).read([2]) == [{"same": 3}]


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not a Parquet file")
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read as Parquet"):
        ParquetSource(tmp_path)


def test_a_removed_file_is_named(tmp_path: Path) -> None:
    source = ParquetSource(numbered(tmp_path / "a.parquet", 0, 9))
    (tmp_path / "a.parquet").unlink()
    for _ in range(2):
        with pytest.raises(SourceError, match=r"a\.parquet"):
            source.read([0])


def test_shuffled_reading_decodes_each_row_group_once(tmp_path: Path) -> None:
    source = ParquetSource(numbered(tmp_path / "a.parquet", 0, 40))
    decoded = counted(source)
    order = np.random.default_rng(0).permutation(40).tolist()
    for index in order:
        assert source.read([index]) == [{"data": b"%d" % index, "label": index}]
    assert sorted(decoded) == list(range(10))


def test_held_row_groups_stay_within_their_budget(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"data": [bytes(1000)] * 12}, group=2)
    source = ParquetSource(path, keep=5000)
    decoded = counted(source)
    source.read([0, 2, 4])  # three groups of about 2,000 bytes: the first is dropped
    assert decoded == [0, 1, 2]
    source.read([4, 2])
    assert decoded == [0, 1, 2]
    source.read([0, 2])  # a held group is read before a new one replaces it
    assert decoded == [0, 1, 2, 0]


def test_threads_that_need_the_same_row_group_decode_it_once() -> None:
    groups = RecentGroups(100)
    inside, go = threading.Event(), threading.Event()
    decoded: list[int] = []

    def decode(group: int) -> Any:
        decoded.append(group)
        inside.set()
        go.wait(60)
        return {"a": [group]}, 1

    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(groups.get(3, decode)))
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=lambda: found.append(groups.get(3, decode)))
    second.start()
    go.set()
    first.join(60)
    second.join(60)
    assert decoded == [3]
    assert found == [{"a": [3]}] * 2


def test_a_failed_decoding_is_tried_again() -> None:
    groups = RecentGroups(100)

    def fail(group: int) -> Any:
        raise SourceError("no disk")

    with pytest.raises(SourceError, match="no disk"):
        groups.get(0, fail)
    assert groups.get(0, lambda group: ({"a": [1]}, 1)) == {"a": [1]}


def test_several_threads_read_the_same_rows_as_one(tmp_path: Path) -> None:
    source = ParquetSource(numbered(tmp_path / "a.parquet", 0, 200), keep=300)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 200, 60).tolist():
            if source.read([index]) != [{"data": b"%d" % index, "label": index}]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_identity_follows_the_data_and_the_columns(tmp_path: Path) -> None:
    path = numbered(tmp_path / "here/a.parquet", 0, 5)
    first = ParquetSource(path).identity()
    assert ParquetSource(path).identity() == first
    moved = (tmp_path / "here").rename(tmp_path / "there") / "a.parquet"
    assert ParquetSource(moved).identity() == first
    fewer = ParquetSource(moved, columns=["data"]).identity()
    os.utime(moved, ns=(0, 1))
    assert len({first, fewer, ParquetSource(moved).identity()}) == 3


def test_it_is_pickled_without_its_row_groups_and_read_in_another_process(tmp_path: Path) -> None:
    source = ParquetSource(numbered(tmp_path / "a.parquet", 0, 500, group=100))
    before = len(cloudpickle.dumps(source))
    source.read(range(500))
    pickled = cloudpickle.dumps(source)
    assert len(pickled) == before < 2000
    (tmp_path / "source.pickle").write_bytes(pickled)
    code = (
        "import pickle, sys; source = pickle.load(open(sys.argv[1], 'rb')); "
        "print(source.read([499, 3]), source.identity())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "source.pickle")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{source.read([499, 3])} {source.identity()}"


def test_without_pyarrow_the_install_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = numbered(tmp_path / "a.parquet", 0, 5)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r'pip install "penstock\[parquet\]"'):
        ParquetSource(path)
