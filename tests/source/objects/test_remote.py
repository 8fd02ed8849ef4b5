"""Folders and files by URL: the same samples as from disk, also when requests fail."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from benchmarks.storage.server import Conditions, ObjectServer
from penstock.errors import PipelineError, SampleError, SourceError
from penstock.source.objects import connection, listing
from penstock.source.remote import RemoteFilesSource, RemoteFolderSource

pytest.importorskip("obstore", reason="obstore is not installed")

PATIENCE = 60.0
FILES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes; a name with a space and a plus, which URLs quote."""
    root = tmp_path_factory.mktemp("bucket")
    for number in range(FILES):
        name = f"cl ass+{number % 3}/deep/{number:03d}.jpg" if number % 2 else f"b/{number}.jpg"
        path = root / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (1000 + number))
    (root / "train" / "b" / "notes.txt").write_text("not an image")
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


def source(server: ObjectServer, **options: Any) -> RemoteFolderSource:
    return RemoteFolderSource(server.url("train"), storage=server.storage, **options)


def batches(pipeline: ps.Pipeline, **options: Any) -> list[tuple[list[bytes], list[int]]]:
    with pipeline.batch(5).loader(seed=3, **options) as loader:
        return [(list(contents), labels.tolist()) for contents, labels in loader]


def wait_until(reached: Callable[[], bool]) -> bool:
    limit = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def test_a_folder_in_a_bucket_is_the_same_as_on_disk(server: ObjectServer, folder: Path) -> None:
    local = ps.from_folder(folder / "train")
    remote = ps.from_folder(server.url("train"), storage=server.storage)
    assert batches(remote, workers=2) == batches(local, workers=2)


def test_labels_classes_and_names_are_those_of_the_local_folder(
    server: ObjectServer, folder: Path
) -> None:
    found = source(server)
    local = ps.from_folder(folder / "train").source
    assert isinstance(local, ps.source.FolderSource)
    assert found.classes == local.classes
    assert found.read(range(len(found))) == local.read(range(len(local)))
    top = f"{folder}/train/"
    assert [found.name(i).removeprefix("s3://bucket/train/") for i in range(FILES)] == [
        local.name(i).removeprefix(top) for i in range(FILES)
    ]


def test_each_object_is_fetched_once_an_epoch(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fetcher of its own: after some dozen requests one may make late requests twice.
    monkeypatch.setattr(connection, "_names", {})
    pipeline = ps.from_folder(server.url("train"), storage=server.storage)
    order = [index for batch in _indices(pipeline, seed=3) for index in batch]
    server.requests.clear()
    batches(pipeline, workers=1, kind="threads")
    asked = server.gets()[: len(order)]
    names = [pipeline.source.name(index).replace("s3://", "/") for index in order]
    assert Counter(asked) == Counter(names)


def _indices(pipeline: ps.Pipeline, seed: int) -> list[list[int]]:
    dataset = ps.from_dataset(np.arange(len(pipeline.source)))
    with dataset.batch(5).loader(seed=seed, workers=0) as loader:
        return [batch.tolist() for batch in loader]


def test_a_cache_asks_for_nothing_in_the_second_epoch(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fetcher of its own: after some dozen requests one may make late requests twice.
    monkeypatch.setattr(connection, "_names", {})
    pipeline = ps.from_folder(server.url("train"), storage=server.storage).cache("1MB").batch(5)
    with pipeline.loader(seed=0, workers=2, kind="threads") as loader:
        for _ in loader:
            pass
        first = len(server.gets())
        for _ in loader:
            pass
    assert first == FILES
    assert len(server.gets()) == FILES


def test_each_level_above_a_bucket_is_hit_by_exactly_what_it_holds(server: ObjectServer) -> None:
    size = 1012  # of a mean file; each level counts some bytes more for a sample
    levels = (
        ps.from_folder(server.url("train"), storage=server.storage)
        .cache(f"{14 * size}B", where="disk")
        .cache(f"{6 * size}B")
        .batch(5)
    )
    with levels.loader(seed=0, workers=2, kind="threads") as loader:
        counts = []
        for _ in range(3):
            for _ in loader:
                pass
            counts.append([(level.hits, level.misses) for level in loader.stats().caches])
        disk, memory = (level.admitted for level in loader.stats().caches)
    assert 0 < memory < disk < FILES
    # What is in memory is on the disk too, and is not asked for there.
    assert counts[0] == [(0, FILES), (0, FILES)]
    for epoch, (on_disk, in_memory) in enumerate(counts):
        assert in_memory == (epoch * memory, FILES + epoch * (FILES - memory))
        assert on_disk == (epoch * (disk - memory), FILES + epoch * (FILES - disk))
    server.requests.clear()
    with levels.loader(seed=0, workers=2, kind="threads") as loader:
        for _ in loader:
            pass
        later = loader.stats()
    # The disk is kept for the next run, the memory is not.
    assert later.caches[0].hits == disk
    assert later.caches[1].hits == 0


@pytest.mark.parametrize("fault", ["error", "limit", "reset", "truncate"])
def test_requests_that_fail_are_made_again(server: ObjectServer, folder: Path, fault: str) -> None:
    failed: Counter[str] = Counter()

    def once(path: str) -> str | None:
        failed[path] += 1
        return fault if failed[path] == 1 else None

    server.conditions = Conditions(fault=once)
    found = source(server)
    local = ps.from_folder(folder / "train").source
    assert found.read(range(6)) == local.read(range(6))
    assert found.objects.stats().retries >= 6


def test_an_object_that_was_changed_after_it_was_listed_is_refused(
    server: ObjectServer, folder: Path
) -> None:
    found = source(server)
    changed = next((folder / "train" / "b").glob("*.jpg"))
    before = changed.read_bytes()
    index = next(i for i in range(FILES) if found.name(i).endswith(f"b/{changed.name}"))
    changed.write_bytes(b"x" * len(before))  # the same size, another version
    try:
        with pytest.raises(SourceError, match=r"it was changed: .* list"):
            found.read([index])
    finally:
        changed.write_bytes(before)


def test_a_missing_object_is_a_bad_sample_with_its_name(server: ObjectServer) -> None:
    urls = [server.url("train/b/0.jpg"), server.url("train/b/none.jpg")]
    pipeline = ps.from_files(urls, storage=server.storage).batch(1)
    with (
        pipeline.loader(shuffle=False, workers=0) as loader,
        pytest.raises(SampleError, match=r"none\.jpg .*it does not exist"),
    ):
        list(loader)


def test_files_by_url_are_read_in_worker_processes(server: ObjectServer, folder: Path) -> None:
    found = [f"train/b/{number}.jpg" for number in (0, 2, 4, 6)]
    pipeline = ps.from_files([server.url(path) for path in found], storage=server.storage)
    with pipeline.batch(2).loader(shuffle=False, workers=2, kind="processes") as loader:
        contents = [content for batch in loader for content in batch]
    assert contents == [(folder / path).read_bytes() for path in found]


def test_a_forked_process_gets_its_own_answers(server: ObjectServer, folder: Path) -> None:
    found = source(server)
    found.read([0])
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"same" if found.read([1]) == found.read([1]) else b"other")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 5) == b"same"
    os.close(reading)
    os.close(writing)


def test_a_fetcher_that_is_killed_is_started_again(server: ObjectServer) -> None:
    found = source(server)
    expected = found.read([0, 1])
    [process] = _fetchers()
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    assert found.read([0, 1]) == expected


def test_a_fetcher_that_is_killed_before_it_lists_is_started_again(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = connection._send
    asked: list[str] = []

    def send_to_nobody(to: socket.socket, header: list[Any]) -> None:
        if header[0] == "list" and "list" not in asked:
            for process in _fetchers():
                process.kill()
                process.wait(PATIENCE)
        asked.append(header[0])
        send(to, header)

    monkeypatch.setattr(connection, "_send", send_to_nobody)
    assert len(source(server)) == FILES
    assert asked.count("list") == 2


def test_a_fetcher_that_ended_before_anybody_connected_is_started_again(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_names", {})
    monkeypatch.setattr(connection, "STARTING", PATIENCE)
    start = connection._start
    started: list[str] = []

    def too_early(name: str) -> subprocess.Popen[bytes]:
        started.append(name)
        if len(started) > 1:
            return start(name)
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process

    monkeypatch.setattr(connection, "_start", too_early)
    assert len(source(server)) == FILES
    assert len(started) == 2


def test_the_fetcher_ends_when_nobody_needs_it(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_names", {})
    before = {process.pid for process in _fetchers()}
    found = source(server)
    found.read([0])
    [mine] = [process for process in _fetchers() if process.pid not in before]
    del found
    assert wait_until(lambda: not mine.is_running() or mine.status() == psutil.STATUS_ZOMBIE)


def _fetchers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "penstock.source.objects.fetcher" in child.cmdline()]


def test_a_bucket_is_listed_once_for_processes_that_start_together(server: ObjectServer) -> None:
    first, second = source(server), source(server)
    assert first.identity() == second.identity()
    assert [line for line in server.requests if line.startswith("LIST")] == ["LIST bucket"]


def test_a_listing_without_a_version_is_made_again_later(
    server: ObjectServer, tmp_path: Path
) -> None:
    source(server)
    source(server, version="one")
    for kept in (tmp_path / "kept" / "listings").glob("*.npz"):
        os.utime(kept, (0, 0))
    server.requests.clear()
    source(server, version="one")
    assert server.requests == []
    source(server)
    assert server.requests == ["LIST bucket"]


def test_a_listing_may_be_removed_while_it_is_read(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(server)
    load = listing._load

    def load_and_remove(kept: Path, longest: float | None) -> Any:
        found = load(kept, longest)
        kept.unlink()
        return found

    monkeypatch.setattr(listing, "_load", load_and_remove)
    server.requests.clear()
    assert len(source(server)) == FILES
    assert server.requests == []


def test_a_damaged_listing_is_made_again(server: ObjectServer, tmp_path: Path) -> None:
    source(server, version="one")
    [kept] = (tmp_path / "kept" / "listings").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:-40])
    assert len(source(server, version="one")) == FILES


def test_an_identity_follows_the_data(server: ObjectServer, folder: Path) -> None:
    url = server.url("train/b/0.jpg")
    before = RemoteFilesSource([url], storage=server.storage).identity()
    path = folder / "train" / "b" / "0.jpg"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content) + 1))
    try:
        after = RemoteFilesSource([url], storage=server.storage).identity()
    finally:
        path.write_bytes(content)
    assert before != after
    assert before == RemoteFilesSource([url], storage=server.storage).identity()


def test_file_urls_are_local_paths(folder: Path) -> None:
    by_url = ps.from_folder(f"file://{folder}/train")
    assert by_url.source.name(0) == ps.from_folder(folder / "train").source.name(0)
    one = f"file://{folder}/train/b/0.jpg"
    assert ps.from_files([one]).source.name(0) == f"{folder}/train/b/0.jpg"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.from_folder("s3:///train"), "names no bucket"),
        (lambda: ps.from_folder("s3://bucket/a?signed=1"), "query or fragment"),
        (lambda: ps.from_folder("file://other/data"), "on the machine other"),
        (lambda: ps.from_folder("/data", storage={}), "storage and version are for URLs"),
        (lambda: ps.from_files(["/data/a.jpg"], storage={}), "storage is for URLs"),
        (lambda: ps.from_files(["/a.jpg", "s3://b/a.jpg"]), "is a URL and '/a.jpg' is a local"),
        (lambda: ps.from_files(["s3://a/1.jpg", "s3://b/1.jpg"]), "several stores"),
        (lambda: ps.from_files(["s3://a/1.jpg"], [1, 2]), "1 URLs and 2 labels"),
        (lambda: ps.from_folder("http://127.0.0.1:9/photos"), "cannot list its files"),
        (
            lambda: ps.from_folder("nosuch://bucket/a"),
            "needs fsspec and its package|cannot be used",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_when_the_pipeline_is_made(
    make: Callable[[], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    with pytest.raises(PipelineError, match=message):
        make()


def test_an_empty_folder_in_a_bucket_is_an_error(server: ObjectServer) -> None:
    with pytest.raises(SourceError, match="no object below s3://bucket/nothing/"):
        RemoteFolderSource(server.url("nothing"), storage=server.storage)


def test_a_connection_in_a_cycle_is_closed_without_a_warning() -> None:
    ours, theirs = socket.socketpair()
    link = connection._ThreadConnection(ours)
    # Loaders that raised are in cycles with their tracebacks. The collector begins with the oldest
    # object, the socket, which warns unless it is closed by then.
    cycle: list[Any] = [ours, link]
    cycle.append(cycle)
    del ours, link, cycle
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert not caught
    assert theirs.recv(1) == b""
    theirs.close()


def test_buckets_of_one_name_at_two_endpoints_are_two_stores(
    server: ObjectServer, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "train" / "b"
    other.mkdir(parents=True)
    for number in range(4):
        (other / f"{number}.jpg").write_bytes(b"other")
    with ObjectServer(tmp_path / "other") as second:
        one, two = source(server), source(second)
        assert (len(one), len(two)) == (FILES, 4)
        first = one.read([0])
        assert [content for content, _ in two.read(range(4))] == [b"other"] * 4
        assert one.read([0]) == first  # not asked of the store that was opened last


def test_a_loader_that_begins_leaves_what_another_one_has_announced(server: ObjectServer) -> None:
    train, valid = source(server).objects, source(server).objects
    held = train.stats().bytes_held
    train.expect(range(10))
    assert wait_until(lambda: train.stats().bytes_held > held + 9000)
    valid.forget()
    assert train.stats().bytes_held > held + 9000
    train.forget()
    assert wait_until(lambda: train.stats().bytes_held == held)
