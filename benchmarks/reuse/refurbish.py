"""The gain of refurbish, and how much balanced eviction and cache-aware shuffle contribute to it
(Revamper)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count, drawing, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import Contestant, Lane, Run, progress, race, turns
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
from benchmarks.reuse.courses import WARM_UP, BatchTimes, Cycles, run_at_pace
from benchmarks.reuse.roads import (
    SIMPLIFIED,
    STANDARD,
    ReuseWorkload,
    all_contestants,
    as_built,
    echo,
    reference_count,
)

FASTER = {2: 1.5, 3: 1.9}
"""Targets for the rate relative to standard preparation, by the number of uses of a sample."""

LEVEL = 1.2
"""Target for the rate relative to eviction by counting, with an accelerator."""

AHEAD = 4
"""Batches that may be prepared ahead when counting begins or ends."""

PHOTOGRAPHS = 1024
"""Samples per epoch: a cycle of six epochs takes several seconds."""

ONE_BY_ONE = 8
"""Batches per epoch where each batch is timed. Few are enough, as nothing is prepared ahead."""

FRESH = Column("fresh %", "fresh", "{:.1f}", 100)
BUSY = Column("accelerator busy %", "busy", "{:.1f}", 100)
PACE = Column("accelerator ms per batch", "pace", "{:.1f}", 1e3)
VARIATION = Column("variation of batch times %", "variation", "{:.1f}", 100)
MEDIAN = Column("median batch ms", "median", "{:.1f}", 1e3)
SLOWEST = Column("slowest batch ms", "slowest", "{:.1f}", 1e3)


def run(options: Namespace) -> Result:
    if not image_files(options.data)[0]:
        raise SystemExit(f"{options.data} has no JPEG files in class folders")
    # Whole batches, because a smaller last one would take less time.
    samples = max(1, options.photographs // options.batch) * options.batch
    reuse = tuple(sorted(set(options.reuse)))
    work = ReuseWorkload(options.data, samples, options.batch, options.workers, reuse)
    if options.ratios:
        return join_results([_at_a_ratio(work, ratio, options) for ratio in options.ratios])
    result = join_results(
        [
            _throughput(work, options),
            *(_at_a_pace(work, number, options) for number in reuse),
            _batch_times(work, options),
        ]
    )
    return replace(result, notes=(*_method_notes(work), *result.notes))


def _throughput(work: ReuseWorkload, options: Namespace) -> Result:
    name = "refurbish, as fast as it goes"
    lanes = race(
        name,
        all_contestants(work.reuse),
        work,
        Cycles(options.seconds, options.samples),
        rounds=options.rounds,
        timeout=_timeout(options),
    )
    targets = {as_built(number).title: FASTER[number] for number in work.reuse if number in FASTER}
    result = race_result(
        name,
        f"{name}: {_describe(work)}, {work.workers} workers",
        lanes,
        (RATE, CPU, MEMORY, FRESH),
        (Versus("rate / standard", "rate", True, own=targets),),
        beside=(STANDARD.title,),
        different=(SIMPLIFIED.title,),
    )
    return _highlight(
        replace(result, wrong=(*result.wrong, *_wrong_shares(name, lanes, work))), work.reuse
    )


def _at_a_pace(work: ReuseWorkload, number: int, options: Namespace) -> Result:
    name = f"refurbish, {number} times, beside an accelerator"
    ours, theirs = as_built(number), reference_count(number)
    lanes = _beside_an_accelerator(name, ours, (theirs, ours), work, options)
    result = race_result(
        name,
        f"{name}: {_describe(work)}, {work.workers} workers",
        lanes,
        (RATE, BUSY, PACE),
        (Versus("rate / by counting", "rate", True, LEVEL),),
        beside=(theirs.title,),
    )
    return _highlight(result, (number,))


def _at_a_ratio(work: ReuseWorkload, ratio: float, options: Namespace) -> Result:
    """Beside an accelerator that is this many times as fast as standard preparation."""
    name = f"refurbish, accelerator {ratio:g} times as fast as preparation"
    contestants = (STANDARD, *map(as_built, work.reuse))
    lanes = _beside_an_accelerator(name, STANDARD, contestants, work, options, ratio)
    result = race_result(
        name,
        f"{name}: {_describe(work)}, {work.workers} workers",
        lanes,
        (RATE, BUSY, PACE),
        (Versus("rate / standard", "rate", True),),
        beside=(STANDARD.title,),
    )
    return _highlight(result, work.reuse)


def _beside_an_accelerator(
    name: str,
    pacemaker: Contestant[ReuseWorkload],
    contestants: Sequence[Contestant[ReuseWorkload]],
    work: ReuseWorkload,
    options: Namespace,
    ratio: float | None = None,
) -> list[Lane]:
    lanes = [Lane(contestant.title, ours=True) for contestant in contestants]
    for turn, order in turns(len(lanes), options.rounds):
        progress(f"{name}: round {turn + 1} of {options.rounds}")
        try:
            runs = run_alone(
                run_at_pace,
                pacemaker.prepare,
                [contestants[place].prepare for place in order],
                work,
                ratio,
                timeout=_timeout(options),
            ).value
        except AloneError as error:
            progress(error.printed or f"  {error}")
            for lane in lanes:
                lane.fail(error)
            break
        for place, run in zip(order, runs, strict=True):
            lanes[place].runs[turn] = run
            progress(f"  {lanes[place].title}: " + _format(run))
    return lanes


def _batch_times(work: ReuseWorkload, options: Namespace) -> Result:
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
    result = race_result(
        name,
        f"{name}: {_describe(work)}, no workers",
        lanes,
        (VARIATION, MEDIAN, SLOWEST),
        (),
    )
    # Nested one level deeper, so that a chart leaves it out: these runs have no rate.
    return replace(result, data={name: {"contestants": result.data[name]}})


def _describe(work: ReuseWorkload) -> str:
    epochs = f"cycles of {work.cycle} epochs of {work.samples:,} samples"
    return f"{epochs}, batches of {work.batch}"


def _method_notes(work: ReuseWorkload) -> tuple[str, ...]:
    """Notes about the method, for which the tables have no room."""
    files = len(image_files(work.data)[0])
    return (
        f"refurbish: {files:,} photographs; decode and RandAugment, which refurbish keeps, then "
        f"crop to {work.side} and flip, uint8. All values are over whole cycles, after {WARM_UP} "
        "epochs of warm-up",
        "refurbish: in the race as fast as it goes, the consumer does nothing. The accelerator is "
        "simulated: for every batch it sleeps as long as refurbish took to prepare one (median of "
        "a cycle just before), and uses no CPU",
    )


def _format(run: Run) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in run.values.items())


def _timeout(options: Namespace) -> float:
    return float(600 + 10 * options.seconds)


def _wrong_shares(name: str, lanes: Sequence[Lane], work: ReuseWorkload) -> list[str]:
    """Errors for contestants whose share of fresh samples is not as expected."""
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
                    f"{name}: {lane.title}: {run.values['fresh']:.1%} of the samples were fresh, "
                    f"but {wanted:.1%} are expected"
                )
                break
    return wrong


def _highlight(result: Result, reuse: Sequence[int]) -> Result:
    """Highlight only Penstock's own refurbish in a chart. The table compares all contestants."""
    ours = {as_built(number).title for number in reuse}
    data = {
        name: {title: {**lane, "ours": title in ours} for title, lane in lanes.items()}
        for name, lanes in result.data.items()
    }
    return replace(result, data=data)


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--chart", type=drawing, metavar="FILE", help="draw a chart, as .svg or .png"
    )
    parser.add_argument(
        "--photographs",
        type=count,
        default=PHOTOGRAPHS,
        help=f"samples per epoch; with fewer files, files are repeated ({PHOTOGRAPHS})",
    )
    parser.add_argument(
        "--reuse",
        type=count,
        nargs="+",
        default=list(FASTER),
        metavar="TIMES",
        help="numbers of uses of a sample (2 3)",
    )
    parser.add_argument(
        "--ratios",
        type=positive,
        nargs="+",
        metavar="RATIO",
        help="instead of all else: rates beside an accelerator this many times as fast as standard "
        "preparation",
    )


BENCHMARK = Benchmark(
    "refurbish",
    "JPEG folders with reuse of images after RandAugment: rates, stalls, batch times",
    run,
    _arguments,
    needs_data=True,
)
