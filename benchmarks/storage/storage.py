"""Photographs as files, tar and MDS, from a cold disk and an object store: loaders side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.alone import ROOT, AloneError, run_alone
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.environments import installed_versions, interpreter, process_environment
from benchmarks.harness.measure import Contestant, peer_names, progress, turns
from benchmarks.harness.report import Result, Table
from benchmarks.harness.workloads import image_files
from benchmarks.storage import readers
from benchmarks.storage.mds_writer import write_mds
from benchmarks.storage.readers import Stored, cold, one_epoch, variables

MB = 1_000_000
SHARDS = 8
"""Shards of the data. Few, because it is small; each worker of a peer needs some of its own."""

MANY = 16
"""Workers of a peer that waits for one object at a time, beside those of the command line."""

TIMEOUT = 120.0


@dataclass(frozen=True)
class Condition:
    """Where the data is. ``latency``, ``slow``: of the server, in seconds; 0: on the disk."""

    name: str
    latency: float = 0.0
    slow: float = 0.0
    slow_share: float = 0.0


CONDITIONS = (
    Condition("disk"),
    Condition("20ms", 0.02, 1.0, 0.01),
    Condition("100ms", 0.1, 1.0, 0.01),
)


@dataclass(frozen=True)
class Reader:
    """A contestant. ``form``: the data that it reads; ``where``: from disk, object store or both.

    ``workers``: if it has more than the command line says.
    """

    contestant: Contestant[Stored]
    form: str
    where: tuple[str, ...] = ("disk", "objects")
    workers: int | None = None


OURS = ("penstock", "obstore")

READERS = (
    Reader(Contestant("Penstock, files", readers.penstock_files, OURS, ours=True), "files"),
    Reader(Contestant("Penstock, tar", readers.penstock_tar, OURS, ours=True), "tar"),
    Reader(Contestant("Penstock, MDS", readers.penstock_mds, OURS, ours=True), "mds"),
    Reader(
        Contestant("torch, files", readers.torch_files, ("torch",), env="s3fs"), "files", ("disk",)
    ),
    Reader(
        Contestant("torch + s3fs, files", readers.torch_files, ("torch", "s3fs"), env="s3fs"),
        "files",
        ("objects",),
    ),
    Reader(
        Contestant(
            f"torch + s3fs, files, {MANY} workers",
            readers.torch_files,
            ("torch", "s3fs"),
            env="s3fs",
        ),
        "files",
        ("objects",),
        MANY,
    ),
    Reader(
        Contestant(
            f"s3torchconnector, files, {MANY} workers",
            readers.torch_connector,
            ("torch", "s3torchconnector"),
            env="s3torchconnector",
        ),
        "files",
        ("objects",),
        MANY,
    ),
    Reader(
        Contestant(
            "WebDataset, tar", readers.webdataset_tar, ("torch", "webdataset"), env="webdataset"
        ),
        "tar",
    ),
    Reader(
        Contestant(
            "Hugging Face datasets, tar",
            readers.huggingface_tar,
            ("torch", "datasets", "s3fs"),
            env="s3fs",
        ),
        "tar",
    ),
    Reader(
        Contestant("MosaicML Streaming, MDS", readers.mosaic_mds, ("streaming",), env="streaming"),
        "mds",
    ),
    Reader(
        Contestant(
            "LitData, its chunks",
            readers.litdata_chunks,
            ("litdata",),
            env="litdata",
            convert=readers.write_litdata,
        ),
        "litdata",
    ),
)


def make_data(photographs: Path, root: Path, copies: int) -> tuple[int, int]:
    """Write the photographs several times, as files, tar and MDS. Returns samples and bytes."""
    import penstock as ps

    paths, labels = image_files(photographs)
    size = 0
    for path, label in zip(paths, labels, strict=True):
        content = Path(path).read_bytes()
        size += copies * len(content)
        folder = root / "files" / f"{label:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            (folder / f"{Path(path).stem}-{copy}.jpg").write_bytes(content)
    samples = copies * len(paths)
    ps.from_folder(root / "files").pack(root / "tar", per_shard=-(-samples // SHARDS))
    rows = (
        (file.read_bytes(), int(file.parent.name))
        for file in sorted((root / "files").rglob("*.jpg"))
    )
    write_mds(root / "mds", rows, -(-size // SHARDS))
    return samples, size


@contextmanager
def serving(root: Path, condition: Condition, bandwidth: float) -> Iterator[str]:
    """The endpoint of an object server with this folder as its bucket, in a process of its own."""
    words = {
        "--latency": condition.latency,
        "--slow-share": condition.slow_share,
        "--slow-latency": condition.slow,
        "--bandwidth": bandwidth,
    }
    options = [str(word) for pair in words.items() for word in pair]
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.storage.server", str(root), *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert server.stdout is not None
    try:
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError(f"the object server ended with code {server.wait()}")
        yield endpoint
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def disk_rate(files: Sequence[Path], piece: int = 1 << 20) -> float:
    """Bytes a second at which the disk gives these files, read by several threads."""

    def read(file: Path) -> int:
        total = 0
        with open(file, "rb", buffering=0) as opened:
            while content := opened.read(piece):
                total += len(content)
        return total

    started = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        total = sum(threads.map(read, files))
    return total / (time.perf_counter() - started)


def run(options: Namespace) -> Result:
    wanted = [reader for reader in READERS if _takes_part(reader, options.peers)]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as top:
        root = Path(top) / "data"
        root.mkdir()
        progress(f"writing the photographs {options.copies} times as files, tar and MDS")
        samples, size = make_data(options.data, root, options.copies)
        stored = Stored(root, samples, options.batch, options.workers)
        absent = _convert(wanted, stored, Path(top))
        os.sync()  # pages that are not written yet cannot be dropped from the page cache
        runs: dict[str, dict[str, list[dict[str, float]]]] = {}
        limits: dict[str, list[float]] = {}
        for condition in options.conditions:
            runs[condition.name], limits[condition.name] = measured(
                condition, wanted, stored, absent, Path(top), options
            )
    tables: list[Table] = []
    wrong: list[str] = []
    for condition in options.conditions:
        limit = median(limits[condition.name])
        tables.append(_table(condition, runs[condition.name], limit, options))
        wrong += _mistakes(condition, runs[condition.name], samples, size)
    notes = tuple(f"{title}: {why}" for title, why in absent.items())
    return Result(
        tuple(tables),
        notes=notes,
        wrong=tuple(wrong),
        data={"samples": samples, "bytes": size, "runs": runs, "limits": limits},
        environments={
            reader.contestant.env: installed_versions(
                interpreter(reader.contestant.env, reader.contestant.needs).python
            )
            for reader in wanted
            if reader.contestant.env and reader.contestant.title not in absent
        },
    )


def _takes_part(reader: Reader, peers: Sequence[str]) -> bool:
    return reader.contestant.ours or reader.contestant.env in peers


def _convert(wanted: Sequence[Reader], stored: Stored, top: Path) -> dict[str, str]:
    """Convert the data for those who need it. Returns why some contestants are missing."""
    absent: dict[str, str] = {}
    for reader in wanted:
        contestant = reader.contestant
        chosen = interpreter(contestant.env, contestant.needs)
        if chosen.why_not:
            absent[contestant.title] = chosen.why_not
        elif contestant.convert is not None:
            progress(f"converting the data: {contestant.title}")
            # Of its own: LitData clears the folder "data" of the temporary directory.
            place = top / "converting"
            place.mkdir(exist_ok=True)
            try:
                _alone(chosen.python, place, {}, contestant.convert, stored, timeout=600.0)
            except AloneError as error:
                absent[contestant.title] = f"failed: {error}"
    return absent


def measured(
    condition: Condition,
    wanted: Sequence[Reader],
    stored: Stored,
    absent: dict[str, str],
    top: Path,
    options: Namespace,
) -> tuple[dict[str, list[dict[str, float]]], list[float]]:
    """The runs of all contestants, in turns, and what the disk or link allows in each round."""
    where = "objects" if condition.latency else "disk"
    readers_here = [reader for reader in wanted if where in reader.where]
    runs: dict[str, list[dict[str, float]]] = {}
    limits: list[float] = []
    with ExitStack() as stack:
        if condition.latency:
            # One server for all of them: it first works out the versions of all objects.
            serving_all = serving(stored.root, condition, options.bandwidth * MB)
            stored = replace(stored, endpoint=stack.enter_context(serving_all))
        for number, order in turns(len(readers_here), options.rounds):
            if condition.latency:
                limits.append(options.bandwidth * MB)
            else:
                cold(stored.root)
                limits.append(disk_rate(sorted((stored.root / "tar").glob("*.tar"))))
            for reader in (readers_here[place] for place in order):
                title = reader.contestant.title
                if title in absent:
                    continue
                progress(f"{condition.name}: round {number + 1} of {options.rounds}: {title}")
                try:
                    values = _one(reader, stored, top, options)
                except AloneError as error:
                    absent[title] = f"failed: {error}"
                    progress(error.printed or str(error))
                    continue
                progress("  " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
                runs.setdefault(title, []).append(values)
    return runs, limits


def _one(reader: Reader, stored: Stored, top: Path, options: Namespace) -> dict[str, float]:
    """One epoch of one contestant, with nothing kept before."""
    contestant = reader.contestant
    python = interpreter(contestant.env, contestant.needs).python
    asked = replace(stored, workers=reader.workers or stored.workers)
    found = variables(stored.endpoint) if stored.endpoint else {}
    if not stored.endpoint:
        cold(stored.root)
    with tempfile.TemporaryDirectory(prefix="run-", dir=top, ignore_cleanup_errors=True) as place:
        return _alone(
            python, Path(place), found, one_epoch, contestant.prepare, asked, options.seconds
        )


def _alone(
    python: str,
    place: Path,
    more: Mapping[str, str],
    function: Any,
    *arguments: Any,
    timeout: float = TIMEOUT,
) -> dict[str, float]:
    environment = process_environment(python, place, more)
    environment["PENSTOCK_CACHE_DIR"] = str(place / "kept")
    watched = run_alone(
        function, *arguments, timeout=timeout, python=python, environment=environment
    )
    return {**(watched.value or {}), "memory": float(watched.peak)}


def _table(
    condition: Condition,
    runs: Mapping[str, list[dict[str, float]]],
    limit: float,
    options: Namespace,
) -> Table:
    """Medians by contestant, in the order of the readers; ours beside the fastest peer."""

    def value(title: str, name: str) -> float:
        return median(one[name] for one in runs[title])

    ours = {reader.contestant.title for reader in READERS if reader.contestant.ours}
    peers = [value(title, "rate") for title in runs if title not in ours]
    rows = []
    for title in (reader.contestant.title for reader in READERS):
        if title not in runs:
            continue
        rate = value(title, "rate")
        rows.append(
            (
                title,
                f"{rate / MB:.1f}",
                f"{rate / limit:.2f}",
                f"{rate / max(peers):.2f}" if peers and title in ours else "",
                f"{value(title, 'first'):.2f}",
                f"{value(title, 'memory') / MB:.0f}",
            )
        )
    title = f"from the disk, cold: {limit / MB:.0f} MB/s with 8 threads"
    if condition.latency:
        title = (
            f"objects with a latency of {1e3 * condition.latency:.0f} ms, "
            f"{condition.slow_share:.0%} take {condition.slow:g} s; "
            f"link of {options.bandwidth:g} MB/s"
        )
    columns = ("loader", "MB/s", "of the limit", "of the fastest peer", "first batch, s", "MB")
    return Table(title, columns, tuple(rows))


def _mistakes(
    condition: Condition,
    runs: Mapping[str, list[dict[str, float]]],
    samples: int,
    size: int,
) -> Iterator[str]:
    """Whether a whole epoch of ours had another number of samples or bytes than the data."""
    for reader in READERS:
        for one in runs.get(reader.contestant.title, ()) if reader.contestant.ours else ():
            found = (int(one["samples"]), int(one["bytes"]))
            if found[0] >= samples and found != (samples, size):
                yield (
                    f"{condition.name}: {reader.contestant.title} gave {found[0]:,} samples and "
                    f"{found[1]:,} bytes instead of {samples:,} and {size:,}"
                )


def _conditions(text: str) -> tuple[Condition, ...]:
    known = {condition.name: condition for condition in CONDITIONS}
    names = text.split(",")
    if not set(names) <= set(known):
        raise ValueError(text)
    return tuple(known[name] for name in names)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--conditions",
        type=_conditions,
        default=CONDITIONS,
        metavar="LIST",
        help="comma-separated list of: disk, 20ms, 100ms (all)",
    )
    parser.add_argument(
        "--bandwidth", type=positive, default=100.0, help="of the object server, MB/s (100)"
    )
    parser.add_argument(
        "--copies", type=count, default=8, help="times that the photographs are written (8)"
    )


BENCHMARK = Benchmark(
    "storage",
    "photographs as files, tar and MDS, from a cold disk and an object store with latency",
    run,
    arguments,
    needs_data=True,
    peers=peer_names(reader.contestant for reader in READERS),
    seconds=20.0,
)
