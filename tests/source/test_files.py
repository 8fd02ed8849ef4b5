"""Lists of files, with and without labels."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import native
from penstock.errors import PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec
from penstock.source import FilesSource, files
from penstock.source.files import read_files


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    out = [tmp_path / name for name in ("b.bin", "a.bin", "c.bin")]
    for path in out:
        path.write_bytes(path.name.encode())
    return out


def test_files_keep_their_order(paths: list[Path]) -> None:
    source = FilesSource(paths)
    assert source.read([0, 2, 0]) == [b"b.bin", b"c.bin", b"b.bin"]
    assert source.name(1) == str(paths[1])
    assert source.fields() == BytesSpec()


@pytest.mark.parametrize("kernel", [True, False])
def test_any_sequence_of_folders_gives_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:
        monkeypatch.setattr(native, "kernel", lambda: None)
    for folder in ("a", "b", "a/deep"):
        (tmp_path / folder).mkdir()
        for name in ("1", "2", "3"):
            (tmp_path / folder / name).write_text(f"{folder}/{name}")
    monkeypatch.chdir(tmp_path / "a")
    grouped = ["1", "2", "./3", "deep/1", "deep/2", "../b/1", "../b/2", "../b/../a/deep/3", "3"]
    shuffled = ["1", "../b/1", "deep/2", "../b/3", "deep/../2", "deep/3"]
    for given in (grouped, shuffled, [tmp_path / "b" / "2"]):
        source = FilesSource(given)
        expected = [os.path.abspath(path) for path in given]
        assert [source.name(index) for index in range(len(source))] == expected
        contents = [Path(path).read_bytes() for path in given]
        assert source.read(range(len(source))) == contents
        sizes = source.listing.all_stats()[:, 0]
        assert sizes.tolist() == [len(content) for content in contents]


def test_a_name_that_is_a_folder_is_resolved(tmp_path: Path) -> None:
    given = [f"{tmp_path}/a/1", f"{tmp_path}/a/..", f"{tmp_path}/a/.", f"{tmp_path}/a/"]
    source = FilesSource([*given, f"{tmp_path}/a/2"])
    a = str(tmp_path / "a")
    found = [source.name(index) for index in range(5)]
    assert found == [f"{a}/1", str(tmp_path), a, a, f"{a}/2"]


def test_files_of_one_folder_share_its_path(tmp_path: Path) -> None:
    many = [f"{tmp_path}/folder/{i:04}.jpg" for i in range(1000)]
    assert len(pickle.dumps(FilesSource(many))) < 1000 * (8 + 8) + 2000


def test_labels_come_with_the_files(paths: list[Path]) -> None:
    source = FilesSource(map(str, paths), labels=[7, 8, 9])
    found = source.read([2, 0])
    assert found == [(b"c.bin", 9), (b"b.bin", 7)]
    assert type(found[0][1]) is int
    assert source.fields() == {0: BytesSpec(), 1: ArraySpec.of((), "int64")}


def test_labels_may_be_of_any_kind(paths: list[Path]) -> None:
    from_array = FilesSource(paths, labels=np.array([1, 2, 3], np.int32))
    assert from_array.read([1]) == [(b"a.bin", 2)]
    assert FilesSource(paths, labels=[0.5, 1.5, 2.5]).fields() == {
        0: BytesSpec(),
        1: ArraySpec.of((), "float64"),
    }
    text = FilesSource(paths, labels=["x", "y", None])
    assert text.read([0, 2]) == [(b"b.bin", "x"), (b"c.bin", None)]
    assert text.fields() == {0: BytesSpec(), 1: None}
    assert FilesSource(paths, labels=[1 << 70, 1, 2]).read([0]) == [(b"b.bin", 1 << 70)]


def test_a_relative_path_does_not_depend_on_later_directories(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = FilesSource(["a.bin"])
    monkeypatch.chdir("/")
    assert source.read([0]) == [b"a.bin"]


def test_identity_follows_paths_labels_and_content(paths: list[Path]) -> None:
    first = FilesSource(paths).identity()
    assert FilesSource(paths).identity() == first
    other = {
        FilesSource(paths[::-1]).identity(),
        FilesSource(paths, [1, 2, 3]).identity(),
        FilesSource(paths, [1, 2, 4]).identity(),
        FilesSource(paths, ["1", "2", "4"]).identity(),
    }
    paths[0].write_bytes(b"longer than before")
    other.add(FilesSource(paths).identity())
    assert len(other | {first}) == 6


def test_wrong_arguments_are_refused(paths: list[Path]) -> None:
    with pytest.raises(SourceError, match="empty"):
        FilesSource([])
    with pytest.raises(PipelineError, match="3 files and 2 labels"):
        FilesSource(paths, labels=[1, 2])
    with pytest.raises(PipelineError, match="one path; give a list"):
        FilesSource(str(paths[0]))


def test_a_missing_file_is_named_when_it_is_read(paths: list[Path], tmp_path: Path) -> None:
    source = FilesSource([*paths, tmp_path / "gone.bin"])
    assert source.read([0]) == [b"b.bin"]
    with pytest.raises(SourceError, match=r"gone\.bin does not exist"):
        source.read([3])


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(paths: list[Path]) -> None:
    paths[0].chmod(0)
    with pytest.raises(
        SourceError, match=r"b\.bin cannot be read: Permission denied.*permission to read"
    ):
        FilesSource(paths).read([0])


@pytest.fixture(params=["kernel", "pure"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read with the compiled kernel, if there is one, and without it."""
    if request.param == "kernel" and not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    if request.param == "pure":
        monkeypatch.setenv("PENSTOCK_NO_KERNEL", "1")
    files._reader.cache_clear()
    assert (files._reader() is files._read_each) == (request.param == "pure")
    yield
    files._reader.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3_000_000])
def test_a_file_of_any_size_is_read_whole(reader: None, tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "ünö").write_bytes(content)
    assert read_files([str(tmp_path / "ünö")])[0] == content


def test_a_file_that_does_not_know_its_size_is_read_whole(reader: None, tmp_path: Path) -> None:
    assert read_files(["/proc/self/status"])[0].startswith(b"Name:")
    assert read_files(["/dev/null"])[0] == b""
    os.mkfifo(tmp_path / "pipe")
    content = np.random.default_rng(0).bytes(300_000)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    writer.start()
    assert read_files([str(tmp_path / "pipe")])[0] == content
    writer.join()


def test_a_file_that_cannot_be_read_is_named(reader: None, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="none does not exist"):
        read_files([str(tmp_path / "none")])
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read_files([str(tmp_path)])
    with pytest.raises(ValueError, match=r"null (byte|character)"):
        read_files(["a\0b"])
    gc.collect()  # what other tests have left may have descriptors
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(SourceError):
            read_files([str(tmp_path)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_several_files_are_read_in_order(reader: None, tmp_path: Path) -> None:
    contents = {f"{size}": np.random.default_rng(size).bytes(size) for size in (9, 0, 70_000, 1)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in contents]
    assert read_files(paths) == list(contents.values())
    assert read_files([]) == []
    with pytest.raises(SourceError, match="none does not exist"):
        read_files([*paths, str(tmp_path / "none"), *paths])
