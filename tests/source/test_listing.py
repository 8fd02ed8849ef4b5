"""Sizes and times of the files of a source are those of os.stat, by the kernel and without it."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import native
from penstock.errors import SourceError
from penstock.source import listing as module
from penstock.source.folder import FolderSource
from penstock.source.listing import Listing
from penstock.source.names import Names


@pytest.fixture(params=["kernel", "python"])
def stat_names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function that asks for sizes and times, which ``Listing`` uses too."""
    found: Any = module._stat_each
    if request.param == "kernel":
        found = getattr(native.kernel(), "stat_files", None)
        if found is None:
            pytest.skip("the compiled kernel is missing")
    monkeypatch.setattr(module, "_stat_names", lambda: found)
    return found


def write(root: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(number))
    return root


def by_os(paths: list[str]) -> list[list[int]]:
    return [[os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths]


def test_stats_are_those_of_the_files(tmp_path: Path, stat_names: Any) -> None:
    odd = os.fsdecode(b"caf\xe9\n.jpg")
    root = write(tmp_path, "cat/a.jpg", "cat/deep/b.jpg", f"dog/{odd}", "dog/d.jpg", "emu/e.jpg")
    os.utime(root / "dog/d.jpg", ns=(0, 12345678901234567))
    os.utime(root / "emu/e.jpg", ns=(0, -1))
    (root / "emu/link.jpg").symlink_to(root / "dog/d.jpg")
    listing = FolderSource(root).listing
    paths = [listing.path(index) for index in range(len(listing))]
    assert listing.stats(0, 6).tolist() == by_os(paths)
    assert listing.stats(1, 4).tolist() == by_os(paths[1:4])
    assert listing.all_stats().tolist() == by_os(paths)
    assert Listing(Names(paths)).stats(2, 6).tolist() == by_os(paths[2:6])
    assert np.concatenate(list(listing.slices())).tolist() == by_os(paths)


def test_a_file_without_size_has_its_error_instead(tmp_path: Path, stat_names: Any) -> None:
    there = str(write(tmp_path, "a.jpg") / "a.jpg")
    names = [there, str(tmp_path / "gone"), f"{there}\0x", f"{there}/x", "/" + "x" * 5000]
    listing = Listing(Names(names))
    assert listing.stats(0, 5)[:, 0].tolist() == [0, -1, -1, -1, -1]
    assert listing.stats(1, 5)[:, 1].tolist() == [
        -errno.ENOENT,
        -errno.EINVAL,
        -errno.ENOTDIR,
        -errno.ENAMETOOLONG,
    ]
    with pytest.raises(SourceError, match=r"gone does not exist"):
        listing.all_stats()


def test_a_folder_that_is_gone_is_an_error_of_each_of_its_files(
    tmp_path: Path, stat_names: Any
) -> None:
    listing = FolderSource(write(tmp_path / "here", "cat/a.jpg", "cat/b.jpg")).listing
    (tmp_path / "here").rename(tmp_path / "there")
    assert listing.stats(0, 2).tolist() == [[-1, -errno.ENOENT]] * 2


def test_the_kernel_refuses_arrays_that_do_not_fit() -> None:
    stat = getattr(native.kernel(), "stat_files", None)
    if stat is None:
        pytest.skip("the compiled kernel is missing")
    text, ends = np.zeros(4, np.uint8), np.array([2, 4])
    out = np.empty((2, 2), np.int64)
    for wrong in (
        (text, ends, 1, out),
        (text, ends, -1, out),
        (text, ends, 3, out[:0]),
        (text[:3], ends, 0, out),
        (text, ends[::-1].copy(), 0, out),
        (text, -ends, 0, out),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            stat(b"", *wrong)
    with pytest.raises((BufferError, ValueError, TypeError)):
        stat(b"", text, ends, 0, bytes(32))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000, 1_000_003])
def test_a_sample_has_one_file_of_each_part_and_depends_on_the_count_only(count: int) -> None:
    class Counted(Names):
        def __len__(self) -> int:
            return count

    chosen = Listing(Counted([])).sample()
    assert chosen == Listing(Counted(["x"])).sample()
    assert len(chosen) == min(count, module.SAMPLE)
    assert chosen == sorted(set(chosen))
    assert chosen[0] >= 0
    assert chosen[-1] < count
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or gaps.max() <= 2 * -(-count // module.SAMPLE)


def test_a_long_wait_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listing = Listing(Names([str(tmp_path)] * 8))
    monkeypatch.setattr(module, "_LOCAL_THREADS", 1)
    monkeypatch.setattr(module, "SLICE", 2)
    clock = itertools.count(0.0, 4.0)
    listing.all_stats(clock=lambda: next(clock))
    assert "reading the sizes and times of 8 files: 75 %" in caplog.text
    caplog.clear()
    listing.all_stats(clock=lambda: 0.0)
    assert not caplog.text


def test_files_on_a_network_are_asked_for_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stat_names: Any
) -> None:
    root = write(tmp_path, *(f"{number:02}.jpg" for number in range(40)))
    alone = FolderSource(root).listing
    monkeypatch.setattr(module, "any_on_network", lambda paths: True)
    listing = FolderSource(root).listing
    assert listing.on_network
    assert listing.sample_stats().tolist() == alone.stats(0, 40).tolist()
    assert listing.all_stats().tolist() == alone.stats(0, 40).tolist()
