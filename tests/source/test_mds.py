"""MDS shards: encodings, columns, compression, damage, and the native path."""

from __future__ import annotations

import gzip
import json
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import native
from penstock.engine.pools.native_road import can_be_native
from penstock.errors import PipelineError, SourceError
from penstock.source.mds import MdsSource
from tests.support.contract import epochs
from tests.support.jpegs import encode, picture
from tests.support.mds import write_mds
from tests.support.tars import parts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


ENCODED: dict[str, tuple[str, bytes, Any]] = {
    "a": ("bytes", b"\0raw", b"\0raw"),
    "b": ("str", "é".encode(), "é"),
    "c": ("int", struct.pack("<q", -7), -7),
    "d": ("float32", struct.pack("<f", 0.5), 0.5),
    "e": ("json", b'{"x": [1, null]}', {"x": [1, None]}),
    "f": ("str_int", b"99999999999999999999", 99999999999999999999),
    "g": ("str_decimal", b"1.10", Decimal("1.10")),
    "h": ("uint8", b"\xff", 255),
}


def test_values_of_every_encoding(tmp_path: Path) -> None:
    columns = {name: encoding for name, (encoding, _, _) in ENCODED.items()}
    sample = {name: content for name, (_, content, _) in ENCODED.items()}
    write_mds(tmp_path / "m", columns, [sample, sample], 1)
    expected = {name: value for name, (_, _, value) in ENCODED.items()}
    assert MdsSource(tmp_path / "m").read([1, 0]) == [expected, expected]
    assert MdsSource(tmp_path / "m", ["h", "b"]).read([0]) == [{"h": 255, "b": "é"}]


def test_arrays_and_raw_pictures(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    dynamic = bytes([34, 2 << 2, 2, 3]) + array.tobytes()
    wide = bytes([66, 1 << 2 | 1]) + struct.pack("<H", 2) + np.array([1.5, 2.5]).tobytes()
    pixels = picture(3, 4)
    pil = struct.pack("<III", 4, 3, 3) + b"RGB" + pixels.tobytes()
    columns = {"s": "ndarray:float32:2,3", "d": "ndarray", "w": "ndarray", "p": "pil"}
    sample = {"s": array.tobytes(), "d": dynamic, "w": wide, "p": pil}
    (read,) = MdsSource(write_mds(tmp_path / "m", columns, [sample], 1)).read([0])
    assert read["s"].tolist() == read["d"].tolist() == array.tolist()
    assert (read["w"].dtype, read["w"].tolist()) == (np.float64, [1.5, 2.5])
    assert np.array_equal(read["p"], pixels)


def numbers(folder: Path, count: int = 10) -> Path:
    samples = [{"x": struct.pack("<q", i), "t": f"t{i}".encode()} for i in range(count)]
    return write_mds(folder, {"x": "int", "t": "str"}, samples, 4)


def test_samples_of_all_shards_are_numbered_in_order(tmp_path: Path) -> None:
    source = MdsSource(numbers(tmp_path / "m"))
    assert [s["x"] for s in source.read([9, 0, 4, 3])] == [9, 0, 4, 3]
    assert source.shards.tolist() == [4, 4, 2]
    assert source.name(5) == f"sample 1 of {tmp_path}/m/shard.00001.mds"
    first = source.identity()
    numbers(tmp_path / "m", 11)
    assert MdsSource(tmp_path / "m").identity() != first


@pytest.mark.parametrize("kind", ["gz", "zstd"])
def test_compressed_shards_are_decompressed_once(tmp_path: Path, kind: str) -> None:
    folder = numbers(tmp_path / "m")
    if kind == "zstd":
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    else:
        compress = gzip.compress
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        raw = folder / shard["raw_data"]["basename"]
        packed = raw.with_name(f"{raw.name}.{kind}")
        packed.write_bytes(compress(raw.read_bytes()))
        raw.unlink()
        shard["zip_data"], shard["compression"] = {"basename": packed.name}, kind
    (folder / "index.json").write_text(json.dumps(index))
    assert [s["t"] for s in MdsSource(folder).read([0, 9])] == ["t0", "t9"]
    assert len(list((tmp_path / "cache" / "decompressed").iterdir())) == 3


def test_damage_is_named(tmp_path: Path) -> None:
    folder = numbers(tmp_path / "m")
    path = folder / "shard.00001.mds"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(SourceError, match=r"shard\.00001\.mds is damaged or cut off"):
        MdsSource(folder)
    path.write_bytes(struct.pack("<I", 9) + data[4:])
    with pytest.raises(SourceError, match="says that it has 9 samples"):
        MdsSource(folder)
    path.write_bytes(data[:8])
    with pytest.raises(SourceError, match="has 8 bytes, too few"):
        MdsSource(folder)
    path.write_bytes(data)
    source = MdsSource(folder)
    begin = int(source._begins[4])
    path.write_bytes(data[:begin] + struct.pack("<I", 99) + data[begin + 4 :])
    with pytest.raises(SourceError, match=r"sample 0 of .*00001\.mds has .* is damaged"):
        source.read([4])


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no index\.json"):
        MdsSource(tmp_path)
    folder = write_mds(tmp_path / "m", {"p": "pkl", "x": "int"}, [{"p": b".", "x": bytes(8)}], 1)
    with pytest.raises(SourceError, match="is a pickle, which runs code"):
        MdsSource(folder)
    assert MdsSource(folder, "x").read([0]) == [{"x": 0}]
    with pytest.raises(PipelineError, match="has no column 'y'"):
        MdsSource(folder, ["y"])
    named = (folder / "index.json").read_text()
    (folder / "index.json").write_text(named.replace("shard.00000.mds", "../secret.mds"))
    with pytest.raises(SourceError, match=r"'\.\./secret\.mds', which is outside of the folder"):
        MdsSource(folder, "x")
    (folder / "index.json").write_text('{"shards": [{"format": "json", "version": 2}]}')
    with pytest.raises(SourceError, match="only MDS of version 2"):
        MdsSource(folder)


@pytest.mark.parametrize("label_first", [False, True])
def test_images_take_the_native_path(tmp_path: Path, label_first: bool) -> None:
    photos = [encode(picture(40 + i, 50, i)) for i in range(9)]
    columns = {"image": "jpeg", "label": "int", "weight": "float32"}
    if label_first:
        columns = {"label": "int", "image": "jpeg", "weight": "float32"}
    samples = [
        {"image": p, "label": struct.pack("<q", i), "weight": struct.pack("<f", i / 2)}
        for i, p in enumerate(photos)
    ]
    folder = write_mds(tmp_path / "m", columns, samples, 4)
    plain = [{"image": p, "label": i, "weight": np.float32(i / 2)} for i, p in enumerate(photos)]
    mds, reference = (
        source.map(ps.image.decode()).map(ps.image.random_resized_crop(16)).batch(4)
        for source in (ps.from_mds(folder), ps.from_dataset(plain))
    )

    assert can_be_native(mds.road(0), stacked=True) == native.kernel_available()
    assert parts(mds.source) == photos
    with mds.loader(workers=2, seed=1) as ours, reference.loader(workers=0, seed=1) as theirs:
        for one, other in zip(ours, theirs, strict=True):
            for name in columns:
                assert np.array_equal(one[name], other[name])
                assert one[name].dtype == other[name].dtype
    assert epochs(mds, 1, workers=2, seed=1) == epochs(mds, 1, workers=0, seed=1)
