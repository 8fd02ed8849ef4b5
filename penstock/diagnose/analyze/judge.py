"""Judges an analysis: from the measurements to the one result that everything else shows. Pure.

The differences between phases decide: with and without the loader at work, with data from memory
and from storage. The wait that was measured at the loop is the check on them: a verdict that does
not agree with it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from penstock.diagnose.analyze.model import TOO_WIDE, Change, predict
from penstock.diagnose.analyze.report import (
    AnalysisReport,
    Interval,
    MachineUse,
    Phase,
    PhaseName,
    Rate,
    WorkerUse,
)
from penstock.diagnose.analyze.result import (
    LEAST_STEPS,
    MODEL_OFF,
    MODEL_USELESS,
    SMALL,
    Bound,
    Forecasts,
    LoaderRates,
    Result,
    Shares,
    StepTimes,
    Trust,
    Verdict,
    broken_rules,
)
from penstock.host.text import percent

CONTENTION = 0.10
"""Contention below this share of the time is not named: a replayed batch stays in the caches of the
core, so a step with fresh batches takes a little longer on any machine."""

LEAST_ERROR = 0.03
"""Predictions are never more exact than this: the median error of the grid of benchmarks."""

OTHERS = 0.15
"""Load by others below this share of the cores is not mentioned."""

SLOW_PACE = 0.9
"""A phase whose cores were slower than this, relative to the fastest phase, is mentioned."""

WAITS_MOSTLY = 0.5
"""Workers are bound by latency if they wait for more than this share of their work."""

CAUSES = {
    "sleep": "sleep",
    "open": "open files",
    "read": "read bytes",
    "lock": "wait for a lock",
    "network": "wait for a network peer",
    "other": "wait in the kernel",
}

CORES, JOBS = (1, 2, 4), (1, 2, 4)
"""Factors of the number of cores, and numbers of jobs, of the predictions that are checked."""


def result_of(report: AnalysisReport) -> Result:
    """The result of a report, checked: a contradiction in it has become a refusal."""
    job = slowest_rank(report)
    result = _unchecked(job, world=max(job.setup.world, 1 + len(report.ranks)))
    if result.verdict.bound is None:
        return result
    broken = broken_rules(result)
    if not broken:
        return result
    return _without_contradictions(result, broken, job)


def slowest_rank(report: AnalysisReport) -> AnalysisReport:
    """The report of the rank whose loader makes the job wait longest, without the other ranks.

    Ranks that exchange gradients wait for each other inside their steps. So the stall of one shows
    as a longer step of the others, and only its own wait at the loop is its stall.
    """
    ranks = (report, *report.ranks)
    return replace(max(ranks, key=_wait_seconds), ranks=())


def _wait_seconds(report: AnalysisReport) -> float:
    """Seconds per sample that the loop waited; in the run as it is, if that was measured."""
    for name in ("as it is", "cold", "cached"):
        phase = report.phase(name)
        if phase is not None and phase.wait is not None and phase.steps:
            return phase.wait.value / report.setup.batch
    waits = [wait.wait for wait in report.waits if wait.phase != "replay"]
    late = waits[len(waits) // 2 :]
    return sum(late) / (len(late) * report.setup.batch) if late else 0.0


def _unchecked(report: AnalysisReport, world: int) -> Result:
    shares, step = shares_of(report), _step_times(report)
    rates = _rates(report, shares)
    trust = _trust(report, shares)
    verdict = _verdict(report, shares, rates)
    if verdict.bound is None and trust.numbers:
        trust = replace(trust, numbers=False, reasons=(*trust.reasons, "no bottleneck is known."))
    return Result(
        verdict=verdict,
        rates=rates,
        trust=trust,
        shares=shares,
        step=step,
        forecasts=_forecasts(report, trust) if trust.numbers else Forecasts(),
        workers=report.workers_use,
        machine=report.machine_use,
        phases=report.phases,
        warm=report.warm or 0.0,
        rank=report.setup.rank,
        world=world,
        warnings=tuple(_warnings(report)),
        interrupted=report.interrupted,
    )


def _without_contradictions(
    result: Result, broken: tuple[str, ...], report: AnalysisReport
) -> Result:
    """A result without the statements that contradict each other."""
    about_verdict = [line for line in broken if line.startswith("the verdict")]
    others = tuple(line for line in broken if line not in about_verdict)
    reasons = result.trust.reasons
    if others:
        reasons += tuple(f"no predictions: {line}" for line in others)
    verdict = result.verdict
    if about_verdict:
        verdict = Verdict(
            None,
            refusal=f"the measurements contradict each other: {about_verdict[0]} "
            f"{_more_time(report)}",
        )
    cleaned = replace(
        result,
        verdict=verdict,
        trust=replace(result.trust, numbers=False, reasons=reasons),
        forecasts=Forecasts(),
    )
    if any(line.startswith("memory (C") for line in others) and result.rates.S is not None:
        # Reads that never left memory: the rate of storage is not known.
        cleaned = replace(cleaned, rates=replace(cleaned.rates, S=None))
    return cleaned


# Where the time goes.


def measured_run(report: AnalysisReport) -> Phase | None:
    """The phase that shows the speed of the unchanged script.

    That is the run as it is, unless it was filling a cache that is full in later epochs.
    """
    own = report.phase("as it is")
    filling = report.setup.cache and not report.setup.of_torch
    if own is None or not own.rate.value or filling:
        return report.phase("cold") or (own if own is not None and own.rate.value else None)
    return own


def shares_of(report: AnalysisReport) -> Shares | None:
    """Shares of the time of the measured run; ``None`` without a run and a replayed batch."""
    run, replay = measured_run(report), report.phase("replay")
    if run is None or replay is None or not run.rate.value or not replay.rate.value:
        return None
    batch = report.setup.batch
    whole = batch / run.rate.value
    alone = _seconds(replay.rate, batch)
    lost = Interval(
        max(0.0, whole - alone.value),
        max(0.0, batch / _most(run.rate) - alone.high),
        max(0.0, batch / max(run.rate.low, 1e-12) - alone.low),
    )
    if run.wait is None:
        # Old reports have no times of the loop: all that is lost counts as waiting.
        wait = lost
    else:
        wait = run.wait
    asynchronous = report.setup.accelerator != "cpu"
    if asynchronous or report.setup.world > 1:
        # The loop may wait while the device still computes: only what is lost counts.
        wait = _least(wait, lost)
    contention = Interval(
        max(0.0, lost.value - wait.value),
        max(0.0, lost.low - wait.high),
        max(0.0, lost.high - wait.low),
    )
    prep, fetch = _split(report, wait)
    return Shares(*(_share(one, whole) for one in (prep, fetch, contention)))


def _split(report: AnalysisReport, wait: Interval) -> tuple[Interval, Interval]:
    """The wait for preparation and the wait for storage, seconds per batch."""
    cached = report.phase("cached")
    batch = report.setup.batch
    if _reads_in_prep(report):
        # Reads cannot be told apart from preparation, so a difference is that of two moments.
        return wait, Interval(0.0, 0.0, 0.0)
    if cached is None or not cached.rate.value:
        nothing = Interval(0.0, 0.0, 0.0 if wait.value < 1e-9 else wait.high)
        return wait, nothing
    if cached.wait is not None:
        prep = _least(wait, cached.wait)
    else:
        replay = report.phase("replay")
        alone = 0.0 if replay is None else batch / replay.rate.value
        took = _seconds(cached.rate, batch)
        prep = _least(
            wait,
            Interval(*(max(0.0, one - alone) for one in (took.value, took.low, took.high))),
        )
    fetch = Interval(
        max(0.0, wait.value - prep.value),
        max(0.0, wait.low - prep.high),
        max(0.0, wait.high - prep.low),
    )
    return prep, fetch


def _reads_in_prep(report: AnalysisReport) -> bool:
    """Whether the analysis has come to its end, and found no reads beside the preparation."""
    return report.costs.prep > 0 and not report.costs.storage


def _least(one: Interval, other: Interval) -> Interval:
    return Interval(min(one.value, other.value), min(one.low, other.low), min(one.high, other.high))


def _share(seconds: Interval, whole: float) -> Interval:
    return Interval(*(min(1.0, one / whole) for one in (seconds.value, seconds.low, seconds.high)))


def _seconds(rate: Rate, batch: int) -> Interval:
    """Seconds per batch at a rate."""
    slow = batch / rate.low if rate.low > 0 else math.inf
    return Interval(batch / rate.value, batch / _most(rate), slow)


def _most(rate: Rate) -> float:
    return rate.high if rate.high > 0 else math.inf


def _step_times(report: AnalysisReport) -> StepTimes | None:
    run, replay = measured_run(report), report.phase("replay")
    if run is None or replay is None or run.step is None or run.wait is None:
        return None
    if not replay.rate.value:
        return None
    return StepTimes(_seconds(replay.rate, report.setup.batch), run.step, run.wait)


def contended_seconds(report: AnalysisReport) -> float:
    """Seconds per sample by which the loader makes the step longer; 0 if that is not sure."""
    shares, run = shares_of(report), measured_run(report)
    if shares is None or run is None or shares.contention.low <= 0:
        return 0.0
    return shares.contention.value / run.rate.value


# The verdict.


def _verdict(report: AnalysisReport, shares: Shares | None, rates: LoaderRates) -> Verdict:
    few = _too_few_steps(report)
    if few or shares is None:
        return Verdict(None, refusal=few or f"no run of the training loop was measured. {AGAIN}")
    wait = _sum(shares.prep, shares.fetch)
    held = shares.contention
    figures = _figures(report, shares)
    unsure = _unsure(shares)
    waits, contends = wait.value > SMALL, held.value > CONTENTION
    if not waits and not contends:
        if unsure:
            words, one = unsure[0]
            return Verdict(
                None,
                refusal=f"training {words} {percent(one.low)} to {percent(one.high)} of the time, "
                f"which may be nothing or a bottleneck. {_more_time(report)}",
            )
        return Verdict("compute", reason=figures)
    if waits and wait.low <= 0:
        return Verdict(
            None,
            refusal=f"training waits 0 % to {percent(wait.high)} of the time for batches. "
            f"{_more_time(report)}",
        )
    if not waits and held.low <= 0:
        return Verdict(
            None,
            refusal=f"the loader makes the step longer by 0 % to {percent(held.high)} of the time. "
            f"{_more_time(report)}",
        )
    told_apart = bool(_steps(report, "cached")) or _reads_in_prep(report)
    if waits and not told_apart and not _waits_mostly(report.workers_use):
        return Verdict(
            None,
            refusal=f"training waits {percent(wait.value)} of the time for batches; whether for "
            f"preparation or for storage was not measured. {_more_time(report)}",
        )
    disturbed = _waits_for_others(report, rates) if waits else ""
    if disturbed:
        return Verdict(None, refusal=disturbed)
    parts: list[tuple[Bound, float]] = []
    if waits:
        parts += _waiting_parts(report, shares)
    if contends and held.low > 0:
        parts.append(("contention", held.value))
    parts.sort(key=lambda part: -part[1])
    first, largest = parts[0]
    also = tuple(bound for bound, share in parts[1:] if share > max(SMALL, largest / 3))
    cause = _cause(report.workers_use) if "latency" in (first, *also) else ""
    use = report.workers_use
    place = ""
    if cause and use is not None and use.places and use.waits[cause] == max(use.waits.values()):
        place = use.places[0][0]
    return Verdict(first, figures, also=also, cause=cause, place=place)


def _unsure(shares: Shares) -> list[tuple[str, Interval]]:
    """The shares of which it is not sure whether they are a bottleneck, with their words."""
    return [
        (words, one)
        for words, one, least in (
            ("waits for batches", _sum(shares.prep, shares.fetch), SMALL),
            ("is slowed by the loader", shares.contention, CONTENTION),
        )
        if one.low < least < one.high and not _far(one, least)
    ]


def undecided(report: AnalysisReport) -> bool:
    """Whether more steps may turn a refusal into a verdict, or a verdict into another one."""
    shares = shares_of(report)
    return shares is not None and bool(_unsure(shares))


def _waits_for_others(report: AnalysisReport, rates: LoaderRates) -> str:
    """Why the wait may be due to other processes alone; empty if it is not."""
    uses = [use for use in report.machine_use if use.phase in ("as it is", "prep")]
    others = max((use.others / max(1, use.cores) for use in uses), default=0.0)
    use, prep, step = report.workers_use, rates.P, rates.G
    if others <= BUSY or use is None or prep is None or step is None:
        return ""
    needed = use.computing + sum(use.waits.values())
    possible = prep.value / max(needed, LEAST_WORK)
    if possible <= ENOUGH_FASTER * step.value:
        return ""
    if prep.value > ENOUGH_FASTER * step.value:
        but = (
            f"the loader alone prepares {prep.value:,.0f} samples/s, more than the "
            f"{step.value:,.0f} that the step alone takes"
        )
    else:
        but = (
            f"workers needed only {percent(needed)} of the time for their work: they queued for a "
            f"core {percent(use.queueing)} of it, and were idle {percent(use.idle)}"
        )
    return (
        f"other processes kept {percent(others)} of the cores busy. Training waited for batches, "
        f"but {but}. {LESS_LOAD}"
    )


MOSTLY_IDLE = 0.5
"""Workers that are idle for more than this share of the time hold nothing up: their queueing says
no speed."""

LESS_LOAD = "Analyse on a machine with less load."

BUSY = 0.25
"""Load by others, as a share of the cores, that may by itself make training wait."""

LEAST_WORK = 0.01
"""Shares of a worker's time below this are not exact."""

ENOUGH_FASTER = 1.2
"""Workers that could be so much faster than the step would not hold it up on an idle machine."""


def _far(one: Interval, least: float) -> bool:
    """Whether the value is so far from a limit that an interval that reaches it is bad luck."""
    return one.value < least / 2 and one.high < 2 * least


def _sum(one: Interval, other: Interval) -> Interval:
    return Interval(one.value + other.value, one.low + other.low, min(1.0, one.high + other.high))


def _waiting_parts(report: AnalysisReport, shares: Shares) -> Iterator[tuple[Bound, float]]:
    """The bottlenecks that the loop waits for, with their shares."""
    if shares.fetch.value > SMALL:
        yield "fetch", shares.fetch.value
    if shares.prep.value > SMALL or shares.fetch.value <= SMALL:
        latency = _waits_mostly(report.workers_use)
        yield "latency" if latency else "prep", shares.prep.value


def _waits_mostly(use: WorkerUse | None) -> bool:
    if use is None or use.idle >= 1:
        return False
    return sum(use.waits.values()) / (1 - use.idle) > WAITS_MOSTLY


def more_workers_help(report: AnalysisReport) -> bool:
    """Whether more workers were faster where that was measured; true if it was not."""
    scaling, workers = report.costs.scaling, report.setup.workers
    counts = sorted(count for count in scaling if count >= max(1, workers))
    fewer = [count for count in scaling if count < workers]
    if len(counts) > 1:
        one, other = counts[0], counts[-1]
    elif counts and fewer:
        one, other = min(fewer), counts[0]
    else:
        return True
    return scaling[other] > HELPS * scaling[one]


HELPS = 1.15
"""Several times as many workers that are not faster by this wait for each other."""


def _cause(use: WorkerUse | None) -> str:
    if use is None:
        return ""
    waiting = sum(use.waits.values())
    if use.waits["lock"] >= LOCKED * waiting > 0:
        # Whoever holds the lock waits for something else, and the others wait for the lock.
        return "lock"
    return max(use.waits, key=lambda name: use.waits[name])


LOCKED = 0.25
"""A lock is the cause if workers wait for it in this share of the time that they wait."""


AGAIN = "Let the script train until the analysis is done."


def _too_few_steps(report: AnalysisReport) -> str:
    """Why there are too few steps for a verdict; empty if there are enough."""
    if report.interrupted:
        missing = [name for name in ("as it is", "replay") if not _steps(report, name)]
        if missing:
            return f"{report.interrupted}, before {' and '.join(missing)} were measured. {AGAIN}"
    run = measured_run(report)
    least = min(0 if run is None else run.steps, _steps(report, "replay"))
    if least >= LEAST_STEPS:
        return ""
    loop = [phase for phase in report.phases if phase.name in IN_LOOP]
    steps, seconds = sum(phase.steps for phase in loop), sum(phase.seconds for phase in loop)
    seconds = max(seconds, report.asked_seconds)
    return f"not enough steps to tell: {steps} steps in {seconds:.0f} s. {_more_time(report)}"


IN_LOOP = ("as it is", "replay", "cached", "cold")


def _steps(report: AnalysisReport, name: str) -> int:
    phase = report.phase(name)  # type: ignore[arg-type]
    return 0 if phase is None else phase.steps


def _more_time(report: AnalysisReport) -> str:
    """What to do about a result that is not exact enough."""
    if report.interrupted:
        return AGAIN
    if not report.asked_seconds:
        return "Give more --seconds."
    run = measured_run(report)
    wanted = 4 * report.asked_seconds
    if run is not None and run.rate.value:
        # The steps of all phases with their warm-ups.
        wanted = max(wanted, 50 * report.setup.batch / run.rate.value)
    rounded = math.ceil(wanted / 60) * 60
    return f"Give --seconds {rounded}."


def _figures(report: AnalysisReport, shares: Shares) -> str:
    """The figures that decide, in a sentence."""
    run, replay = measured_run(report), report.phase("replay")
    if run is None or replay is None:
        return ""
    batch = report.setup.batch
    said = f"the loop waits {percent(shares.waiting)} of the time"
    if run.wait is not None and run.step is not None:
        said = (
            f"the loop waits {_ms(run.wait.value)} for a batch ({percent(shares.waiting)} of the "
            f"time), and then computes {_ms(run.step.value)}"
        )
    return f"{said}; without the loader at work a step takes {_ms(batch / replay.rate.value)}"


def _ms(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.5e-3 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


# LoaderRates.


def _rates(report: AnalysisReport, shares: Shares | None) -> LoaderRates:
    size, costs = report.setup.sample_bytes, report.costs
    prep = _known(report.phase("prep"))
    run = measured_run(report)
    if prep is not None and run is not None and shares is not None and shares.waiting <= SMALL:
        # A loop that hardly waits shows that the loader keeps up with it, whatever a disturbed
        # measurement of the loader alone says.
        prep = Rate(
            max(prep.value, run.rate.value),
            max(prep.low, run.rate.low),
            max(prep.high, run.rate.value),
        )
    cache = storage = None
    if size and costs.cache:
        cache = _spread_like(costs.cache / size, report.phase("cache"))
    if size and costs.storage:
        storage = _spread_like(costs.storage / size, report.phase("storage"))
    fetch = _fetch_rate(report, cache, storage)
    return LoaderRates(_known(report.phase("replay")), prep, fetch, cache, storage)


def _known(phase: Phase | None) -> Rate | None:
    return None if phase is None or phase.rate.value <= 0 else phase.rate


def _spread_like(value: float, phase: Phase | None) -> Rate:
    """A rate with the relative interval of a phase."""
    if phase is None or phase.rate.value <= 0:
        return Rate(value, value, value)
    return phase.rate.times(value / phase.rate.value)


def _fetch_rate(report: AnalysisReport, cache: Rate | None, storage: Rate | None) -> Rate | None:
    """Fetching with the present cache, of data that is as warm as it is."""
    if storage is None:
        return None
    hits = report.setup.cached_share(report.setup.cache)
    hits += (1 - hits) * (report.warm or 0.0)

    def of(memory: float, device: float) -> float:
        seconds = (1 - hits) / device if device > 0 else math.inf
        if memory > 0 and math.isfinite(memory):
            seconds += hits / memory
        return 1 / seconds if seconds > 0 else math.inf

    memory = cache or Rate(math.inf, math.inf, math.inf)
    rate = Rate(
        of(memory.value, storage.value), of(memory.low, storage.low), of(memory.high, storage.high)
    )
    return rate if math.isfinite(rate.value) else None


# Trust in the model.


def _trust(report: AnalysisReport, shares: Shares | None) -> Trust:
    run = measured_run(report)
    reasons: list[str] = []
    if report.interrupted or run is None or not report.costs.prep:
        why = report.interrupted or "not all phases were measured"
        return Trust(
            None if run is None else run.rate,
            0.0,
            1.0,
            numbers=False,
            reasons=(f"there are no predictions: {why}.",),
        )
    prep = report.phase("prep")
    if prep is None or not math.isfinite(prep.rate.spread):
        return Trust(
            run.rate,
            0.0,
            1.0,
            numbers=False,
            reasons=(
                "there are no predictions: preparation was measured in too few batches. "
                f"{_more_time(report)}",
            ),
        )
    modelled = predict(report).speed
    off = abs(modelled / run.rate.value - 1)
    replay = report.phase("replay")
    error = LEAST_ERROR + min(1.0, run.rate.spread)
    if replay is not None:
        error += min(1.0, replay.rate.spread) / 2
    phase = ""
    if off > MODEL_OFF:
        phase = _disagreeing(report)
        too = "fast" if modelled > run.rate.value else "slow"
        reasons.append(
            f"the model says {modelled:,.0f} samples/s for the measured run, {percent(off)} too "
            f"{too}" + (f"; it differs in the phase {phase!r}" if phase else "") + "."
        )
        error += off
    for use in report.machine_use:
        if use.pace < SLOW_PACE:
            error += (1 - use.pace) / 4
    error += min(0.3, _disturbance(report) / 2)
    numbers = off <= MODEL_USELESS and error <= TOO_WIDE
    if off > MODEL_USELESS:
        reasons.append("so there are no predictions.")
    elif not numbers:
        reasons.append(
            f"there are no predictions: they would be within {percent(error)} only. "
            f"{LESS_LOAD if _busy(report) else _more_time(report)}"
        )
    return Trust(run.rate, modelled, error, numbers, phase, tuple(reasons))


def _busy(report: AnalysisReport) -> bool:
    """Whether load by other processes, and not too little time, is the reason for no verdict."""
    return any(use.others > BUSY * use.cores for use in report.machine_use)


def _disturbance(report: AnalysisReport) -> float:
    """Difference of the load by others between phases, as a share of the cores."""
    loads = [use.others / max(1, use.cores) for use in report.machine_use]
    return max(loads) - min(loads) if loads else 0.0


def _disagreeing(report: AnalysisReport) -> str:
    """The phase in which the model and the measurement differ most."""
    whole = report.setup.full_cache_bytes
    changes: dict[PhaseName, Change] = {"as it is": Change(), "cold": Change(cold=True)}
    if whole:
        changes["cached"] = Change(cache=math.ceil(whole))
    errors: dict[str, float] = {}
    for name, change in changes.items():
        rate = report.rate(name)
        if rate:
            errors[name] = abs(predict(report, change).speed / rate - 1)
    return max(errors, key=lambda name: errors[name]) if errors else ""


def _forecasts(report: AnalysisReport, trust: Trust) -> Forecasts:
    """Predictions that are checked against each other."""
    cores = report.setup.cores
    counts = [cores * factor for factor in CORES]
    jobs = list(JOBS)
    most = report.rate("replay") or math.inf

    def speed(change: Change) -> float:
        return scaled(report, trust, change)

    return Forecasts(
        tuple((count, speed(Change(cores=count))) for count in counts),
        tuple((count, speed(Change(jobs=count))) for count in jobs),
        most,
    )


def scaled(report: AnalysisReport, trust: Trust, change: Change) -> float:
    """The predicted speed under a change, scaled to the measured run and at most G."""
    prediction = predict(report, change)
    return min(prediction.speed * trust.factor, _limit(report, change, prediction.ingestion))


def _limit(report: AnalysisReport, change: Change, ingestion: float) -> float:
    """The speed of the step alone under a change; never below the measured speed."""
    run = measured_run(report)
    return max(ingestion, run.rate.value if run is not None and change == Change() else 0.0)


# The machine.


def _warnings(report: AnalysisReport) -> Iterator[str]:
    uses, setup = report.machine_use, report.setup
    others = _heaviest(uses, "others")
    if others is not None and others.others > OTHERS * others.cores:
        yield (
            f"other processes kept {others.others:.1f} of {plural(others.cores, 'core')} busy "
            f"during {others.phase!r}: rates that need the cores are lower than on an idle machine."
        )
    stolen = _heaviest(uses, "stolen")
    if stolen is not None and stolen.stolen > OTHERS * stolen.cores:
        yield f"the hypervisor took {stolen.stolen:.1f} cores away during {stolen.phase!r}."
    throttled = _heaviest(uses, "throttled")
    if throttled is not None and throttled.throttled > SMALL:
        yield (
            f"the CPU limit of the container stopped the job {percent(throttled.throttled)} of the "
            f"time during {throttled.phase!r}."
        )
    pressure = _heaviest(uses, "pressure")
    if pressure is not None and pressure.pressure > SMALL:
        yield (
            f"processes waited for memory {percent(pressure.pressure)} of the time during "
            f"{pressure.phase!r}."
        )
    slow = min(uses, key=lambda use: use.pace, default=None)
    if slow is not None and slow.pace < SLOW_PACE:
        yield (
            f"the cores ran at {percent(slow.pace)} of their speed during {slow.phase!r}, compared "
            "with the fastest phase."
        )
    use = report.workers_use
    if use is None or not setup.workers or use.idle > MOSTLY_IDLE:
        return
    if use.queueing > 2 * SMALL:
        undisturbed = 1 / max(1 - use.queueing / (1 - use.idle), 0.05)
        prep = report.rate("prep") or 0.0
        yield (
            f"{plural(setup.workers, 'worker')} on {plural(setup.cores, 'core')} queued for a core "
            f"{percent(use.queueing)} of the time; with a core each they would prepare about "
            f"{prep * undisturbed:,.0f} samples/s."
        )


def plural(count: int, noun: str) -> str:
    """A number of things in words.

    >>> plural(1, "core"), plural(2, "core")
    ('1 core', '2 cores')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _heaviest(uses: tuple[MachineUse, ...], name: str) -> MachineUse | None:
    return max(uses, key=lambda use: float(getattr(use, name)), default=None)
