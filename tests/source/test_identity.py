"""The identity of a loader's data is worked out once, part by part, and never in the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.source import DatasetSource, FilesSource
from penstock.source import listing as listings
from penstock.source.identity import DataIdentity
from penstock.source.listing import Listing
from penstock.source.source import Source


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{number:02}.bin" for number in range(20)]
    for path in found:
        path.write_bytes(b"x")
    return found


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty files are many: more than a sample, and several slices."""
    monkeypatch.setattr(listings, "SAMPLE", 4)
    monkeypatch.setattr(listings, "SLICE", 5)


class Gate:
    """Holds back the second slice of every listing until ``open`` is set.

    ``slices``: the method without the gate.
    """

    slices = Listing.slices

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()


@pytest.fixture
def gate(many: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    def held(self: Listing) -> Iterator[Any]:
        for number, stats in enumerate(Gate.slices(self)):
            if number == 1:
                gate.reached.set()
                assert gate.open.wait(60)
            yield stats

    monkeypatch.setattr(Listing, "slices", held)
    yield gate
    gate.open.set()


def test_few_files_are_known_in_full_at_once(paths: list[Path]) -> None:
    identity = DataIdentity(FilesSource(paths))
    parts = identity.parts()
    assert parts["all"] == FilesSource(paths).identity()
    assert all(parts.values())
    assert parts.keys() == {"names", "sample", "all"}
    assert identity.complete() == parts
    identity.close()


def test_names_and_a_sample_are_known_before_all_files(paths: list[Path], gate: Gate) -> None:
    source = FilesSource(paths)
    identity = DataIdentity(source)
    early = identity.parts()
    assert early.keys() == {"names", "sample"}
    assert gate.reached.wait(60)
    assert identity.pending
    assert identity.complete(limit=0.0) == early
    gate.open.set()
    assert identity.complete() == {**early, "all": source.identity()}
    assert not identity.pending


def test_a_part_is_worked_out_once(paths: list[Path], many: None) -> None:
    identity = DataIdentity(FilesSource(paths))
    before = identity.complete()
    for path in paths:
        path.write_bytes(b"longer")
    assert identity.complete() == before == identity.parts()
    after = DataIdentity(FilesSource(paths)).complete()
    assert after["names"] == before["names"]
    assert after["sample"] != before["sample"]
    assert after["all"] != before["all"]


def test_every_file_counts_in_all_and_only_some_in_the_sample(
    paths: list[Path], many: None
) -> None:
    source = FilesSource(paths)
    before = DataIdentity(source).complete()
    chosen = set(source.listing.sample())
    for index, path in enumerate(paths):
        stat = path.stat()
        os.utime(path, ns=(0, stat.st_mtime_ns + 1))
        changed = DataIdentity(source).complete()
        assert changed["all"] != before["all"]
        assert (changed["sample"] != before["sample"]) == (index in chosen)
        os.utime(path, ns=(0, stat.st_mtime_ns))
    assert DataIdentity(source).complete() == before


def test_names_depend_on_order_and_labels(paths: list[Path]) -> None:
    sources = [FilesSource(paths), FilesSource(paths[::-1]), FilesSource(paths, [0] * 20)]
    assert len({DataIdentity(source).parts()["names"] for source in sources}) == 3


def test_on_a_network_only_a_sample_is_asked_for(
    paths: list[Path], many: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listings, "any_on_network", lambda paths: True)
    looked: list[int] = []
    stats = Listing.stats

    def noted(self: Listing, first: int, last: int) -> Any:
        looked.extend(range(first, last))
        return stats(self, first, last)

    monkeypatch.setattr(Listing, "stats", noted)
    source = FilesSource(paths)
    identity = DataIdentity(source)
    assert identity.complete().keys() == {"names", "sample"}
    assert not identity.pending
    assert sorted(looked) == source.listing.sample()


def test_a_file_that_is_gone_is_part_of_the_identity(paths: list[Path]) -> None:
    source = FilesSource(paths)
    before = DataIdentity(source).complete()
    paths[3].unlink()
    after = DataIdentity(source).complete()
    assert after["names"] == before["names"]
    assert after["all"] != before["all"]


def test_closing_ends_the_work(
    paths: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = DataIdentity(FilesSource(paths))
    identity.begin()
    assert gate.reached.wait(60)
    thread = next(t for t in threading.enumerate() if t.name == "penstock-identity")
    join = thread.join

    def open_and_join(limit: float) -> None:
        gate.open.set()
        join(60)

    monkeypatch.setattr(thread, "join", open_and_join)
    identity.close()
    assert not identity.pending
    assert identity.parts().keys() == {"names", "sample"}
    assert not thread.is_alive()


def test_it_may_be_closed_by_its_own_thread(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = DataIdentity(FilesSource(paths))
    sample_stats = Listing.sample_stats

    def closing(self: Listing) -> Any:
        identity.close()
        return sample_stats(self)

    monkeypatch.setattr(Listing, "sample_stats", closing)
    assert all(identity.complete().values())


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_works_it_out_by_itself(
    paths: list[Path], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FilesSource(paths)
    identity = DataIdentity(source)
    identity.begin()
    assert gate.reached.wait(60)
    expected = source.identity()
    # The thread of the parent waits at the gate, and the child has none.
    monkeypatch.setattr(Listing, "slices", Gate.slices)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(identity.complete().get("all")).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    assert os.read(reading, 100).decode() == expected
    os.close(reading)
    gate.open.set()
    assert identity.complete()["all"] == expected


def test_labels_without_a_fingerprint_leave_the_data_unknown(paths: list[Path]) -> None:
    labels: list[Any] = [iter([]) for _ in paths]
    assert not any(DataIdentity(FilesSource(paths, labels)).complete().values())


def test_an_error_of_the_thread_is_raised_where_the_identity_is_asked_for(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Listing) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Listing, "sample_stats", fail)
    identity = DataIdentity(FilesSource(paths))
    identity.begin()
    lengths = set()
    for _ in range(3):
        with pytest.raises(MemoryError, match="no room") as caught:
            identity.complete()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


class Counting(Source):
    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 3

    def identity(self) -> str:
        self.calls += 1
        return f"version {self.calls}"


def test_data_that_is_not_in_files_is_identified_when_asked_for_and_kept() -> None:
    source = Counting()
    identity = DataIdentity(source)
    identity.begin()
    identity.renew()
    assert source.calls == 0
    assert [identity.parts() for _ in range(3)] == [{"all": "version 1"}] * 3
    identity.renew()
    assert identity.complete() == {"all": "version 2"}
    assert source.calls == 2


def test_a_dataset_that_cannot_be_fingerprinted_is_unknown() -> None:
    assert DataIdentity(DatasetSource([iter([])])).parts() == {"all": None}
    assert DataIdentity(DatasetSource(np.arange(3))).parts()["all"] is not None
