"""Shards by URL: the same samples as from disk, few requests, and faults as for single objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from benchmarks.storage.server import Conditions, ObjectServer
from penstock.errors import PipelineError, SampleError, SourceError
from penstock.source.objects import connection
from tests.support.mds import write_mds
from tests.support.tars import numbered, write_tar

pytest.importorskip("obstore", reason="obstore is not installed")

SHARDS, SAMPLES = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as tar shards, as MDS and as Parquet."""
    root = tmp_path_factory.mktemp("bucket")
    (root / "tar").mkdir()
    for shard in range(SHARDS):
        first = shard * SAMPLES
        write_tar(root / "tar" / f"train-{shard:03d}.tar", numbered(first, first + SAMPLES))
    everything = numbered(0, SHARDS * SAMPLES)
    rows = [
        {"text": sample["txt"], "label": int(sample["cls"]).to_bytes(8, "little")}
        for _, sample in everything
    ]
    write_mds(root / "mds", {"text": "bytes", "label": "int"}, rows, SAMPLES)
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (root / "parquet").mkdir()
    for shard in range(2):
        part = everything[shard * 24 : shard * 24 + 24]
        table = pa.table(
            {
                "text": [sample["txt"] for _, sample in part],
                "label": [int(sample["cls"]) for _, sample in part],
                "unused": [bytes(5000) for _ in part],
            }
        )
        pq.write_table(table, root / "parquet" / f"{shard}.parquet", row_group_size=8)
    return root


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ObjectServer]:
    with ObjectServer(folder) as server:
        yield server


@pytest.fixture
def server(
    running: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    running.conditions = Conditions()
    running.requests.clear()
    yield running
    running.conditions = Conditions()


def opened(kind: str, place: str, storage: dict[str, str] | None) -> ps.Pipeline:
    if kind == "tar":
        names = f"{place}/tar/train-{{000..003}}.tar"
        return ps.from_tar(names, fields=("txt", "cls"), storage=storage)
    if kind == "mds":
        return ps.from_mds(f"{place}/mds", storage=storage)
    return ps.from_parquet(f"{place}/parquet", columns=["text", "label"], storage=storage)


def batches(pipeline: ps.Pipeline, **options: Any) -> list[Any]:
    with pipeline.batch(5, collate=list).loader(seed=3, **options) as loader:
        return list(loader)


KINDS = ["tar", "mds", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [None, ps.Reservoir(window=10)])
def test_shards_in_a_bucket_are_the_same_as_on_disk(
    server: ObjectServer, folder: Path, kind: str, order: Any
) -> None:
    options: dict[str, Any] = {"workers": 2, "kind": "threads", "order": order}
    remote = batches(opened(kind, server.url(), server.storage), **options)
    assert remote == batches(opened(kind, str(folder), None), **options)
    assert sum(map(len, remote)) == SHARDS * SAMPLES


def test_names_are_urls_and_identities_follow_the_data(server: ObjectServer, folder: Path) -> None:
    source = opened("tar", server.url(), server.storage).source
    assert source.name(13) == "s3://bucket/tar/train-001.tar/000013.txt"
    before = source.identity()
    path = folder / "tar" / "train-003.tar"
    content = path.read_bytes()
    path.write_bytes(content + bytes(512))
    try:
        url = [server.url(f"tar/train-00{n}.tar") for n in range(4)]
        again = ps.from_tar(url, fields=("txt", "cls"), storage=server.storage, version="2")
        assert again.source.identity() != before
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("names", ["tar", "tar/train-*.tar", "tar/train-{000..003}.tar"])
def test_folders_patterns_and_braces_name_the_same_shards(server: ObjectServer, names: str) -> None:
    source = ps.from_tar(server.url(names), fields="cls", storage=server.storage).source
    assert source.read(range(0, 48, 12)) == [0, 12, 24, 36]


def test_an_index_is_made_once_and_kept(server: ObjectServer) -> None:
    opened("tar", server.url(), server.storage)
    assert server.gets()
    server.requests.clear()
    source = opened("tar", server.url(), server.storage).source
    assert server.requests == []
    assert source.read([47]) == [(b"text 47".decode(), 47)]


def test_a_sequence_is_fetched_in_few_requests(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fetcher of its own: after some dozen requests one may make late requests twice.
    monkeypatch.setattr(connection, "_names", {})
    pipeline = opened("mds", server.url(), server.storage)
    server.requests.clear()
    order = ps.Reservoir(window=48)
    found = batches(pipeline, workers=1, kind="threads", order=order)
    assert sorted(row["label"] for batch in found for row in batch) == list(range(48))
    # Each shard is smaller than one request. The samples of the first batch are fetched before all
    # others, and a shard may be cut where what was announced ends.
    assert len(server.gets()) <= 5 + 4 * SHARDS


def test_a_tiny_batch_is_one_message_and_neighbours_are_one_request(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fetcher of its own: after some dozen requests one may make late requests twice.
    monkeypatch.setattr(connection, "_names", {})
    source = opened("mds", server.url(), server.storage).source
    server.requests.clear()
    assert [row["label"] for row in source.read([5, 3, 4, 20])] == [5, 3, 4, 20]
    assert Counter(server.gets()) == {
        "/bucket/mds/shard.00000.mds": 1,
        "/bucket/mds/shard.00001.mds": 1,
    }


def test_a_cache_asks_for_nothing_in_the_second_epoch(server: ObjectServer) -> None:
    pipeline = opened("tar", server.url(), server.storage).cache("1MB").batch(5)
    orders: list[Any] = [None, ps.Reservoir(window=8)]
    for order in orders:
        with pipeline.loader(seed=0, workers=2, kind="threads", order=order) as loader:
            first = [label for _, labels in loader for label in labels.tolist()]
            server.requests.clear()
            second = [label for _, labels in loader for label in labels.tolist()]
        assert sorted(first) == sorted(second) == list(range(48))
        assert server.gets() == []


@pytest.mark.parametrize("fault", ["error", "reset", "truncate"])
def test_ranges_that_fail_are_fetched_again(server: ObjectServer, folder: Path, fault: str) -> None:
    failed: Counter[str] = Counter()

    def once(path: str) -> str | None:
        failed[path] += 1
        return fault if failed[path] == 1 else None

    remote = opened("mds", server.url(), server.storage)
    server.conditions = Conditions(fault=once)
    local = batches(opened("mds", str(folder), None), workers=0)
    assert batches(remote, workers=2, kind="threads") == local
    assert min(failed.values()) >= 2


def test_a_shard_that_was_changed_under_way_is_refused(server: ObjectServer, folder: Path) -> None:
    pipeline = opened("mds", server.url(), server.storage)
    path = folder / "mds" / "shard.00002.mds"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xff")
    try:
        with pytest.raises(SourceError, match=r"shard\.00002\.mds .*it was changed"):
            pipeline.source.read([30])
        with pytest.raises(SampleError, match="it was changed"):
            batches(pipeline, workers=1, kind="threads")
    finally:
        path.write_bytes(content)


def test_a_shard_that_is_cut_off_is_refused_when_it_is_indexed(
    server: ObjectServer, folder: Path
) -> None:
    whole = (folder / "tar" / "train-000.tar").read_bytes()
    path = folder / "cut.tar"
    path.write_bytes(whole[:1536])
    with pytest.raises(SourceError, match=r"s3://bucket/cut\.tar is cut off"):
        ps.from_tar(server.url("cut.tar"), storage=server.storage)


def test_what_cannot_be_a_shard_is_refused(server: ObjectServer, folder: Path) -> None:
    with pytest.raises(SourceError, match=r"missing\.tar.*does not exist"):
        ps.from_tar(server.url("missing.tar"), storage=server.storage)
    with pytest.raises(SourceError, match=r"not a pattern that matches"):
        ps.from_tar(server.url("mds"), storage=server.storage)
    with pytest.raises(PipelineError, match=r"is a URL and .* is a local path"):
        ps.from_tar([server.url("tar/train-000.tar"), str(folder / "tar/train-001.tar")])
    with pytest.raises(PipelineError, match="storage and version are for URLs"):
        ps.from_tar(folder / "tar", storage={})
    (folder / "packed.tar.gz").write_bytes(b"x")
    with pytest.raises(SourceError, match="is compressed"):
        ps.from_tar(server.url("packed.tar.gz"), storage=server.storage)


def test_parquet_fetches_only_the_columns_that_are_read(server: ObjectServer, folder: Path) -> None:
    source = opened("parquet", server.url(), server.storage).source
    parts = source.shard_parts(np.arange(len(source)))  # type: ignore[attr-defined]
    assert 0 < parts.sizes.sum() < 5000
    assert source.read([0])[0]["text"] == b"text 0"
