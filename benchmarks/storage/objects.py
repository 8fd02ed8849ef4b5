"""A bucket of a million objects, and one of a thousand shards: what loaders take before the first
batch, and what of that is kept."""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from benchmarks.files import Steps, first_of, photograph
from benchmarks.harness.alone import memory_of_tree, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.environments import process_environment
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.storage.server import PAGE, Conditions, ObjectServer

IN_CLASS = 1000
IN_SHARD = 100
SIDE = 32
BATCH = 64


class ManyObjects(ObjectServer):
    """A bucket with ``count`` objects in ``train``, which all have the content of one file."""

    def __init__(self, file: Path, count: int, suffix: str, conditions: Conditions) -> None:
        super().__init__(file.parent, conditions)
        self._file, self._count, self._suffix = file, count, suffix

    def file_of(self, key: str) -> Path:
        name = key.rpartition("/")[2]
        # Sidecar indexes of shards do not exist.
        return self._file if name.endswith(self._suffix) else self.root / name

    def _key(self, number: int) -> str:
        if self._suffix == ".tar":
            return f"train/shard-{number:06d}.tar"
        return f"train/{number // IN_CLASS:05d}/{number:09d}{self._suffix}"

    def listing(self, query: dict[str, list[str]]) -> str:
        first = int(query.get("continuation-token", ["0"])[0])
        last = min(self._count, first + PAGE)
        size, tag = self._file.stat().st_size, self._etag(self._file)
        rows = [(self._key(number), size, tag) for number in range(first, last)]
        after = str(last) if last < self._count else ""
        return self._page(rows, after, quoted="encoding-type" in query)


def from_bucket(url: str, storage: dict[str, str], shards: bool, workers: int) -> dict[str, float]:
    """Create, and take the first batch. Runs in a fresh process."""
    import os

    import penstock as ps

    steps = Steps()

    def read() -> ps.Pipeline:
        if shards:
            return ps.from_tar(url, fields=("jpg", "cls"), storage=storage, version="1")
        return ps.from_folder(url, storage=storage, version="1")

    source = steps.timed("create", read)
    cropped = source.map(ps.image.decode()).map(ps.image.random_resized_crop(SIDE))
    order = {"order": ps.Reservoir(window=8 * IN_SHARD)} if shards else {}
    loader = cropped.batch(BATCH).loader(workers=workers, seed=0, **order)
    steps.timed("first batch", lambda: first_of(loader))
    steps.values["samples"] = float(len(source.source))
    steps.values["all processes"] = float(memory_of_tree(os.getpid()))
    values = steps.done()
    loader.close()
    return values


def run(options: Namespace) -> Result:
    rows, data = [], {}
    conditions = Conditions(latency=options.latency)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as top:
        place = Path(top)
        image, tar = place / "content" / "one.jpg", place / "content" / "one.tar"
        image.parent.mkdir()
        image.write_bytes(photograph())
        _write_shard(place / "packing", tar)
        cases = (
            (f"{options.count:,} objects", image, options.count, ".jpg"),
            (f"{options.shards:,} shards", tar, options.shards, ".tar"),
        )
        for title, file, number, suffix in cases:
            kept = place / f"kept{suffix}"
            with ManyObjects(file, number, suffix, conditions) as server:
                for what in ("first run", "later run"):
                    progress(f"{title}: {what}")
                    server.requests.clear()
                    values = run_alone(
                        from_bucket,
                        server.url("train"),
                        server.storage,
                        suffix == ".tar",
                        options.workers,
                        timeout=1800.0,
                        environment=process_environment(
                            sys.executable, place, {"PENSTOCK_CACHE_DIR": str(kept)}
                        ),
                    ).value
                    lists = sum(line.startswith("LIST") for line in server.requests)
                    data[f"{title}, {what}"] = {**values, "pages": float(lists)}
                    rows.append(
                        (
                            f"{title}, {what}",
                            f"{values['samples']:,.0f}",
                            f"{lists:,}",
                            f"{values['create']:.2f}",
                            f"{values['first batch']:.2f}",
                            f"{values['memory'] / 1e6:.0f}",
                            f"{values['all processes'] / 1e6:.0f}",
                        )
                    )
            size = sum(one.stat().st_size for one in kept.rglob("*") if one.is_file())
            data[f"{title}, kept"] = {"bytes": float(size)}
            rows.append((f"{title}: kept on disk", "", "", "", "", f"{size / 1e6:.0f}", ""))
    columns = (
        "bucket",
        "samples",
        "pages listed",
        "create, s",
        "first batch, s",
        "memory, MB",
        "of all processes, MB",
    )
    title = f"before the first batch; latency {1e3 * options.latency:.0f} ms"
    return Result((Table(title, columns, tuple(rows)),), data=data)


def _write_shard(packing: Path, tar: Path) -> None:
    """A shard of small pictures."""
    import penstock as ps

    for number in range(IN_SHARD):
        folder = packing / "files" / f"{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(photograph())
    ps.from_folder(packing / "files").pack(packing / "packed", per_shard=IN_SHARD)
    (packing / "packed" / "shard-000000.tar").replace(tar)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--count", type=count, default=1_000_000, help="objects (1,000,000)")
    parser.add_argument("--shards", type=count, default=1000, help="shards (1,000)")
    parser.add_argument(
        "--latency", type=float, default=0.02, help="of the object server, seconds (0.02)"
    )


BENCHMARK = Benchmark(
    "objects",
    "buckets of a million objects and of a thousand shards: creation, memory, first batch",
    run,
    arguments,
)
