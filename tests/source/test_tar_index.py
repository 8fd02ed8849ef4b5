"""The index of a tar shard: kept, read from DALI's sidecar, and never trusted blindly."""

from __future__ import annotations

import io
import logging
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.source import tar_index
from penstock.source.ranges import LocalRanges, RangeReader
from penstock.source.tar_index import (
    TarIndex,
    load_index,
    read_dali,
    read_index,
    scan,
    write_dali,
    write_index,
)
from tests.support.tars import numbered, write_tar


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def plain(index: TarIndex) -> list[list[tuple[str, int, int]]]:
    """Members by sample: (name, offset, size)."""
    samples, start = [], 0
    for sample, end in enumerate(index.ends.tolist()):
        samples.append(
            [
                (
                    f"{index.keys[sample]}.{index.extensions[index.kinds[m]]}",
                    int(index.offsets[m]),
                    int(index.sizes[m]),
                )
                for m in range(start, end)
            ]
        )
        start = end
    return samples


def test_offsets_are_those_of_the_tarfile_module(tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "e" * 90
    samples = [*numbered(0, 5), (long, {"txt": b"long", "bin": bytes(5000)}), *numbered(5, 9)]
    path = write_tar(tmp_path / "a.tar", samples)
    with tarfile.open(path) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive.getmembers()]
    index = scan(LocalRanges(str(path)))
    assert [member for sample in plain(index) for member in sample] == expected
    assert index.numbers[index.known].tolist() == list(range(9))


def test_an_index_is_kept_and_made_again_for_a_new_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(0, 4))
    first = plain(load_index(LocalRanges(str(path))))
    scans: list[str] = []
    whole = tar_index.scan

    def counted(reader: RangeReader) -> TarIndex:
        scans.append(reader.path)
        return whole(reader)

    monkeypatch.setattr(tar_index, "scan", counted)
    assert plain(load_index(LocalRanges(str(path)))) == first
    assert scans == []
    write_tar(path, numbered(0, 5))
    assert len(load_index(LocalRanges(str(path)))) == 5
    assert scans == [str(path)]
    for kept in (tmp_path / "cache" / "indexes").iterdir():
        kept.write_bytes(b"damaged")
    assert len(load_index(LocalRanges(str(path)))) == 5
    assert len(scans) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "cache"]


def test_dalis_index_is_written_and_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("x/1", {"jpg": b"abc", "cls": b"1"}), *numbered(2, 4)])
    index = scan(LocalRanges(str(path)))
    text = write_dali(index)
    assert text.splitlines()[:2] == ["v1.2 3", "jpg 512 3 x/1.jpg cls 1536 1 x/1.cls"]
    again = read_dali(text, str(path))
    assert again is not None
    assert plain(again) == plain(index)


@pytest.mark.parametrize(
    "text", ["", "v1.1 1\njpg 512 3\n", "v1.2 2\njpg 512 3 a.jpg\n", "v1.2 1\njpg 512 3 a b.jpg\n"]
)
def test_other_sidecars_are_not_read(text: str) -> None:
    assert read_dali(text, "a.tar") is None


def test_a_sidecar_saves_reading_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(0, 50))
    expected = plain(scan(LocalRanges(str(path))))
    (tmp_path / "a.idx").write_text(write_dali(scan(LocalRanges(str(path)))))
    monkeypatch.setattr(tar_index, "scan", None)
    assert plain(load_index(LocalRanges(str(path)))) == expected


def test_our_sidecar_has_the_numbers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(0, 50))
    index = scan(LocalRanges(str(path)))
    for name in ("a.tar.npz", "b.tar.npz"):
        with open(tmp_path / name, "wb") as file:
            write_index(file, index)
    assert (tmp_path / "a.tar.npz").read_bytes() == (tmp_path / "b.tar.npz").read_bytes()
    monkeypatch.setattr(tar_index, "scan", None)
    read = load_index(LocalRanges(str(path)))
    assert plain(read) == plain(index)
    assert read.numbers[read.known].tolist() == list(range(50))


@pytest.mark.parametrize("other", [numbered(0, 40), numbered(1, 51), numbered(0, 60)])
def test_a_sidecar_of_another_shard_is_not_used(
    tmp_path: Path, other: list[tuple[str, dict[str, bytes]]], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tar(tmp_path / "a.tar", other)
    old = scan(LocalRanges(str(write_tar(tmp_path / "old.tar", numbered(0, 50)))))
    (tmp_path / "a.idx").write_text(write_dali(old))
    with caplog.at_level(logging.WARNING, "penstock"):
        assert len(load_index(LocalRanges(str(path)))) == len(other)
    assert "does not fit" in caplog.text


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a", {"txt": b"1"}), ("a", {"txt": b"2"})])
    with pytest.raises(SourceError, match=r"two members a\.txt"):
        scan(LocalRanges(str(path)))


@pytest.mark.parametrize("size", [300, 700, 1100, 2000, 4000])
def test_a_cut_off_archive_is_refused_or_ends_between_members(tmp_path: Path, size: int) -> None:
    path = write_tar(tmp_path / "a.tar", [("a", {"txt": bytes(600)}), ("b", {"txt": bytes(1500)})])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SourceError, match=rf"{path}.*(cut off|damaged).*Copy it again"):
        scan(LocalRanges(str(path)))


def test_a_negative_size_is_refused_instead_of_reading_in_a_circle(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(0, 3))
    block = bytearray(path.read_bytes())
    block[124:136] = b"-0000001000\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    path.write_bytes(bytes(block))
    with pytest.raises(SourceError, match="damaged at byte 0: the header has no size"):
        scan(LocalRanges(str(path)))


@pytest.mark.parametrize("name", ["ends", "kinds", "offsets", "sizes", "numbers", "known"])
def test_a_sidecar_whose_arrays_do_not_fit_each_other_is_not_used(
    tmp_path: Path, name: str
) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(0, 4))
    index = load_index(LocalRanges(str(path)))
    for wrong in (getattr(index, name)[:-1], getattr(index, name) - 100.5):
        file = io.BytesIO()
        write_index(file, replace(index, **{name: wrong}))
        file.seek(0)
        assert read_index(file) is None


def test_something_else_is_refused_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 8)
    with pytest.raises(SourceError, match=r"damaged at byte 0: there is no tar header.*compressed"):
        scan(LocalRanges(str(path)))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damage_is_an_error_of_ours_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "a.tar"
    write_tar(path, [("å" * 70, {"txt": b"x" * 700}), *numbered(0, 2)])
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))].tobytes())
    try:
        index = scan(LocalRanges(str(path)))
    except SourceError:
        return
    assert ((index.offsets + index.sizes) <= len(content)).all()
