"""Folders: files, labels and order as in ImageFolder, and errors that name the cause."""

from __future__ import annotations

import os
import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec
from penstock.source import IMAGE_EXTENSIONS, FolderSource
from penstock.source.names import Names


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def image_folder(root: Path) -> list[tuple[str, int]]:
    """The samples as torchvision's ImageFolder documents them: sorted classes, sorted walk."""
    out = []
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(IMAGE_EXTENSIONS):
                    out.append((os.path.join(folder, file), label))
    return out


def samples(source: FolderSource) -> list[tuple[str, int]]:
    labels = [label for _, label in source.read(range(len(source)))]
    return [(source.name(i), label) for i, label in enumerate(labels)]


def test_class_folders_give_bytes_and_label(tmp_path: Path) -> None:
    write(tmp_path, "dog/b.jpg", "dog/a.PNG", "cat/1.jpg", "cat/notes.txt", "README.md")
    source = FolderSource(tmp_path)
    assert source.classes == ["cat", "dog"]
    assert source.class_to_idx == {"cat": 0, "dog": 1}
    assert len(source) == 3
    assert source.read([2, 0]) == [(b"dog/b.jpg", 1), (b"cat/1.jpg", 0)]
    assert source.name(1) == str(tmp_path / "dog/a.PNG")
    assert source.fields() == {0: BytesSpec(), 1: ArraySpec.of((), "int64")}


part = st.text("aB-./_ 1é", min_size=1, max_size=3).filter(
    lambda text: "/" not in text and text.strip(".") != ""
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(part, min_size=1, max_size=3), min_size=1, max_size=8))
def test_files_and_labels_come_in_the_order_of_image_folder(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]]
) -> None:
    root = tmp_path_factory.mktemp("photos")
    for place, folders in enumerate(paths):
        write(root, f"{'/'.join(folders)}/{place}.jpg", f"{'/'.join(folders)}/A{place}.JPEG")
    assert samples(FolderSource(root)) == image_folder(root)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/x.jpg", "photos/cat/deep/a.jpg", "photos/dog/b.jpg")
    (tmp_path / "photos/cat/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos/emu").symlink_to(tmp_path / "elsewhere")
    root = tmp_path / "photos"
    assert samples(FolderSource(root)) == image_folder(root)
    (root / "cat/up").symlink_to(root)
    assert len(FolderSource(root)) == 4


def test_torchvision_agrees(tmp_path: Path, torchvision: Any) -> None:
    write(tmp_path, "b/x-y/1.jpg", "b/x/2.jpg", "b/0.jpg", "a/z.webp", "a/Z.TIFF", "a/q.gif")
    theirs = torchvision.datasets.ImageFolder(str(tmp_path))
    source = FolderSource(tmp_path)
    assert samples(source) == theirs.samples
    assert source.class_to_idx == theirs.class_to_idx


def test_a_flat_folder_gives_bytes(tmp_path: Path) -> None:
    write(tmp_path, "b.jpg", "a.jpg", "more/c.jpg", "x.txt")
    source = FolderSource(tmp_path)
    assert source.read([0, 1, 2]) == [b"a.jpg", b"b.jpg", b"more/c.jpg"]
    assert source.fields() == BytesSpec()
    assert source.classes is None
    assert source.class_to_idx is None


def test_classes_can_be_forced_either_way(tmp_path: Path) -> None:
    write(tmp_path, "cat/a.jpg", "dog/b.jpg")
    assert FolderSource(tmp_path, classes=False).read([1]) == [b"dog/b.jpg"]
    write(tmp_path, "top.jpg")
    assert FolderSource(tmp_path).read([0]) == [b"top.jpg"]
    assert FolderSource(tmp_path, classes=True).read([1]) == [(b"dog/b.jpg", 1)]


def test_extensions_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, "a.wav", "b.FLAC", "c.jpg", ".hidden")
    assert FolderSource(tmp_path, extensions=(".wav", ".flac")).read([1]) == [b"b.FLAC"]
    assert FolderSource(tmp_path, extensions=".WAV").read([0]) == [b"a.wav"]
    assert len(FolderSource(tmp_path, extensions=None)) == 3


def test_an_unusable_folder_is_an_error_that_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"The folder .*nowhere does not exist"):
        FolderSource(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"holds no \.jpg, .*extensions="):
        FolderSource(tmp_path)
    write(tmp_path, "photos/cat/a.jpg", "photos/dog/b.txt", "photos/emu/c.txt")
    with pytest.raises(SourceError, match=r"class dog, emu holds no \.jpg"):
        FolderSource(tmp_path / "photos")
    with pytest.raises(SourceError, match="is a file, not a folder"):
        FolderSource(tmp_path / "photos/cat/a.jpg")
    with pytest.raises(SourceError, match="has no sub-folders to use as classes"):
        FolderSource(tmp_path / "photos/cat", classes=True)
    with pytest.raises(PipelineError, match="classes is 'yes'"):
        FolderSource(tmp_path / "photos", classes="yes")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="extensions is empty"):
        FolderSource(tmp_path / "photos", extensions=())


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    source = FolderSource(write(tmp_path, "a.jpg", "b.jpg"))
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(SourceError, match=r"b\.jpg does not exist"):
        source.read([0, 1])
    with pytest.raises(SourceError, match=r"b\.jpg does not exist"):
        source.identity()
    (tmp_path / "b.jpg").mkdir()
    with pytest.raises(SourceError, match=r"b\.jpg cannot be read: Is a directory"):
        source.read([1])


def test_identity_follows_the_data_and_nothing_else(tmp_path: Path) -> None:
    root = write(tmp_path / "here", "cat/a.jpg", "dog/b.jpg")
    os.utime(root / "cat/a.jpg", ns=(0, 10**18))
    first = FolderSource(root).identity()
    assert FolderSource(root).identity() == first
    assert FolderSource(root, classes=False).identity() != first

    moved = root.rename(tmp_path / "there")
    assert FolderSource(moved).identity() == first

    write(moved, "notes.txt")
    assert FolderSource(moved).identity() == first
    os.utime(moved / "cat/a.jpg", ns=(0, 10**18 + 1))
    touched = FolderSource(moved).identity()
    (moved / "cat/a.jpg").write_bytes(b"longer than it was")
    os.utime(moved / "cat/a.jpg", ns=(0, 10**18 + 1))
    longer = FolderSource(moved).identity()
    (moved / "cat").rename(moved / "kitten")
    renamed = FolderSource(moved).identity()
    assert len({first, touched, longer, renamed}) == 4


def test_a_file_name_that_is_not_valid_utf8_is_read(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\n.jpg")
    (tmp_path / name).write_bytes(b"x")
    source = FolderSource(tmp_path)
    assert source.read([0]) == [b"x"]
    assert source.name(0).endswith(name)
    assert len(source.identity()) == 32


def test_names_are_compact_and_pickled_as_buffers() -> None:
    names = Names(f"n{i:08d}.jpg" for i in range(50_000))
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(names, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 50_000 * (13 + 8)
    again = pickle.loads(head, buffers=buffers)
    assert (len(again), again[0], again[49_999]) == (50_000, "n00000000.jpg", "n00049999.jpg")
    for wrong in (-1, 50_000):
        with pytest.raises(IndexError):
            again[wrong]


def test_names_are_kept_whatever_bytes_they_have() -> None:
    odd = ["a", "", "é", "\udcff.jpg", "zero\0byte", "zero\0", "last"]
    for listed in (odd, odd * 2000, [name for name in odd if "\0" not in name] * 2000, []):
        names = Names(iter(listed))
        assert [names[index] for index in range(len(names))] == listed
        assert names.ends.tolist() == list(accumulate(len(os.fsencode(name)) for name in listed))
