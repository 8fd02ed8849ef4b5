"""Packing into a bucket: whole shards only, resumable, with the bytes of a local folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from benchmarks.storage.server import Conditions, ObjectServer
from penstock.cli import main
from penstock.errors import SourceError, StoreError
from penstock.pack.pack import check
from penstock.source.packed_folder import RemoteFolder, folder_at

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "bucket").mkdir()
    with ObjectServer(tmp_path / "bucket") as running:
        yield running


def pipeline() -> ps.Pipeline:
    return ps.from_dataset(np.arange(40.0).reshape(20, 2))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_packed_bucket_has_the_bytes_of_a_packed_folder(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline().pack(tmp_path / "local", per_shard=6, workers=0)
    # The store fails for good in the third shard: nothing of that shard is there.
    real, written = RemoteFolder.writing, []

    def failing(self: RemoteFolder, name: str) -> Any:
        written.append(name)
        if name == "shard-000002.tar":
            raise StoreError("the network is gone")
        return real(self, name)

    url = server.url("packed")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "writing", failing)
        with pytest.raises(StoreError, match="gone"):
            pipeline().pack(url, per_shard=6, workers=0, storage=server.storage)
    assert not (tmp_path / "bucket/packed/shard-000002.tar").exists()
    with pytest.raises(SourceError, match="not packed to the end: it has 12 of 20"):
        ps.from_tar(url, storage=server.storage)
    report = pipeline().pack(url, workers=0, storage=server.storage)
    assert (report.written, report.shards, report.folder) == (2, 4, url)
    assert contents(tmp_path / "bucket/packed") == contents(tmp_path / "local")
    found = ps.from_tar(url, storage=server.storage).source
    assert np.stack(found.read(range(20))).tolist() == np.arange(40.0).reshape(20, 2).tolist()


def test_indexes_of_a_packed_bucket_are_read_and_not_made(
    server: ObjectServer, tmp_path: Path
) -> None:
    pipeline().pack(server.url("packed"), per_shard=5, workers=0, storage=server.storage)
    shutil.rmtree(tmp_path / "kept")  # as on another machine
    server.requests.clear()
    ps.from_tar(server.url("packed"), storage=server.storage, version="1")
    asked = server.gets()
    assert sum(path.endswith(".npz") for path in asked) == 4
    before = len(asked)
    ps.from_tar(server.url("packed"), storage=server.storage, version="1")
    assert server.gets()[before:] == ["/bucket/packed/pack.json"]


def test_check_finds_damage_in_a_bucket(
    server: ObjectServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("packed")
    pipeline().pack(url, per_shard=6, workers=0, storage=server.storage)
    assert check(url, storage=server.storage).wrong == ()
    shard = tmp_path / "bucket/packed/shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    (tmp_path / "bucket/packed/shard-000003.tar").unlink()
    settings = [f"--option={name}={value}" for name, value in server.storage.items()]
    assert main(["pack", "--check", url, *settings]) == 1
    assert capsys.readouterr().out == (
        "shard-000001.tar is damaged; remove it, and pack again to write it\n"
        "shard-000003.tar is missing or cannot be read; pack again to write it\n"
    )


def test_uploads_that_fail_are_made_again(server: ObjectServer) -> None:
    failures = iter(["error", "limit"])
    server.conditions = Conditions(fault=lambda path: next(failures, None))
    report = pipeline().pack(server.url("x"), per_shard=20, workers=0, storage=server.storage)
    assert (report.written, next(failures, None)) == (1, None)
    assert check(server.url("x"), storage=server.storage).wrong == ()


def test_a_process_that_is_killed_while_it_writes_leaves_no_file_behind(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with folder_at(server.url("packed"), server.storage).writing("one") as part:
        part.write_bytes(b"content")
        assert list(scratch.iterdir()) == []
    assert (tmp_path / "bucket/packed/one").read_bytes() == b"content"
