"""Counters of a loader: tallies that workers fill, a meter that adds them up, frozen snapshots."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, NamedTuple

from penstock.config import show_size
from penstock.host.text import aligned, many

Clock = Callable[[], float]

LISTED_BAD_SAMPLES = 100
"""The last bad samples are listed by name, up to this number; all are counted."""

RECENT_BATCHES = 512
"""Batches whose preparation times a meter remembers."""

PRINTED_BAD_SAMPLES = 5
"""The number of bad samples in the printed form of ``Stats``."""

Cells = tuple[str, ...]
"""One row of a table."""


class Totals(NamedTuple):
    """The sums of a meter so far; ``seconds[i]`` includes the stages above stage i."""

    samples: Sequence[int]
    seconds: Sequence[float]
    delivered: int
    wait: float
    now: float


class Tally:
    """The counters of one worker during one task: plain lists, cheap to fill and to send.

    ``seconds[i]`` is the time spent in stage i *and all stages above it*. The time of a stage
    alone is the difference of neighbours, so a stop does not have to time its upstream.
    """

    __slots__ = ("bytes_read", "corrupt", "hits", "misses", "samples", "seconds")

    def __init__(self, stages: int, holds: int) -> None:
        self.samples = [0] * stages
        self.seconds = [0.0] * stages
        self.bytes_read = 0
        self.hits = [0] * holds
        self.misses = [0] * holds
        self.corrupt = 0

    def clear(self) -> None:
        """Set all counters to 0, in place: stops hold references to the lists."""
        for counts in (self.samples, self.seconds, self.hits, self.misses):
            counts[:] = [0] * len(counts)
        self.bytes_read = self.corrupt = 0

    def as_list(self) -> list[Any]:
        """A copy of the counters for ``Meter.add``; the tally goes on counting."""
        return [
            self.samples[:],
            self.seconds[:],
            self.bytes_read,
            self.hits[:],
            self.misses[:],
            self.corrupt,
        ]


def add_tallies(tallies: Sequence[Sequence[Any]]) -> list[Any]:
    """The sum of tallies, as ``Tally.as_list`` returns them; empty for none.

    >>> add_tallies([[[1, 1], [0.5, 0.7], 10, [1], [0], 0], [[2, 2], [0.5, 0.5], 20, [0], [2], 1]])
    [[3, 3], [1.0, 1.2], 30, [1], [2], 1]
    """
    if len(tallies) < 2:
        return list(tallies[0]) if tallies else []
    sums: list[Any] = []
    for counters in zip(*tallies, strict=True):
        if isinstance(counters[0], int):
            sums.append(sum(counters))
        else:
            sums.append([sum(numbers) for numbers in zip(*counters, strict=True)])
    return sums


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage: the number of samples that passed it, and the seconds spent in it alone."""

    name: str
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One cache: ``hits``, ``misses``, samples ``admitted``, bytes ``used`` of its ``budget``."""

    hits: int
    misses: int
    admitted: int
    used: int
    budget: int
    full: bool


@dataclass(frozen=True, slots=True)
class RefurbishStats:
    """A refurbish stop: ``fresh`` samples came from upstream, ``reused`` ones from its store.

    It keeps ``kept`` samples at most; the others are always fresh. The store takes ``used`` bytes.
    """

    fresh: int
    reused: int
    kept: int
    used: int


@dataclass(frozen=True, slots=True)
class EchoStats:
    """An echo: it made ``delivered`` samples of ``fresh`` ones; ``factor``: in this epoch."""

    fresh: int
    delivered: int
    factor: float


@dataclass(frozen=True, slots=True)
class MachineStats:
    """Another machine that has prepared ``samples`` of those delivered (``cluster=``)."""

    name: str
    samples: int


@dataclass(frozen=True, slots=True)
class PartStats:
    """One source of a mix, as dealt to all ranks together.

    - ``share``: its share by weight in this epoch, 0 to 1.
    - ``samples``: its samples in this epoch so far.
    - ``passes``: how often all its samples were dealt since the first epoch.
    """

    name: str
    share: float
    samples: int
    passes: float


class Held(NamedTuple):
    """The statistics of the stops that keep samples."""

    caches: tuple[CacheStats, ...] = ()
    refurbish: RefurbishStats | None = None
    echo: EchoStats | None = None


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The workers: ``busy`` is the sum of their working seconds, ``utilisation`` its share of all
    seconds that the workers had."""

    kind: str
    workers: int
    busy: float
    utilisation: float
    restarts: int


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that failed and was skipped or substituted."""

    index: int
    name: str
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What the device has prepared, as one more worker.

    ``tiny_batches`` are the device's, ``cpu_tiny_batches`` the CPU's; ``again`` were dealt again
    because the device was lost. ``threshold``: how many of the last tiny-batches of a batch are the
    device's alone (negative: the CPU's); ``frozen`` if it is no longer learnt. ``mode``:
    ``"temporal"`` (while the loop waits) or ``"spatial"`` (beside the training step); ``decided``
    after the trial. ``copied``: bytes over the bus for its tasks. ``buffers``: bytes allocated for
    them. ``in_use``: most memory of the device seen in use. ``lost``: why it prepares no more.
    """

    name: str
    samples: int
    cpu_samples: int
    tiny_batches: int
    cpu_tiny_batches: int
    again: int
    threshold: int
    frozen: bool
    mode: str
    decided: bool
    copied: int
    buffers: int
    in_use: int
    lost: str
    worth: bool = True
    """Whether it saves CPU time. If not, it prepares nothing but a few samples now and then."""

    @property
    def share(self) -> float:
        """The share of samples that the device has prepared, 0 to 1."""
        return self.samples / max(1, self.samples + self.cpu_samples)


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """A frozen snapshot of a loader's counters since it was made. Prints as a table.

    ``wait`` is the time the training loop waited for batches, ``elapsed`` the time since it asked
    for the first batch; ``wait / elapsed`` is the share of time in which training stood still.
    ``refurbish`` and ``echo`` are ``None`` for a pipeline without that stage, ``device`` if no
    device prepares samples. ``machines``: the other machines that have prepared samples; the rest
    was prepared on this one. ``mix``: the sources of a mix.

    >>> import numpy as np
    >>> import penstock as ps
    >>> with ps.from_dataset(np.arange(12.0)).batch(4).loader(workers=0) as loader:
    ...     batches = list(loader)
    ...     print(loader.stats())
    delivered  12 samples in 3 batches, 96 B
    ...
    stage   samples  seconds  ms/sample  share
    source       12    ...
    """

    samples: int
    batches: int
    bytes: int
    bytes_read: int
    elapsed: float
    wait: float
    stages: tuple[StageStats, ...]
    caches: tuple[CacheStats, ...]
    pool: PoolStats
    retries: int
    corrupt: int
    bad: int
    bad_samples: tuple[BadSample, ...]
    refurbish: RefurbishStats | None = None
    echo: EchoStats | None = None
    machines: tuple[MachineStats, ...] = ()
    device: DeviceStats | None = None
    mix: tuple[PartStats, ...] = ()

    @property
    def stall(self) -> float:
        """The share of time the training loop waited, 0 to 1."""
        return min(1.0, self.wait / self.elapsed) if self.elapsed > 0 else 0.0

    def __repr__(self) -> str:
        lines = aligned(_summary(self))
        if self.stages:
            lines += ["", *aligned(_stage_rows(self.stages), right={1, 2, 3, 4})]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same tables for a notebook."""
        tables = [html_table(_summary(self))]
        if self.stages:
            tables.append(html_table(_stage_rows(self.stages), right={1, 2, 3, 4}, header=True))
        return "\n".join(tables)


@dataclass
class _Sums:
    """The sums of a meter that are not kept by stage."""

    samples: int = 0
    batches: int = 0
    bytes: int = 0
    bytes_read: int = 0
    wait: float = 0.0
    busy: float = 0.0
    retries: int = 0
    corrupt: int = 0
    bad: int = 0
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    elsewhere: Counter[str] = field(default_factory=Counter)


class Meter:
    """Adds up the tallies of the workers and the waits of the training loop. Thread-safe."""

    def __init__(self, stages: Sequence[str], holds: int, clock: Clock) -> None:
        self.clock = clock
        self._stages = tuple(stages)
        self._lock = threading.Lock()
        self._samples = [0] * len(stages)
        self._seconds = [0.0] * len(stages)
        self._sums = _Sums(hits=[0] * holds, misses=[0] * holds)
        self._bad: deque[BadSample] = deque(maxlen=LISTED_BAD_SAMPLES)
        self._batch_times: deque[float] = deque(maxlen=RECENT_BATCHES)
        # Batches that were handed out and are not counted yet. Counting them is left to the
        # workers and to readers: the thread of the training loop only appends.
        self._handed_out: deque[
            tuple[float, Sequence[Any], Sequence[BadSample], int, int, float, object]
        ] = deque()
        self._started: float | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = self.clock()

    def worked(self, seconds: float) -> None:
        with self._lock:
            self._sums.busy += seconds
            self._catch_up()

    def handed_out(
        self,
        busy: float,
        tally: Sequence[Any],
        bad: Sequence[BadSample],
        rows: int,
        nbytes: int,
        waited: float = 0.0,
        freed: object = None,
    ) -> None:
        """Count a batch. ``busy``: seconds that workers spent on it; ``tally`` may be empty.

        ``waited``: seconds that the loop waited for it. ``freed``: an object that nobody else needs
        any more. Whoever counts the batch frees it, mostly a worker.
        """
        self._handed_out.append((busy, tally, bad, rows, nbytes, waited, freed))

    def _catch_up(self) -> None:
        """Count the batches handed out. The caller holds the lock."""
        sums = self._sums
        while self._handed_out:
            busy, tally, bad, rows, nbytes, waited, _ = self._handed_out.popleft()
            self._batch_times.append(busy)
            sums.wait += waited
            sums.bad += len(bad)
            self._bad.extend(bad)
            if rows:
                sums.samples += rows
                sums.bytes += nbytes
                sums.batches += 1
            if tally:
                self._add(tally)

    def _add(self, tally: Sequence[Any]) -> None:
        samples, seconds, bytes_read, hits, misses, corrupt = tally
        sums = self._sums
        for i, (n, t) in enumerate(zip(samples, seconds, strict=True)):
            self._samples[i] += n
            self._seconds[i] += t
        for i, (h, m) in enumerate(zip(hits, misses, strict=True)):
            sums.hits[i] += h
            sums.misses[i] += m
        sums.bytes_read += bytes_read
        sums.corrupt += corrupt

    def batch_times(self) -> list[float]:
        """Seconds that workers spent on each of the recent batches."""
        with self._lock:
            self._catch_up()
            return list(self._batch_times)

    def delivered(
        self, samples: int, nbytes: int, elsewhere: Mapping[str, int] | None = None
    ) -> None:
        """Count a batch. ``elsewhere``: samples that other machines have prepared, by machine."""
        with self._lock:
            self._sums.elsewhere.update(elsewhere or {})
            self._sums.samples += samples
            self._sums.bytes += nbytes
            self._sums.batches += 1

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._sums.wait += seconds

    def retried(self, times: int = 1) -> None:
        with self._lock:
            self._sums.retries += times

    def bad(self, sample: BadSample) -> None:
        with self._lock:
            self._sums.bad += 1
            self._bad.append(sample)

    def answered(self) -> list[tuple[int, int]]:
        """(hits, misses) of each stop that keeps samples."""
        with self._lock:
            self._catch_up()
            return list(zip(self._sums.hits, self._sums.misses, strict=True))

    def totals(self) -> Totals:
        """The sums so far; the difference of two readings covers the time between them."""
        with self._lock:
            self._catch_up()
            samples, seconds = tuple(self._samples), tuple(self._seconds)
            sums = self._sums
            return Totals(samples, seconds, sums.samples, sums.wait, self.clock())

    def snapshot(
        self,
        kind: str,
        workers: int,
        restarts: int,
        held: Held,
        device: DeviceStats | None = None,
    ) -> Stats:
        """The statistics so far, frozen."""
        with self._lock:
            self._catch_up()
            sums = self._sums
            elapsed = self.clock() - self._started if self._started is not None else 0.0
            above = 0.0
            stages = []
            for name, n, t in zip(self._stages, self._samples, self._seconds, strict=True):
                stages.append(StageStats(name, n, max(0.0, t - above)))
                above = t
            room = elapsed * max(1, workers)
            return Stats(
                samples=sums.samples,
                batches=sums.batches,
                bytes=sums.bytes,
                bytes_read=sums.bytes_read,
                elapsed=elapsed,
                wait=sums.wait,
                stages=tuple(stages),
                caches=held.caches,
                pool=PoolStats(
                    kind,
                    workers,
                    sums.busy,
                    min(1.0, sums.busy / room) if room > 0 else 0.0,
                    restarts,
                ),
                retries=sums.retries,
                corrupt=sums.corrupt,
                bad=sums.bad,
                bad_samples=tuple(self._bad),
                refurbish=held.refurbish,
                echo=held.echo,
                machines=tuple(starmap(MachineStats, sorted(sums.elsewhere.items()))),
                device=device,
            )


# Tables


def html_table(rows: Sequence[Cells], right: Container[int] = (), *, header: bool = False) -> str:
    """An HTML table for notebooks, its text escaped; ``header``: the first row has the titles.

    >>> print(html_table([("name", "size"), ("<a>", "10")], right={1}, header=True))
    <table>
    <tr><th style="text-align: left">name</th><th style="text-align: right">size</th></tr>
    <tr><td style="text-align: left">&lt;a&gt;</td><td style="text-align: right">10</td></tr>
    </table>
    """
    import html

    lines = ["<table>"]
    for number, row in enumerate(rows):
        tag = "th" if header and number == 0 else "td"
        cells = []
        for column, text in enumerate(row):
            side = "right" if column in right else "left"
            # HTML collapses blanks at the start of a text, which indent a name here.
            indent = len(text) - len(text.lstrip(" "))
            shown = "&nbsp;" * indent + html.escape(text[indent:])
            cells.append(f'<{tag} style="text-align: {side}">{shown}</{tag}>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _summary(stats: Stats) -> list[Cells]:
    """A row for each fact about a loader that does not belong to a stage."""
    size = f", {show_size(stats.bytes)}" if stats.bytes else ""
    delivered = f"{many(stats.samples, 'sample')} in {many(stats.batches, 'batch', 'batches')}"
    rows: list[Cells] = [
        ("delivered", delivered + size),
        ("read", f"{show_size(stats.bytes_read)} from the source"),
    ]
    if stats.elapsed > 0:
        samples, batches = stats.samples / stats.elapsed, stats.batches / stats.elapsed
        speed = f"{samples:,.1f} samples/s, {batches:,.1f} batches/s"
        rows.append(("speed", f"{speed}, in {_seconds(stats.elapsed)}"))
        rows.append(("waiting", f"{stats.stall:.0%} of the time, {_seconds(stats.wait)}"))
    rows.append(("workers", _workers(stats.pool)))
    if stats.machines:
        rows.append(("prepared", prepared_by(stats)))
    if stats.device is not None:
        rows.append(("device", device_line(stats.device)))
    for number, cache in enumerate(stats.caches, start=1):
        name = "cache" if len(stats.caches) == 1 else f"cache {number}"
        rows.append((name, _cache(cache)))
    if stats.refurbish is not None:
        fresh, reused = stats.refurbish.fresh, stats.refurbish.reused
        kept = f"keeps {many(stats.refurbish.kept, 'sample')}, {show_size(stats.refurbish.used)}"
        rows.append(("refurbish", f"{reused:,} reused, {fresh:,} fresh; {kept}"))
    if stats.echo is not None:
        fresh, factor = stats.echo.fresh, stats.echo.factor
        made = f"{stats.echo.delivered:,} delivered from {fresh:,} fresh"
        rows.append(("echo", f"{made}, factor {factor:g} in this epoch"))
    rows += mix_rows(stats)
    if stats.retries:
        rows.append(("retries", f"{many(stats.retries, 'task')} run again after a worker died"))
    if stats.corrupt:
        values = many(stats.corrupt, "damaged value")
        rows.append(("corrupt", f"{values} in a cache, prepared again"))
    if stats.bad:
        rows.append(("bad", f"{many(stats.bad, 'sample')} skipped or substituted"))
        for bad in stats.bad_samples[-PRINTED_BAD_SAMPLES:]:
            error = bad.error.partition("\n")[0]
            text = f"{bad.name} (index {bad.index}) in {bad.stage}: {error}"
            # A file name may hold control characters, which could change the terminal.
            rows.append(("", "".join(char if char.isprintable() else " " for char in text)))
    return rows


def mix_rows(stats: Stats) -> list[tuple[str, str]]:
    """A row for each source of a mix."""
    rows = []
    for place, part in enumerate(stats.mix):
        dealt = f"{many(part.samples, 'sample')} in this epoch ({part.share:.1%} by weight)"
        text = f"{part.name}: {dealt}, {part.passes:,.2f} passes"
        rows.append(("" if place else "mix", text))
    return rows


def prepared_by(stats: Stats) -> str:
    """How many samples were prepared by which machine."""
    others = sum(machine.samples for machine in stats.machines)
    # Batches of a group are counted when they arrive, before they are cut for this loader.
    here = max(0, stats.samples - others)
    named = [f"{machine.samples:,} by {machine.name}" for machine in stats.machines]
    return ", ".join([f"{many(here, 'sample')} here", *named])


def _workers(pool: PoolStats) -> str:
    names = {"none": "none, the training loop prepares batches", "node": "those of the node"}
    singular, plural = {
        "threads": ("thread", "threads"),
        "processes": ("process", "processes"),
        "crew": ("thread of a crew", "threads of a crew"),
    }.get(pool.kind, (pool.kind, pool.kind))
    workers = names.get(pool.kind) or many(pool.workers, singular, plural)
    busy = "" if pool.kind == "node" else f", busy {pool.utilisation:.0%} of the time"
    restarts = f", {many(pool.restarts, 'restart')}" if pool.restarts else ""
    return workers + busy + restarts


def device_line(device: DeviceStats) -> str:
    """What a device has prepared, in one line."""
    if device.lost:
        share = f"{device.share:.0%} of the samples, then no more: {device.lost}"
        return f"{device.name or 'the device'} prepared {share}"
    learnt = "" if device.frozen else ", still learning"
    trial = "" if device.decided else ", on trial"
    worth = "" if device.worth else "; idle, because it would save little CPU time"
    return (
        f"{device.name or 'not ready yet'}, {device.share:.0%} of the samples "
        f"({device.tiny_batches:,} of {device.tiny_batches + device.cpu_tiny_batches:,} "
        f"tiny-batches); t = {device.threshold}{learnt}; {device.mode}{trial}{worth}; "
        f"{show_size(device.copied)} over the bus, buffers {show_size(device.buffers)}"
    )


def _cache(cache: CacheStats) -> str:
    asked = cache.hits + cache.misses
    share = f" ({cache.hits / asked:.0%} hits)" if asked else ""
    full = ", full" if cache.full else ""
    return (
        f"{many(cache.hits, 'hit')}, {many(cache.misses, 'miss', 'misses')}{share}; holds "
        f"{many(cache.admitted, 'sample')}, {show_size(cache.used)} of "
        f"{show_size(cache.budget)}{full}"
    )


def _stage_rows(stages: Sequence[StageStats]) -> list[Cells]:
    total = sum(stage.seconds for stage in stages)
    rows: list[Cells] = [("stage", "samples", "seconds", "ms/sample", "share")]
    for stage in stages:
        each = f"{1e3 * stage.seconds / stage.samples:,.3f}" if stage.samples else ""
        share = f"{stage.seconds / total:.0%}" if total > 0 else ""
        rows.append((stage.name, f"{stage.samples:,}", f"{stage.seconds:,.3f}", each, share))
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.3g} s"
