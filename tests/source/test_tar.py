"""Tar shards: grouping, fields, decoders, patterns, compression, errors, and the native path."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import native
from penstock.engine.pools.native_road import NativeRoad, can_be_native
from penstock.errors import PipelineError, SourceError
from penstock.source.shard_paths import braces
from penstock.source.tar import TarSource
from tests.support.contract import epochs
from tests.support.jpegs import encode, picture
from tests.support.tars import numbered, parts, write_tar


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number in range(3):
        write_tar(tmp_path / f"s-{number:02d}.tar", numbered(10 * number, 10 * number + 10))
    return tmp_path


def test_members_with_one_name_up_to_the_first_dot_are_one_sample(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("x/1", {"left.JPG": b"L", "right.jpg": b"R", "cls": b"4"}),
            ("x/2", {"left.jpg": b"l", "right.jpg": b"r", "cls": b"5\n"}),
        ],
    )
    assert TarSource(path).read([1, 0]) == [
        {"__key__": "x/2", "left.jpg": b"l", "right.jpg": b"r", "cls": 5},
        {"__key__": "x/1", "left.jpg": b"L", "right.jpg": b"R", "cls": 4},
    ]


def test_fields_choose_extensions_and_the_form_of_a_sample(shards: Path) -> None:
    assert TarSource(shards, "txt").read([3]) == ["text 3"]
    assert TarSource(shards, ("cls", "txt")).read([29, 0]) == [(29, "text 29"), (0, "text 0")]
    named = {"label": "cls", "name": "__key__", "body": "md;txt"}
    assert TarSource(shards, named).read([12]) == [
        {"label": 12, "name": "000012", "body": "text 12"}
    ]


def test_decoders_are_by_the_last_part_of_the_extension(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6).reshape(2, 3))
    contents = {"a.npy": file.getvalue(), "b.json": b'{"x": [1]}', "c.bin": b"raw", "d.cls": b"7"}
    path = write_tar(tmp_path / "a.tar", [("k", contents)])
    (sample,) = TarSource(path).read([0])
    assert sample["a.npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (sample["b.json"], sample["c.bin"], sample["d.cls"]) == ({"x": [1]}, b"raw", 7)
    assert TarSource(path, decoders=None).read([0]) == [{"__key__": "k", **contents}]
    chosen = TarSource(path, ("c.bin", "d.cls"), {"bin": len, "cls": None})
    assert chosen.read([0]) == [(3, b"7")]


@pytest.mark.parametrize("given", ["s-{00..02}.tar", "s-*.tar", "", "s-{00,01,02}.tar"])
def test_patterns_and_folders_name_the_same_shards(shards: Path, given: str) -> None:
    source = TarSource(shards / given, "cls")
    assert source.read(range(30)) == list(range(30))
    assert source.shards.tolist() == [10, 10, 10]


def test_braces_follow_the_shell() -> None:
    assert list(braces("{8..10}")) == ["8", "9", "10"]
    assert list(braces("{2..0}")) == ["2", "1", "0"]
    assert list(braces("{x}.tar")) == ["{x}.tar"]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_of_every_format(tmp_path: Path, format: int) -> None:
    folder = "/".join(["folder" * 8] * (2 if format == tarfile.USTAR_FORMAT else 6))
    path = write_tar(tmp_path / "a.tar", [(f"{folder}/å{'b' * 60}", {"txt": b"x"})], format=format)
    assert TarSource(path).read([0])[0]["__key__"] == f"{folder}/å{'b' * 60}"


def test_members_that_are_no_samples_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (
            ("dir.d", tarfile.DIRTYPE),
            ("README", tarfile.REGTYPE),
            (".hidden", tarfile.REGTYPE),
            ("__meta__.json__", tarfile.REGTYPE),
            ("link.jpg", tarfile.SYMTYPE),
            ("a.txt", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type = kind
            archive.addfile(member, io.BytesIO(b""))
    assert TarSource(tmp_path / "a.tar").read([0]) == [{"__key__": "a", "txt": ""}]


def test_a_compressed_shard_is_decompressed_once(shards: Path, tmp_path: Path) -> None:
    packed = tmp_path / "p.tar.gz"
    packed.write_bytes(gzip.compress((shards / "s-01.tar").read_bytes()))
    assert TarSource(packed, "cls").read([0, 9]) == [10, 19]
    (copy,) = (tmp_path / "cache" / "decompressed").iterdir()
    copied = copy.stat().st_mtime_ns
    assert TarSource(packed, "cls").read([5]) == [15]
    assert copy.stat().st_mtime_ns == copied
    packed.write_bytes(packed.read_bytes()[:200])
    with pytest.raises(SourceError, match=r"p\.tar\.gz cannot be decompressed"):
        TarSource(packed)
    assert len(list((tmp_path / "cache" / "decompressed").iterdir())) == 1


def test_a_sample_without_a_field_is_named(shards: Path) -> None:
    write_tar(shards / "s-03.tar", [("odd/x", {"txt": b"1"})])
    with pytest.raises(SourceError, match=r"1 of 31 samples have no cls.*odd/x in .*s-03.*: txt\."):
        TarSource(shards, "cls")
    assert TarSource(shards).read([30]) == [{"__key__": "odd/x", "txt": "1"}]


def test_wrong_arguments_are_refused(shards: Path) -> None:
    with pytest.raises(SourceError, match="not a pattern that matches one"):
        TarSource(shards / "nothing-*.tar")
    with pytest.raises(PipelineError, match="fields is"):
        TarSource(shards, [])
    with pytest.raises(PipelineError, match="decoders is 'pil'"):
        TarSource(shards, decoders="pil")


def test_names_with_dots_are_refused_where_they_make_too_many_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.source.tar_index.MOST_EXTENSIONS", 5)
    monkeypatch.setattr("penstock.source.tar.MOST_EXTENSIONS", 5)
    for number in range(2):
        samples = [(f"photo.{4 * number + i}", {"jpg": b""}) for i in range(4)]
        write_tar(tmp_path / f"{number}.tar", samples)
    with pytest.raises(SourceError, match=r"such as 0\.jpg, 1\.jpg.*first dot"):
        TarSource(tmp_path)
    write_tar(tmp_path / "0.tar", [(f"photo.{i}", {"jpg": b""}) for i in range(9)])
    with pytest.raises(SourceError, match=r"0\.tar has more than"):
        TarSource(tmp_path / "0.tar")


def test_a_content_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("k", {"cls": b"seven"})])
    with pytest.raises(SourceError, match=r"k\.cls in .*a\.tar cannot be decoded by int"):
        TarSource(path).read([0])


def test_a_shard_that_shrinks_while_training_is_reported(shards: Path) -> None:
    source = TarSource(shards / "s-00.tar", "txt")
    data = (shards / "s-00.tar").read_bytes()
    (shards / "s-00.tar").write_bytes(data[:2048])
    with pytest.raises(SourceError, match=r"s-00\.tar ends before byte 18950"):
        source.read([9])


def test_the_identity_follows_shards_fields_and_decoders(shards: Path) -> None:
    first = TarSource(shards).identity()
    assert TarSource(shards).identity() == first
    assert TarSource(shards, "txt").identity() != first
    assert TarSource(shards, decoders=None).identity() != first
    assert TarSource(shards, decoders={"cls": float}).identity() != first
    write_tar(shards / "s-02.tar", numbered(20, 31))
    assert TarSource(shards).identity() != first


def test_a_source_is_sent_to_workers_by_pickle(shards: Path) -> None:
    source = pickle.loads(pickle.dumps(TarSource(shards, ("txt", "cls"))))
    assert source.read([17]) == [("text 17", 17)]
    assert source.name(17) == f"{shards}/s-01.tar/000017.txt"


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    return [encode(picture(40 + i, 50, i), "420") for i in range(12)]


def images(pipeline: ps.Pipeline) -> ps.Pipeline:
    decoded = pipeline.map(ps.image.decode()).map(ps.image.random_resized_crop(16))
    return decoded.map(ps.image.random_flip()).batch(5)


@pytest.mark.parametrize("sidecar", [False, True])
def test_images_take_the_native_path_and_equal_files(
    tmp_path: Path, photos: list[bytes], sidecar: bool
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    paths = []
    for i, photo in enumerate(photos):
        paths.append(folder / f"{i:02d}.jpg")
        paths[-1].write_bytes(photo)
    samples = [(f"{i:02d}", {"jpg": p, "cls": str(i).encode()}) for i, p in enumerate(photos)]
    write_tar(tmp_path / "a.tar", samples[:7])
    write_tar(tmp_path / "b.tar", samples[7:])
    if sidecar:
        from penstock.source.ranges import LocalRanges
        from penstock.source.tar_index import scan, write_dali

        for name in ("a", "b"):
            index = scan(LocalRanges(str(tmp_path / f"{name}.tar")))
            (tmp_path / f"{name}.idx").write_text(write_dali(index))
    tar = images(ps.from_tar(str(tmp_path / "{a,b}.tar"), fields=("jpg", "cls")))
    files = images(ps.from_files(paths, labels=list(range(12))))
    assert parts(tar.source) == photos
    assert can_be_native(tar.road(0), stacked=True) == can_be_native(files.road(0), stacked=True)
    for workers in (0, 2):
        assert epochs(tar, 2, workers=workers, seed=3) == epochs(files, 2, workers=0, seed=3)
    named = images(
        ps.from_tar(str(tmp_path / "{a,b}.tar"), fields={"image": "jpg", "label": "cls"})
    )
    with named.loader(workers=1, seed=3) as by_name, files.loader(workers=0, seed=3) as by_file:
        for one, (image, label) in zip(by_name, by_file, strict=True):
            assert np.array_equal(one["image"], image)
            assert np.array_equal(one["label"], label)


@pytest.mark.skipif(not native.kernel_available(), reason="the compiled kernel is missing")
def test_the_kernel_reads_the_parts_by_itself(
    tmp_path: Path, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    run_in_python = NativeRoad.run_in_python

    def counted(self: NativeRoad, held: Any, place: int, runner: Any) -> None:
        left.append(place)
        run_in_python(self, held, place, runner)

    monkeypatch.setattr(NativeRoad, "run_in_python", counted)
    path = write_tar(tmp_path / "a.tar", [(str(i), {"jpg": p}) for i, p in enumerate(photos)])
    with images(ps.from_tar(path, fields="jpg")).loader(workers=2) as loader:
        assert sum(len(batch) for batch in loader) == 12
        assert loader.stats().bytes_read >= sum(map(len, photos))
    assert left == []


def test_the_kernel_reads_nothing_past_the_end_of_a_cut_off_shard(
    tmp_path: Path, photos: list[bytes]
) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{i:02d}", {"jpg": photo}) for i, photo in enumerate(photos)])
    pipeline = images(ps.from_tar(path, fields="jpg"))
    path.write_bytes(path.read_bytes()[:6000])
    with (
        pipeline.loader(workers=1, shuffle=False) as loader,
        pytest.raises(Exception, match="ends"),
    ):
        list(loader)


def test_a_cache_below_the_source_serves_the_second_epoch(
    tmp_path: Path, photos: list[bytes]
) -> None:
    path = write_tar(tmp_path / "a.tar", [(str(i), {"jpg": p}) for i, p in enumerate(photos)])
    source = ps.from_tar(path, fields="jpg")
    expected = epochs(images(source), 2, workers=0, seed=1)
    with images(source.cache("1MB")).loader(workers=2, seed=1) as loader:
        seen: list[Any] = [[batch.tobytes() for batch in loader] for _ in range(2)]
        stats = loader.stats()
    assert seen == [[batch[2] for batch in epoch] for epoch in expected]
    assert [(cache.hits, cache.misses) for cache in stats.caches] == [(12, 12)]
