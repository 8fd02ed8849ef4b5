"""A checkpoint asks for no file and hashes nothing, and resuming still refuses other data."""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import loader as loaders
from penstock.errors import StateError
from penstock.fingerprint.walk import Walk
from penstock.source import listing as listings
from penstock.source.listing import Listing

COUNT = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of twenty files, and the same in a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(COUNT):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * number)
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"n": list(range(COUNT))}), tmp_path / "rows" / "a.parquet")
    return tmp_path / "data"


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.jpg"))


def of_folder(folder: Path) -> ps.Pipeline:
    return ps.from_folder(folder).batch(4, collate=list)


def of_files(folder: Path) -> ps.Pipeline:
    return ps.from_files(files(folder), labels=list(range(COUNT))).batch(4, collate=list)


def of_parquet(folder: Path) -> ps.Pipeline:
    return ps.from_parquet(folder.parent / "rows").batch(4)


def of_dataset(folder: Path) -> ps.Pipeline:
    table = np.arange(1000.0)
    numbers = ps.from_dataset([(str(n), n) for n in range(COUNT)], random=False)
    return numbers.map(lambda pair: table[pair[1]], random=False).batch(4)


class Calls:
    """Counts fingerprints, and requests for files below a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for where, name in ((os, "stat"), (os, "scandir"), (os, "open"), (builtins, "open")):
            monkeypatch.setattr(where, name, self._counted(getattr(where, name), str(folder)))
        for kind, name in ((Walk, "__init__"), (Listing, "stats")):
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name), None))

    def _counted(self, function: Callable[..., Any], below: str | None) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if below is None or (args and str(args[0]).startswith(below)):
                self.made.append(f"{function.__qualname__}{args[:1]}")
            return function(*args, **more)

        return call


@pytest.mark.parametrize("make", [of_folder, of_files, of_parquet, of_dataset])
def test_a_hundred_checkpoints_ask_for_no_file_and_hash_nothing(
    folder: Path, make: Callable[[Path], ps.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder).loader(workers=0, order=ps.Weighted([1.0] * COUNT)) as loader:
        epoch = iter(loader)
        next(epoch)
        first = loader.state_dict()
        calls = Calls(folder.parent, monkeypatch)
        states = [loader.state_dict() for _ in range(100)]
        assert calls.made == []
        monkeypatch.undo()
        assert states == [first] * 100
        states[0]["stops"].append("changed by the user")
        states[0]["data"].clear()
        assert loader.state_dict() == first
        assert all(first["data"].values())
        next(epoch)
        later = loader.state_dict()
    assert later["cursor"]["batch"] == 2
    assert {**later, "cursor": 0} == {**first, "cursor": 0}


def test_a_run_without_checkpoints_hashes_no_dataset(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(folder, monkeypatch)
    with of_dataset(folder).loader(workers=0) as loader:
        list(loader)
    assert calls.made == []


# Many files: a sample of them is known at once, all of them later.


class Gate:
    """Holds back the stats of all files until ``open`` is set. Those of a sample pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        slices = Listing.slices

        def held(listing: Listing) -> Iterator[Any]:
            assert self.open.wait(60)
            return slices(listing)

        monkeypatch.setattr(Listing, "slices", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(listings, "SAMPLE", 4)
    monkeypatch.setattr(loaders, "RESUME_WAIT", 60.0)
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def unsampled(folder: Path) -> Path:
    """A file that is not in the sample."""
    listing = ps.from_folder(folder).source.listing
    assert listing is not None
    return Path(listing.path(next(i for i in range(COUNT) if i not in listing.sample())))


def sampled(folder: Path) -> Path:
    listing = ps.from_folder(folder).source.listing
    assert listing is not None
    return Path(listing.path(listing.sample()[2]))


def state_of(folder: Path) -> dict[str, Any]:
    """A checkpoint after the first batch, with all that is known in the end."""
    with of_folder(folder).loader(workers=0) as loader:
        next(iter(loader))
        loader._data.complete()
        return loader.state_dict()


def test_a_checkpoint_does_not_wait_for_all_files(folder: Path, gate: Gate) -> None:
    with of_folder(folder).loader(workers=0) as loader:
        next(iter(loader))
        early = loader.state_dict()
        assert early["data"].keys() == {"names", "sample"}
        gate.open.set()
        loader._data.complete()
        late = loader.state_dict()
    assert late["data"].keys() == {"names", "sample", "all"}
    for state in (early, late):
        with of_folder(folder).loader(workers=0) as loader:
            loader.load_state_dict(state)
            assert len(list(loader)) == COUNT // 4 - 1
    sampled(folder).write_bytes(b"another content")
    for state in (early, late):
        with of_folder(folder).loader(workers=0) as loader, pytest.raises(StateError, match="data"):
            loader.load_state_dict(state)


def test_resume_waits_for_all_files_and_refuses_a_changed_one(folder: Path, gate: Gate) -> None:
    gate.open.set()
    state = state_of(folder)
    unsampled(folder).write_bytes(b"another content")
    with of_folder(folder).loader(workers=0) as loader:
        with pytest.raises(StateError, match="files, sizes or times have changed"):
            loader.load_state_dict(state)
        assert len(list(loader)) == COUNT // 4  # the loader is unchanged


def test_a_change_found_after_the_wait_is_raised_at_the_next_batch(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open.set()
    state = state_of(folder)
    unsampled(folder).write_bytes(b"another content")
    gate.open.clear()
    monkeypatch.setattr(loaders, "RESUME_WAIT", 0.0)
    with of_folder(folder).loader(workers=0) as loader:
        loader.load_state_dict(state)
        epoch = iter(loader)
        next(epoch)
        gate.open.set()
        loader._data.complete()
        for _ in range(2):  # it cannot be overlooked
            with pytest.raises(StateError, match="became known after load_state_dict"):
                next(epoch)


def test_equal_data_found_after_the_wait_changes_nothing(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open.set()
    state = state_of(folder)
    gate.open.clear()
    monkeypatch.setattr(loaders, "RESUME_WAIT", 0.0)
    with of_folder(folder).loader(workers=0) as loader:
        loader.load_state_dict(state)
        epoch = iter(loader)
        next(epoch)
        gate.open.set()
        loader._data.complete()
        assert len(list(epoch)) == COUNT // 4 - 2


def test_a_renamed_file_is_refused_whatever_else_is_known(folder: Path, gate: Gate) -> None:
    with of_folder(folder).loader(workers=0) as loader:
        state = loader.state_dict()
        path = unsampled(folder)
        path.rename(path.with_name("99.jpg"))
        other = of_folder(folder).loader(workers=0)
        with other, pytest.raises(StateError, match="names of files, their order or labels"):
            other.load_state_dict(state)
        gate.open.set()


def test_another_kind_of_data_is_refused(folder: Path, gate: Gate) -> None:
    numbers = ps.from_dataset(np.arange(float(COUNT))).batch(4, collate=list)
    with of_folder(folder).loader(workers=0) as loader, numbers.loader(workers=0) as other:
        for one, two in ((loader, other), (other, loader)):
            with pytest.raises(StateError, match="the data is not the same"):
                one.load_state_dict(two.state_dict())
        gate.open.set()


def test_a_missing_file_does_not_prevent_checkpoints(folder: Path) -> None:
    pipeline = of_folder(folder)
    files(folder)[7].unlink()
    with pipeline.loader(workers=0, on_error="skip", shuffle=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with pipeline.loader(workers=0, on_error="skip", shuffle=False) as loader:
        loader.load_state_dict(state)


def test_a_checkpoint_of_the_format_before_is_read(folder: Path) -> None:
    state = state_of(folder)
    old = {**state, "version": 2, "data": state["data"]["all"]}
    with of_folder(folder).loader(workers=0) as loader:
        loader.load_state_dict(old)
        assert len(list(loader)) == COUNT // 4 - 1
    files(folder)[5].write_bytes(b"another content")
    with of_folder(folder).loader(workers=0) as loader, pytest.raises(StateError, match="data is"):
        loader.load_state_dict(old)


def test_a_closed_loader_leaves_no_thread(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = of_folder(folder).loader(workers=0)
    next(iter(loader))
    thread = loader._data._thread
    assert thread is not None
    assert thread.is_alive()
    join = thread.join

    def open_and_join(limit: float | None = None) -> None:
        gate.open.set()
        join(60)

    monkeypatch.setattr(thread, "join", open_and_join)
    loader.close()
    assert not thread.is_alive()
