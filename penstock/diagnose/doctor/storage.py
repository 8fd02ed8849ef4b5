"""Measures a folder or a bucket: one read alone, many reads at once, and reads in sequence."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from penstock.config import show_size
from penstock.diagnose.doctor.report import Finding, Fix, Level
from penstock.errors import SourceError
from penstock.host import cgroup
from penstock.host.text import span
from penstock.source.objects.address import Address, is_url, local_path
from penstock.source.objects.connection import Fetcher
from penstock.source.objects.protocol import WantedObject

LISTED = 1000
"""Files or objects that are looked at: one page of a listing."""

PIECE, LARGE = 128 << 10, 4 << 20
"""A read at random from files larger than ``LARGE``, which are taken for shards."""

BLOCK = 2 << 20
"""A read in sequence."""

ALONE, MANY, THREADS = 12, 256, 16
"""Reads one after the other; reads at once; threads for those from a disk."""

BUDGET = 64 << 20
"""Bytes that each of the three measurements reads at most."""

LONGEST = 10.0
"""Seconds that reads one after the other may take."""


class ProbedFile(NamedTuple):
    """A file or an object. ``name``: its path, or its path in the bucket."""

    name: str
    size: int


class ProbeRead(NamedTuple):
    """What one read asks for."""

    name: str
    start: int
    size: int


Read = Callable[[Sequence[ProbeRead]], int]
"""Reads parts at once and returns their bytes."""


@dataclass(frozen=True)
class StorageRates:
    """What was measured.

    - ``mean``: bytes of a file, of the first ``LISTED`` ones; ``shards``: they are large.
    - ``piece``: bytes of a read at random.
    - ``alone``, ``slowest``: seconds for one read while nothing else reads, median and most.
    - ``many``: bytes a second with many reads at random at once.
    - ``sequence``: bytes a second in sequence; ``None`` if no file is large enough.
    - ``memory``: free bytes of memory.
    """

    place: str
    remote: bool
    files: int
    mean: float
    shards: bool
    piece: float
    alone: float
    slowest: float
    many: float
    sequence: float | None
    memory: int

    @property
    def share(self) -> float:
        """What a reader that waits for each read gets of what many readers get together."""
        return min(1.0, self.piece / self.alone / self.many)


def measure(place: str, options: Mapping[str, str]) -> StorageRates:
    """Measure a folder, a bucket or a folder in a bucket. Raises SourceError."""
    local = local_path(place) if is_url(place) else os.path.abspath(place)
    if local is not None:
        stored = list(islice(_files(local), LISTED))
        return measured(place, stored, _read_files, cold=_drop)
    address = Address.of(place)
    fetcher = Fetcher(address.root, options)
    pages = fetcher.objects_below(address.path)
    found = next(pages, [])
    # Not closed by leaving it: the rest of the listing would go on.
    getattr(pages, "close", lambda: None)()
    stored = [ProbedFile(path, size) for path, size, _ in found if size]
    return measured(place, stored, lambda parts: _fetch(fetcher, parts), remote=True)


def measured(
    place: str,
    stored: Sequence[ProbedFile],
    read: Read,
    *,
    remote: bool = False,
    cold: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> StorageRates:
    """Measure with this function for reading. ``cold`` drops a file from the page cache."""
    if not stored:
        raise SourceError(f"{place} has no files to read. Give a folder or a bucket that has some.")
    choose = random.Random(0)
    mean = sum(one.size for one in stored) / len(stored)
    shards = mean > LARGE
    for one in stored[: ALONE + MANY]:
        cold(one.name)
    some = list(stored)
    choose.shuffle(some)

    def parts(first: int, count: int) -> list[ProbeRead]:
        chosen = [some[number % len(some)] for number in range(first, first + count)]
        if not shards:
            return [ProbeRead(one.name, 0, one.size) for one in chosen[: len(some)]]
        return [
            ProbeRead(one.name, choose.randrange(max(1, one.size - PIECE)), min(PIECE, one.size))
            for one in chosen
        ]

    times, started = [], clock()
    for part in parts(0, min(ALONE, len(some)) if not shards else ALONE):
        cold(part.name)
        before = clock()
        read([part])
        times.append(clock() - before)
        if clock() - started > LONGEST:
            break
    many: list[ProbeRead] = []
    for part in parts(ALONE, MANY):
        if many and sum(one.size for one in many) + part.size > BUDGET:
            break
        cold(part.name)
        many.append(part)
    before = clock()
    many_rate = read(many) / max(clock() - before, 1e-9)
    largest = max(stored, key=lambda one: one.size)
    sequence = None
    if largest.size > LARGE:
        cold(largest.name)
        end = min(largest.size, BUDGET)
        blocks = [ProbeRead(largest.name, at, min(BLOCK, end - at)) for at in range(0, end, BLOCK)]
        before = clock()
        total = read(blocks) if remote else sum(read([block]) for block in blocks)
        sequence = total / max(clock() - before, 1e-9)
    return StorageRates(
        place=place,
        remote=remote,
        files=len(stored),
        mean=mean,
        shards=shards,
        piece=sum(part.size for part in many) / len(many),
        alone=max(median(times), 1e-9),
        slowest=max(times),
        many=many_rate,
        sequence=sequence,
        memory=cgroup.memory_available() or _free_memory(),
    )


def _files(folder: str) -> Iterator[ProbedFile]:
    if not os.path.isdir(folder):
        raise SourceError(f"{folder} is not a folder. Give a folder or the URL of a bucket.")
    for top, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(top, name)
            if os.path.isfile(path) and (size := os.path.getsize(path)):
                yield ProbedFile(path, size)


def _read_files(parts: Sequence[ProbeRead]) -> int:
    def one(part: ProbeRead) -> int:
        try:
            with open(part.name, "rb", buffering=0) as file:
                return len(os.pread(file.fileno(), part.size, part.start))
        except OSError as error:
            raise SourceError(f"{part.name} cannot be read: {error.strerror}.") from error

    if len(parts) == 1:
        return one(parts[0])
    with ThreadPoolExecutor(THREADS) as threads:
        return sum(threads.map(one, parts))


def _drop(name: str) -> None:
    """Drop a file from the page cache: otherwise memory is measured."""
    try:
        with open(name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # reading it reports the reason


def _fetch(fetcher: Fetcher, parts: Sequence[ProbeRead]) -> int:
    wanted = [WantedObject(part.name, part.start, part.start + part.size) for part in parts]
    return sum(map(len, fetcher.read(wanted)))


def _free_memory() -> int:
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


# ------------------------------------------------------------------------------------------ advice

BOUND = 0.5
"""A reader that waits for each read and gets less than this share is bound by latency."""

PAYS = 2.0
"""Reading in sequence pays if it is this many times as fast as many reads at random at once."""

WINDOW = 0.25
"""Share of the free memory for the window of a reservoir: the rest is for batches and the model."""


def advice(rates: StorageRates) -> list[Finding]:
    """What the figures mean, and what to do."""
    kind = "object" if rates.remote else "file"
    what = f"{show_size(rates.piece)} of a shard" if rates.shards else f"one {kind}"
    findings = [
        Finding(
            Level.OK,
            "Storage",
            "one read",
            f"{_seconds(rates.alone)} for {what} alone (slowest {_seconds(rates.slowest)}): "
            f"{show_size(rates.piece / rates.alone)}/s",
        ),
        Finding(
            Level.OK, "Storage", "many reads", f"{show_size(rates.many)}/s, at random and at once"
        ),
    ]
    if rates.sequence is not None:
        findings.append(
            Finding(Level.OK, "Storage", "in sequence", f"{show_size(rates.sequence)}/s")
        )
    findings.append(_latency(rates, kind))
    findings.append(_window(rates) if rates.shards else _small(rates, kind))
    return findings


def _fine(name: str, text: str) -> Finding:
    return Finding(Level.OK, "Storage", name, text)


def _latency(rates: StorageRates, kind: str) -> Finding:
    needed = max(1, round(1 / rates.share))
    if rates.share >= BOUND:
        return Finding(
            Level.OK,
            "Storage",
            "latency",
            f"one reader gets {rates.share:.0%} of the rate: bandwidth counts, not waiting",
        )
    why = (
        f"Each read is mostly waiting: it takes {needed} reads at once to use what the storage "
        "gives."
    )
    if rates.remote:
        return Finding(
            Level.NOTE,
            "Storage",
            "latency",
            f"bound by latency: one reader gets {rates.share:.0%} of the rate",
            why=f"{why} Penstock makes up to 384 requests at once, whatever the number of workers.",
            remedies=(
                Fix("Keep what was fetched on a local disk", '.cache("100GB", where="disk")'),
            ),
        )
    return Finding(
        Level.NOTE,
        "Storage",
        "latency",
        f"bound by latency: one reader gets {rates.share:.0%} of the rate",
        why=why,
        remedies=(
            Fix("More workers wait for more reads at a time", f"loader(workers={needed})"),
            Fix("Keep what was read in memory", '.cache("auto")'),
        ),
    )


def _small(rates: StorageRates, kind: str) -> Finding:
    """Whether small files should be packed."""
    if rates.share >= BOUND:
        return Finding(Level.OK, "Storage", "packing", f"{kind}s as they are cost no waiting")
    return Finding(
        Level.NOTE,
        "Storage",
        "packing",
        f"{show_size(rates.mean)} per {kind}: shards would be read with fewer, larger requests",
        why="Shards are read in sequence with order=ps.Reservoir(...). Measure them with this "
        "command too, after packing.",
        remedies=(
            Fix("Pack the data once", "penstock pack train.py:train --until source --to DIR"),
        ),
    )


def _window(rates: StorageRates) -> Finding:
    """The window of a reservoir that suits the device and the memory."""
    sequence = rates.sequence or rates.many
    ratio = sequence / rates.many
    wait = rates.alone * sequence
    if ratio < PAYS:
        return Finding(
            Level.OK,
            "Storage",
            "order",
            f"reading in sequence is {ratio:.1f} times as fast as at random: shuffle freely, a "
            "reservoir would save little",
        )
    room = rates.memory * WINDOW
    return Finding(
        Level.NOTE,
        "Storage",
        "order",
        f"reading in sequence is {ratio:.1f} times as fast as at random: use a reservoir",
        why=f"A quarter of the free memory holds a window of {show_size(room)}. With samples of "
        f"{show_size(PIECE)} that is window={_round(room / PIECE)}; larger windows mix better. "
        f"Reads of less than {show_size(wait)} are mostly waiting here. The window belongs to the "
        "order of samples, so write it down: with another one a checkpoint cannot be resumed.",
        remedies=(
            Fix("Read shards in sequence", f"order=ps.Reservoir(window={_round(room / PIECE)})"),
        ),
    )


def as_json(rates: StorageRates, findings: Sequence[Finding]) -> str:
    """Figures and findings, for scripts."""
    rows: list[dict[str, Any]] = [
        {"name": one.name, "level": one.level.word, "text": one.text, "why": one.why}
        for one in findings
    ]
    return json.dumps({"storage": asdict(rates), "findings": rows}, indent=2)


def _round(count: float) -> int:
    """A number of samples to two digits: the third one means nothing."""
    unit: int = 10 ** max(0, len(str(int(count))) - 2)
    return int(count) // unit * unit


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else span(seconds)
