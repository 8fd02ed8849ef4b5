"""The result of a profile: what each stage costs, as values, as a text table and as HTML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from penstock.config import show_size
from penstock.host.text import aligned
from penstock.stats import BadSample, Cells, html_table

StageKind = Literal["source", "map", "cache", "refurbish", "echo", "fused", "batch", "part"]

HOLDS = ("cache", "refurbish", "echo")
"""Kinds of stops that keep samples."""

_LINE_WIDTH = 100
_LEAVES_WIDTH = 30
_PRINTED_BAD_SAMPLES = 5

_TITLES: Cells = ("ms/sample", "CPU ms", "share", "leaves", "size", "random", "runs in")
_BLANK: Cells = ("",) * len(_TITLES)
_RIGHT = {1, 2, 3, 5}


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, or one ``part`` of it: the cost of a sample there, and what leaves it.

    ``ms`` is wall time and ``cpu_ms`` the CPU time of the thread, both per sample and in this stage
    alone; ``share`` is its part of the pipeline's ``ms``. ``samples`` is the number of measured
    samples. ``leaves`` describes a sample that leaves the stage and ``nbytes`` is its size; for
    ``batch``, those of a batch. ``needs_process`` says why the stage cannot run in threads; it is
    empty if it can.

    For a stage that keeps samples, ``ms`` is the cost of a miss: look up, find nothing, store.
    ``hit_ms`` is the cost of a hit, and ``holds`` the share of samples that will be hits: for a
    cache, the share that fits in its budget.
    """

    name: str
    kind: StageKind
    ms: float
    cpu_ms: float
    share: float
    samples: int
    leaves: str = ""
    nbytes: int = 0
    random: bool = False
    needs_process: str = ""
    hit_ms: float | None = None
    hit_cpu_ms: float | None = None
    holds: float | None = None
    parts: tuple[StageCost, ...] = ()


@dataclass(frozen=True, repr=False)
class Profile:
    """What a pipeline costs, stage by stage. Prints as a table, and as HTML in a notebook.

    ``written`` has a row for every operation, as the pipeline was written; ``fused`` has the rows
    of the plan that a loader runs. Both are the same if nothing is fused. ``cores`` is the number
    of usable cores; ``workers`` says what workers a loader would start, and why. ``hint`` says how
    to make the slowest stage faster.
    """

    source: str
    samples: int
    rounds: int
    written: tuple[StageCost, ...]
    fused: tuple[StageCost, ...]
    cores: int
    workers: str
    bad: int = 0
    bad_samples: tuple[BadSample, ...] = ()
    hint: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[StageCost, ...]:
        """The rows of the plan that a loader runs."""
        return self.fused

    @property
    def total_written(self) -> float:
        """Milliseconds per sample with every operation apart and every cache missed."""
        return sum(row.ms for row in self.written)

    @property
    def total_fused(self) -> float:
        """Milliseconds per sample as a loader runs it, with every cache missed."""
        return sum(row.ms for row in self.fused)

    @property
    def saved(self) -> float:
        """Milliseconds per sample that fusing saves; negative if it costs time."""
        return self.total_written - self.total_fused

    @property
    def total_cached(self) -> float | None:
        """Milliseconds per sample in later epochs, when the caches hold all that fits.

        ``None`` without caches, or if their hits could not be measured.
        """
        return cost_in_later_epochs(self.fused)

    @property
    def slowest(self) -> StageCost:
        return max(self.fused, key=lambda row: row.ms)

    @property
    def per_second(self) -> float:
        """Samples per second on one core, with every cache missed."""
        return 1e3 / self.total_fused if self.total_fused > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """All fields and totals as plain values."""
        per_second = self.per_second
        return {
            **asdict(self),
            "total_written": self.total_written,
            "total_fused": self.total_fused,
            "total_cached": self.total_cached,
            "saved": self.saved,
            "slowest": self.slowest.name,
            "per_second": per_second if per_second != float("inf") else None,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __repr__(self) -> str:
        tables = _tables(self)
        # All tables share the widths of their columns.
        lines = aligned([row for table in tables for row in table], _RIGHT)
        out = [_title(self), ""]
        for table in tables:
            out += [*lines[: len(table)], ""]
            del lines[: len(table)]
        return "\n".join(out + _conclusions(self))

    def _repr_html_(self) -> str:
        """The same report for a notebook."""
        from html import escape

        tables = [html_table(table, _RIGHT, header=True) for table in _tables(self)]
        conclusions = escape("\n".join(_conclusions(self)))
        return "\n".join([f"<p>{escape(_title(self))}</p>", *tables, f"<pre>{conclusions}</pre>"])


def cost_in_later_epochs(rows: Sequence[StageCost]) -> float | None:
    """Milliseconds per sample once the caches hold all that fits; ``None`` if unknown.

    Caches admit samples in one order and never evict, so a smaller cache holds a subset of a larger
    one. This divides the data into spans; the lowest cache that holds a span serves it.
    """
    caches = [(at, row.holds, row.hit_ms) for at, row in enumerate(rows) if row.kind in HOLDS]
    if not caches:
        return None
    edges = {0.0, 1.0}
    for _, holds, hit in caches:
        if holds is None or hit is None:
            return None
        edges.add(holds)
    total = 0.0
    for start, end in pairwise(sorted(edges)):
        cost = sum(row.ms for row in rows)
        for at, holds, hit in caches:
            if (holds or 0.0) > start:
                cost = (hit or 0.0) + sum(row.ms for row in rows[at + 1 :])
        total += (end - start) * cost
    return total


# The report


def _title(profile: Profile) -> str:
    rounds = f"{profile.rounds} round" + ("" if profile.rounds == 1 else "s")
    return f"{profile.samples:,} of {profile.source}, one thread, {rounds}"


def _is_fused(profile: Profile) -> bool:
    return profile.fused is not profile.written


def _tables(profile: Profile) -> list[list[Cells]]:
    """One table, or two if operations are fused; the first row of each has the titles."""
    if _is_fused(profile):
        tables = [_table("as written", profile.written), _table("as it runs", profile.fused)]
    else:
        tables = [_table("stage", profile.written)]
    if any(row.needs_process for row in (*profile.written, *profile.fused)):
        return tables
    return [[cells[:-1] for cells in table] for table in tables]


def _table(title: str, rows: Sequence[StageCost]) -> list[Cells]:
    table: list[Cells] = [(title, *_TITLES)]
    for row in rows:
        # The name of a fused step is long, so each of its operations gets a line.
        name, *others = row.name.split("+") if row.kind == "fused" else [row.name]
        table.append(_cells(row, name))
        table += [(f"  + {other}", *_BLANK) for other in others]
        if row.hit_ms is not None:
            times = (_ms(row.hit_ms), _ms(row.hit_cpu_ms or 0.0))
            table.append(("  on a hit", *times, *_BLANK[2:]))
        table += [_cells(part, f"  {part.name}") for part in row.parts]
    total, cpu = sum(row.ms for row in rows), sum(row.cpu_ms for row in rows)
    table.append(("total", _ms(total), _ms(cpu), *_BLANK[2:]))
    return table


def _cells(row: StageCost, name: str) -> Cells:
    workers = "processes" if row.needs_process else "threads"
    return (
        name,
        _ms(row.ms),
        _ms(row.cpu_ms),
        _percent(row.share),
        textwrap.shorten(row.leaves, _LEAVES_WIDTH, placeholder=" ..."),
        show_size(row.nbytes) if row.nbytes else "",
        "yes" if row.random else "",
        "" if row.kind == "part" else workers,
    )


def _conclusions(profile: Profile) -> list[str]:
    out = []
    if _is_fused(profile):
        share = profile.saved / profile.total_written if profile.total_written > 0 else 0.0
        verb = "saves" if profile.saved >= 0 else "costs"
        cpu = sum(r.cpu_ms for r in profile.written) - sum(r.cpu_ms for r in profile.fused)
        out.append(
            f"fused: {verb} {_ms(abs(profile.saved))} ms a sample ({abs(share):.0%}), "
            f"{_ms(cpu)} ms of CPU"
        )
    out.append(f"speed: {_speeds(profile, profile.total_fused)}")
    cached = profile.total_cached
    if cached is not None:
        held = _held([row for row in profile.fused if row.holds is not None])
        out.append(f"later epochs, {held}: {_speeds(profile, cached)}")
    out.append(f"loader: {profile.workers}")
    slowest = profile.slowest
    out.append(f"slowest: {slowest.name}, {_percent(slowest.share)} of the time")
    if profile.hint:
        out += textwrap.wrap(f"hint: {profile.hint}", _LINE_WIDTH, subsequent_indent="  ")
    for note in profile.notes:
        out += textwrap.wrap(f"note: {note}", _LINE_WIDTH, subsequent_indent="  ")
    if profile.bad:
        out.append(f"bad: {profile.bad} samples failed and were left out")
        for sample in profile.bad_samples[:_PRINTED_BAD_SAMPLES]:
            out.append(f"  {sample.name} in {sample.stage}: {sample.error.splitlines()[0]}")
        if profile.bad > _PRINTED_BAD_SAMPLES:
            out.append(f"  and {profile.bad - _PRINTED_BAD_SAMPLES} more")
    return out


def _speeds(profile: Profile, ms: float) -> str:
    if ms <= 0:
        return "too fast to measure"
    per_core = 1e3 / ms
    all_cores = f", at most {_rate(per_core * profile.cores)} on {profile.cores}"
    return f"{_rate(per_core)} samples/s on one core" + (all_cores if profile.cores > 1 else "")


def _held(rows: Sequence[StageCost]) -> str:
    """The share of samples that caches and reuse serve in later epochs, in words."""
    shares = [row.holds or 0.0 for row in rows]
    if any(row.kind != "cache" for row in rows):
        served = (f"{_percent(row.holds or 0.0)} from {row.name}" for row in rows)
        return "with " + " and ".join(served)
    if all(share >= 1 for share in shares):
        return "all in the cache" if len(rows) == 1 else "all in the caches"
    return "with " + " and ".join(map(_percent, shares)) + " in the cache"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _ms(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
