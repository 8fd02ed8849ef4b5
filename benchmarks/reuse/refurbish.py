"""What refurbishing gains, and what its eviction and its shuffle have to do with it (Revamper)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count, drawing
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import Lane, Run, progress, race, turns
from benchmarks.harness.race_table import (
    CPU,
    MEMORY,
    RATE,
    Column,
    Versus,
    join_results,
    race_result,
)
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import image_files
from benchmarks.reuse.courses import WARM_UP, BatchTimes, Cycles, paced
from benchmarks.reuse.roads import (
    SIMPLIFIED,
    STANDARD,
    Reused,
    as_built,
    echo,
    everyone,
    reference_count,
)

FASTER = {2: 1.5, 3: 1.9}
"""How many times as fast as standard preparation it should be, by how often a sample is used."""

LEVEL = 1.2
"""How many times as fast as with eviction by counting, where an accelerator sets the pace."""

AHEAD = 4
"""Batches that may be prepared and not taken yet when counting begins, or when it ends."""

PHOTOGRAPHS = 1024
"""In an epoch, so that a cycle of six takes several seconds."""

ONE_BY_ONE = 8
"""Batches in an epoch where each is timed: nothing is prepared ahead there, so few will do."""

FRESH = Column("prepared anew %", "fresh", "{:.1f}", 100)
BUSY = Column("accelerator busy %", "busy", "{:.1f}", 100)
PACE = Column("ms a batch of the accelerator", "pace", "{:.1f}", 1e3)
VARIATION = Column("variation of batch times %", "variation", "{:.1f}", 100)
MEDIAN = Column("median batch ms", "median", "{:.1f}", 1e3)
SLOWEST = Column("slowest batch ms", "slowest", "{:.1f}", 1e3)


def run(options: Namespace) -> Result:
    if not image_files(options.data)[0]:
        raise SystemExit(f"{options.data} has no JPEG files in class folders")
    # Whole batches, because a smaller one takes less time than the others.
    samples = max(1, options.photographs // options.batch) * options.batch
    reuse = tuple(sorted(set(options.reuse)))
    work = Reused(options.data, samples, options.batch, options.workers, reuse)
    made = join_results(
        [
            _throughput(work, options),
            *(_at_a_pace(work, number, options) for number in reuse),
            _batch_times(work, options),
        ]
    )
    return replace(made, notes=(*_said_first(work), *made.notes))


def _throughput(work: Reused, options: Namespace) -> Result:
    name = "refurbish, as fast as it goes"
    lanes = race(
        name,
        everyone(work.reuse),
        work,
        Cycles(options.seconds, options.samples),
        rounds=options.rounds,
        timeout=_timeout(options),
    )
    targets = {as_built(number).title: FASTER[number] for number in work.reuse if number in FASTER}
    made = race_result(
        name,
        f"{name}: {_what(work)}, {work.workers} workers",
        lanes,
        (RATE, CPU, MEMORY, FRESH),
        (Versus("rate / standard", "rate", True, own=targets),),
        beside=(STANDARD.title,),
        different=(SIMPLIFIED.title,),
    )
    return _coloured(replace(made, wrong=(*made.wrong, *_strays(name, lanes, work))), work.reuse)


def _at_a_pace(work: Reused, number: int, options: Namespace) -> Result:
    name = f"refurbish, {number} times, beside an accelerator"
    ours, theirs = as_built(number), reference_count(number)
    lanes = [Lane(one.title, ours=True) for one in (theirs, ours)]
    runners = (theirs.prepare, ours.prepare)
    for turn, order in turns(len(lanes), options.rounds):
        progress(f"{name}: round {turn + 1} of {options.rounds}")
        try:
            runs = run_alone(
                paced,
                ours.prepare,
                [runners[place] for place in order],
                work,
                timeout=_timeout(options),
            ).value
        except AloneError as error:
            progress(error.printed or f"  {error}")
            for lane in lanes:
                lane.fail(error)
            break
        for place, run in zip(order, runs, strict=True):
            lanes[place].runs[turn] = run
            progress(f"  {lanes[place].title}: " + _said(run))
    made = race_result(
        name,
        f"{name}: {_what(work)}, {work.workers} workers",
        lanes,
        (RATE, BUSY, PACE),
        (Versus("rate / by counting", "rate", True, LEVEL),),
        beside=(theirs.title,),
    )
    return _coloured(made, (number,))


def _batch_times(work: Reused, options: Namespace) -> Result:
    name = "refurbish, batch by batch"
    work = replace(work, samples=min(work.samples, ONE_BY_ONE * work.batch))
    both = [make(number) for number in work.reuse for make in (reference_count, as_built)]
    lanes = race(
        name,
        (STANDARD, *both),
        work,
        BatchTimes(),
        rounds=options.rounds,
        timeout=_timeout(options),
    )
    made = race_result(
        name,
        f"{name}: {_what(work)}, no workers",
        lanes,
        (VARIATION, MEDIAN, SLOWEST),
        (),
    )
    # One level deeper than what is drawn: there is no rate in it.
    return replace(made, data={name: {"contestants": made.data[name]}})


def _what(work: Reused) -> str:
    epochs = f"cycles of {work.cycle} epochs of {work.samples:,} samples"
    return f"{epochs}, batches of {work.batch}"


def _said_first(work: Reused) -> tuple[str, ...]:
    """What the tables have no room for."""
    files = len(image_files(work.data)[0])
    return (
        f"refurbish: {files:,} photographs; decode and RandAugment, which refurbish keeps, then "
        f"crop to {work.side} and flip, uint8. Everything is counted over whole cycles, after "
        f"{WARM_UP} epochs",
        "refurbish: as fast as it goes, the consumer does nothing. The accelerator is simulated: "
        "it sleeps for every batch as long as one took to prepare just before (median over a "
        "cycle of refurbish), and uses no CPU",
    )


def _said(run: Run) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in run.values.items())


def _timeout(options: Namespace) -> float:
    return float(600 + 10 * options.seconds)


def _strays(name: str, lanes: Sequence[Lane], work: Reused) -> list[str]:
    """Who prepared more or less than is due, and so was measured at something else."""
    due = {
        make(number).title: 1 / number
        for number in work.reuse
        for make in (echo, reference_count, as_built)
    }
    allowed = AHEAD * work.batch / (work.samples * work.cycle)
    wrong = []
    for lane in lanes:
        wanted = due.get(lane.title)
        for run in lane.runs.values():
            if wanted is not None and abs(run.values["fresh"] - wanted) > allowed:
                wrong.append(
                    f"{name}: {lane.title} prepared {run.values['fresh']:.1%} of the samples anew, "
                    f"where {wanted:.1%} are due"
                )
                break
    return wrong


def _coloured(made: Result, reuse: Sequence[int]) -> Result:
    """In a chart refurbish as built stands out; in the table all are compared."""
    ours = {as_built(number).title for number in reuse}
    data = {
        name: {title: {**lane, "ours": title in ours} for title, lane in lanes.items()}
        for name, lanes in made.data.items()
    }
    return replace(made, data=data)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--chart", type=drawing, metavar="FILE", help="draw it, as .svg or .png")
    parser.add_argument(
        "--photographs",
        type=count,
        default=PHOTOGRAPHS,
        help=f"that make an epoch; of fewer files, each comes several times ({PHOTOGRAPHS})",
    )
    parser.add_argument(
        "--reuse",
        type=count,
        nargs="+",
        default=list(FASTER),
        metavar="TIMES",
        help="how often a sample is used (2 3)",
    )


BENCHMARK = Benchmark(
    "refurbish",
    "JPEG folders with RandAugment kept and used again: rates, stalls, batch times",
    run,
    _arguments,
    needs_data=True,
)
