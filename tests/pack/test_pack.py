"""Packing: samples come back as they were; bytes do not depend on interruptions; damage shows."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import PipelineError, SourceError, StoreError
from penstock.pack.members import Form
from penstock.pack.pack import check, until
from penstock.source.manifest import read_manifest
from penstock.source.packed_folder import folder_at, sync_folder
from penstock.source.ranges import LocalRanges
from penstock.source.tar import TarSource
from penstock.source.tar_index import load_index, scan, write_dali
from tests.node.conftest import own_node
from tests.support.contract import epochs, noise
from tests.support.jpegs import encode, picture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


PAIRS = [(np.full((2, 3), i, dtype=np.float32), i) for i in range(25)]


@pytest.mark.parametrize(
    "samples",
    [
        PAIRS,
        [b"\xff\xd8\xff" + bytes([i]) for i in range(7)],
        [{"text": f"é {i}", "x": i / 3, "tags": ["a", i], "none": None} for i in range(7)],
        [(i, i + 1, f"{i}") for i in range(7)],
        [{"image": b"\x89PNG\r\n\x1a\n", "label": -i} for i in range(7)],
        [(np.arange(i), np.array(float(i))) for i in range(7)],
    ],
    ids=["pairs", "bytes", "dict", "three", "named", "ragged"],
)
def test_samples_come_back_as_they_were(tmp_path: Path, samples: list[Any]) -> None:
    ps.from_dataset(samples).pack(tmp_path / "p", per_shard=5, workers=0)
    back = TarSource(tmp_path / "p").read(range(len(samples)))
    assert repr(back) == repr(samples) or all(
        np.array_equal(a, b)
        for s, t in zip(back, samples, strict=True)
        for a, b in zip(s, t, strict=True)
    )


def test_a_packed_prefix_changes_no_batch(tmp_path: Path) -> None:
    prefix = ps.from_dataset(PAIRS).map(lambda x: x * 2, on=0, random=False)
    prefix.cache("1MB").pack(tmp_path / "p", per_shard=10)
    packed = ps.from_tar(tmp_path / "p")
    random = [p.map(noise, on=0).batch(4) for p in (prefix, packed)]
    # The number of the map keys its random numbers, so the same map stands at the same place.
    random[1] = packed.map(lambda x: x, on=0, random=False).map(noise, on=0).batch(4)
    assert epochs(random[0], 2, workers=0, seed=1) == epochs(random[1], 2, workers=0, seed=1)


def test_photographs_are_packed_raw_and_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.jpg").write_bytes(encode(picture(20, 30, i)))
    raw = ps.from_folder(folder)
    raw.pack(tmp_path / "raw", per_shard=4)
    assert TarSource(tmp_path / "raw").read(range(6)) == raw.source.read(range(6))
    decoded = raw.map(ps.image.decode()).map(ps.image.center_crop(16))
    report = decoded.batch(2).pack(tmp_path / "decoded")
    again = ps.from_tar(tmp_path / "decoded")
    assert epochs(again.batch(3), 1, workers=0) == epochs(decoded.batch(3), 1, workers=0)
    assert (report.samples, report.shards, report.written) == (6, 1, 1)
    assert report.before is not None
    assert report.before > 0


def test_the_bytes_do_not_depend_on_workers_or_on_the_time(tmp_path: Path) -> None:
    for name, workers in (("a", 0), ("b", 3)):
        ps.from_dataset(PAIRS).pack(tmp_path / name, per_shard=7, workers=workers)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    with tarfile.open(tmp_path / "a" / "shard-000001.tar") as archive:
        members = archive.getmembers()
        assert [m.name for m in members[:2]] == ["000000007.npy", "000000007.cls"]
        assert {(m.mtime, m.uid, m.mode) for m in members} == {(0, 0, 0o644)}


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import penstock as ps

to, flag = sys.argv[1:]
os.environ["PENSTOCK_CACHE_DIR"] = to + "-cache"

class Deadly:
    def __call__(self, x):
        if x == 17 and Path(os.environ["FLAG"]).exists():
            os.unlink(os.environ["FLAG"])
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(100, x)

os.environ["FLAG"] = flag
pipeline = ps.from_dataset(np.arange(30)).map(Deadly(), random=False, version="1")
print(pipeline.pack(to, per_shard=4, workers=0).written)
"""


def test_kill_9_while_packing_then_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def run(to: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / to), str(flag)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert run("whole").stdout == "8\n"
    flag.touch()
    assert run("killed").returncode == -9
    # Samples come 8 at a time, so the shards of the first 16 are finished.
    done = read_manifest(folder_at(tmp_path / "killed"))
    assert done is not None
    assert [shard.first for shard in done.shards] == [0, 4, 8, 12]
    assert not done.complete
    with pytest.raises(SourceError, match="has 16 of 30 samples"):
        ps.from_tar(tmp_path / "killed")
    assert run("killed").stdout == "4\n"
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not check(tmp_path / "killed").wrong


def test_a_second_run_writes_only_what_is_missing(tmp_path: Path) -> None:
    pipeline = ps.from_dataset(PAIRS)
    pipeline.pack(tmp_path / "p", per_shard=5)
    before = contents(tmp_path / "p")
    assert pipeline.pack(tmp_path / "p").written == 0
    (tmp_path / "p" / "shard-000002.tar").unlink()
    assert pipeline.pack(tmp_path / "p").written == 1
    assert contents(tmp_path / "p") == before


def test_checksums_find_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    ps.from_dataset(PAIRS).pack(folder, per_shard=5)
    assert main(["pack", "--check", str(folder)]) == 0
    path = folder / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    (folder / "shard-000003.tar").unlink()
    assert main(["pack", "--check", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "shard-000001.tar is damaged" in shown
    assert "shard-000003.tar is missing" in shown
    with pytest.raises(SourceError, match=r"no pack\.json"):
        check(tmp_path)


def test_random_stages_are_refused_with_their_name() -> None:
    source = ps.from_dataset(PAIRS)
    with pytest.raises(PipelineError, match=r"below noise, which is random.*Pack the stages above"):
        source.map(noise, on=0).pack("/nowhere")
    with pytest.raises(PipelineError, match="echo"):
        source.echo(2).pack("/nowhere")
    with pytest.raises(PipelineError, match="random=False"):
        ps.from_dataset(PAIRS, random=True).pack("/nowhere")
    with pytest.raises(PipelineError, match="stream"):
        ps.from_dataset(lambda: iter(PAIRS)).pack("/nowhere")


def test_another_pipeline_or_size_is_refused(tmp_path: Path) -> None:
    ps.from_dataset(PAIRS).pack(tmp_path, per_shard=5)
    with pytest.raises(StoreError, match="another pipeline or of other data"):
        ps.from_dataset(PAIRS[:20]).pack(tmp_path)
    with pytest.raises(StoreError, match="shards of 5 samples"):
        ps.from_dataset(PAIRS).pack(tmp_path, per_shard=6)
    with pytest.raises(PipelineError, match="per_shard is 0"):
        ps.from_dataset(PAIRS).pack(tmp_path, per_shard=0)


def test_samples_that_cannot_be_packed_are_named() -> None:
    with pytest.raises(PipelineError, match="0 of x is a object"):
        Form().members(object(), "x")
    form = Form()
    form.members((1, 2), "first")
    with pytest.raises(PipelineError, match=r"second has the fields \['0'\]"):
        form.members((1,), "second")
    with pytest.raises(PipelineError, match="third is a single"):
        form.members(1, "third")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"Image": b"1", "image": b"2"}, "'Image' and 'image' of .* both be written as image.bin"),
        ({"a.npy": np.ones(2), "a": np.zeros(2)}, "'a.npy' and 'a' of .* written as a.npy"),
        ({"meta/size": 1, "x": 2}, "'meta/size' of .* has '/' in its name"),
        ({"a;b": 1}, "'a;b' of .* has ';' in its name"),
    ],
)
def test_fields_that_would_share_a_file_are_refused(
    tmp_path: Path, sample: dict[str, Any], said: str
) -> None:
    with pytest.raises(PipelineError, match=said):
        ps.from_dataset([sample] * 3).pack(tmp_path / "p", workers=0)


def test_fields_whose_formats_change_from_sample_to_sample_stay_apart(tmp_path: Path) -> None:
    jpeg, png = b"\xff\xd8\xff 1", b"\x89PNG\r\n\x1a\n 2"
    samples = [(jpeg, png), (png, jpeg), (png, png), (jpeg, png)]
    ps.from_dataset(samples).pack(tmp_path / "p", per_shard=2, workers=0)
    assert TarSource(tmp_path / "p").read(range(4)) == samples


def test_a_packed_folder_is_what_its_manifest_lists(tmp_path: Path) -> None:
    train, valid = tmp_path / "data", tmp_path / "data" / "valid"
    ps.from_dataset(np.arange(10)).pack(train, per_shard=5, workers=0)
    ps.from_dataset(np.arange(100, 105)).pack(valid, workers=0)
    assert [int(x) for x in TarSource(train).read(range(10))] == list(range(10))
    assert len(TarSource(train)) == 10
    (train / "shard-000001.tar").unlink()
    with pytest.raises(SourceError, match=r"shard-000001.tar is missing: .* samples 5 to 9"):
        TarSource(train)


def test_jobs_and_ranks_share_batches_of_a_reservoir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps.from_dataset(np.arange(50)).pack(tmp_path / "p", per_shard=8, workers=0)
    packed, order = ps.from_tar(tmp_path / "p").batch(4), ps.Reservoir(window=12)
    alone = [epochs(packed, 2, order=order, workers=0, seed=1, rank=r, world=2) for r in range(2)]
    whole = epochs(packed, 2, order=order, workers=0, seed=1)
    got: dict[str, Any] = {}

    def run(name: str, **options: Any) -> None:
        more: Any = {"workers": 2, "kind": "threads", "seed": 1, **options}
        got[name] = epochs(packed, 2, order=order, **more)

    jobs: list[dict[str, Any]] = [
        {"name": "one", "share": "jobs"},
        {"name": "two", "share": "jobs"},
        {"name": "rank 0", "share": "ranks", "rank": 0, "world": 2},
        {"name": "rank 1", "share": "ranks", "rank": 1, "world": 2},
    ]
    with own_node(tmp_path, monkeypatch):
        threads = [threading.Thread(target=run, kwargs=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {"one": whole, "two": whole, "rank 0": alone[0], "rank 1": alone[1]}


def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    ps.from_dataset(np.arange(4)).pack(tmp_path / "p", workers=0)
    manifest = tmp_path / "p" / "pack.json"
    manifest.write_text(manifest.read_text().replace("shard-000000.tar", "../../etc/passwd"))
    with pytest.raises(SourceError, match="not the name of a file in this folder"):
        check(tmp_path / "p")


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ps.from_dataset(PAIRS)
    pipeline.pack(tmp_path / "whole", per_shard=5)
    real = sync_folder

    def full(folder: Path) -> None:
        if (folder / "shard-000002.idx").exists():
            raise OSError(28, "No space left on device")
        real(folder)

    monkeypatch.setattr("penstock.source.packed_folder.sync_folder", full)
    with pytest.raises(StoreError, match=r"No space left.*finished shards are kept"):
        pipeline.pack(tmp_path / "p", per_shard=5)
    monkeypatch.setattr("penstock.source.packed_folder.sync_folder", real)
    assert not list((tmp_path / "p").glob(".shard*"))
    pipeline.pack(tmp_path / "p", per_shard=5)
    assert contents(tmp_path / "p") == contents(tmp_path / "whole")


def test_the_sidecar_indexes_are_those_of_dali_and_energon(tmp_path: Path) -> None:
    ps.from_dataset(PAIRS).pack(tmp_path, per_shard=9)
    path = tmp_path / "shard-000000.tar"
    index = scan(LocalRanges(str(path)))
    assert (tmp_path / "shard-000000.idx").read_text() == write_dali(index)
    starts = np.frombuffer((tmp_path / "shard-000000.tar.idx").read_bytes(), dtype="<u8")
    with tarfile.open(path) as archive:
        offsets = [member.offset for member in archive if member.name.endswith(".npy")]
        assert starts.tolist() == [*offsets, archive.offset]
    assert len(load_index(LocalRanges(str(path)))) == 9


LEAKS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
"""WebDataset does not close the files that it reads."""


@LEAKS
def test_webdataset_reads_packed_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    photos = [(encode(picture(9, 9, i)), i) for i in range(11)]
    ps.from_dataset(photos).pack(tmp_path, per_shard=4)
    urls = sorted(str(path) for path in tmp_path.glob("*.tar"))
    read = list(webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg", "cls"))
    assert [(photo, int(label)) for photo, label in read] == photos


@LEAKS
def test_webdatasets_shards_are_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "w-%03d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(10):
            writer.write({"__key__": f"k{i}", "npy": np.arange(i), "cls": i, "json": {"i": i}})
    samples = TarSource(tmp_path).read(range(10))
    assert [(s["__key__"], s["npy"].tolist(), s["cls"], s["json"]) for s in samples] == [
        (f"k{i}", list(range(i)), i, {"i": i}) for i in range(10)
    ]


SCRIPT = """
import numpy as np
import penstock as ps

train = (
    ps.from_dataset(np.arange(12.0))
    .map(np.sqrt, random=False)
    .map(lambda x, rng: x + rng.random())
    .batch(4)
)
"""


def test_the_command_packs_up_to_a_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    target = str(tmp_path / "p")
    assert main(["pack", str(script), "--to", target]) == 1
    assert "<lambda>, which is random" in capsys.readouterr().err
    assert main(["pack", f"{script}:train", "--until", "sqrt", "--to", target]) == 0
    assert "12 samples in 1 shard" in capsys.readouterr().out
    assert np.allclose(TarSource(target).read(range(12)), np.sqrt(np.arange(12.0)))
    assert main(["pack", str(script), "--until", "blur", "--to", target]) == 1
    assert "Its stages: source, sqrt, <lambda>" in capsys.readouterr().err
    assert main(["pack", str(script)]) == 1
    with pytest.raises(PipelineError):
        until(ps.from_dataset(PAIRS), "decode")


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    ps.from_dataset(PAIRS).pack(tmp_path, per_shard=30)
    manifest = read_manifest(folder_at(tmp_path))
    assert manifest is not None
    (shard,) = manifest.shards
    assert shard.sha256 == hashlib.sha256((tmp_path / shard.name).read_bytes()).hexdigest()
    assert manifest.made_by == ["DatasetSource"]
    assert {"penstock", "numpy", "python"} == set(manifest.versions)
