"""Remedies: changes that would make training faster, by how much, and how to make each. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock import config
from penstock.diagnose.analyze.judge import more_workers_help, plural
from penstock.diagnose.analyze.model import (
    Change,
    Prediction,
    gain_of,
    possible_on_device,
    predict,
    says_nothing,
)
from penstock.diagnose.analyze.report import AnalysisReport, Interval
from penstock.diagnose.analyze.result import Result
from penstock.diagnose.analyze.trials import RemedyTrial, RunWith, short_size
from penstock.host.text import percent

LEAST_GAIN = 1.03
"""A gain below this is within the error of measurement."""

BETTER = 1.02
"""A change that consists of several must be better by this than each of its parts."""

JOBS = 4
"""Number of jobs for which the gain of sharing is predicted."""

REUSE, ECHO = 3, 2
"""Factors that training tolerates well: see the pages on refurbish and echo."""

WORKERS_PER_CORE = (1, 2, 4)
"""Numbers of workers that are considered: several per core help workers that wait."""

DEVICE_SPEED = 10.0
"""Speed of a device relative to a worker, for which the gain of preparing there is predicted. It is
an assumption: no GPU was measured."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change.

    - ``gain``: the predicted speed relative to ``baseline``, the samples per second of now, or for
      sharing those of each of several jobs that do not share. ``low`` and ``high``: its interval.
    - ``command``: a command that makes the change without an edit; ``code``: the code to write.
      Either may be empty, as for a machine with more cores.
    - ``why``: how it reduces the stall. ``condition``: what must hold, if anything.
    - ``speed``: samples per second with the change.
    - ``certain``: whether the gain is given. It is not where it depends on the cores that other
      programs leave; ``gain`` is then what those that were free allow.
    - ``measured``: the gain that ``--try`` has measured; ``None`` if it was not tried.
    - ``tried``: a loader with this change was built from the script's own loader.
    """

    title: str
    gain: float
    code: str
    why: str
    prediction: Prediction
    change: Change
    command: str = ""
    condition: str = ""
    baseline: float = 0.0
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    certain: bool = True
    measured: float | None = None
    tried: bool = False
    options: RunWith | None = None

    @property
    def repeats(self) -> bool:
        """Whether the gain is one of steps, and not of fresh samples."""
        return self.change.echo > 1

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The order in which remedies are shown: by their gain, where that is known. Repeated
        samples come last, because their worth is not that of fresh ones."""
        return self.repeats, not self.certain, -self.gain


def remedies(
    report: AnalysisReport, memory: int | None = None, result: Result | None = None
) -> list[Remedy]:
    """The remedies with a gain, the largest first.

    ``memory``: bytes of memory of the machine. With ``result`` gains are relative to the measured
    speed, and never beyond what the accelerator takes; without a verdict there are no remedies.
    """
    if result is not None and result.bound is None:
        return []
    found = [
        remedy
        for candidate in candidates(report, memory or config.memory())
        if (remedy := _with_gain(report, candidate, result)) is not None
    ]
    if result is not None and result.bound == "latency":
        # Workers that wait need no cores: more of them run on those that are there.
        found = [remedy for remedy in found if remedy.change.cores is None]
        if result.verdict.cause == "lock" or not more_workers_help(report):
            found = [remedy for remedy in found if remedy.change.workers is None]
    if result is not None and result.bound == "contention":
        found.extend(_fewer_workers(report, result))
    return sorted(_without_detours(found), key=lambda remedy: remedy.rank)


@dataclass(frozen=True, slots=True)
class PossibleRemedy:
    """A remedy whose gain is not predicted yet.

    ``options`` make the change without an edit, if that is possible. It is printed only if they
    were tried on the script's own loader.
    """

    title: str
    change: Change
    code: str
    why: str
    options: RunWith | None = None


def candidates(report: AnalysisReport, memory: int) -> Iterator[PossibleRemedy]:
    """All changes that may help."""
    setup, write = report.setup, _CodeWriter(report)
    own = report.costs.penstock is not None
    base, plain = RunWith(native=own), Change(penstock=own)
    why_own = "the same batches, prepared with less work"
    if own:
        yield PossibleRemedy(
            "Penstock's loader in place of torch's", plain, write.loader(""), why_own, base
        )
    budget = cache_budget(report, memory)
    counts = [each * setup.cores for each in WORKERS_PER_CORE if each * setup.cores > setup.workers]
    with_own = "Penstock's loader with " if own else ""
    if budget:
        share = budget / setup.full_cache_bytes
        cached = (
            f"{percent(min(1.0, share))} of the data is read from storage once, and never again"
        )
        yield PossibleRemedy(
            f"{with_own}a cache of {config.show_size(budget)}",
            replace(plain, cache=budget),
            write.loader(f'cache="{short_size(budget)}"', stop=f'.cache("{short_size(budget)}")'),
            cached,
            replace(base, cache=budget),
        )
    for count in counts:
        yield PossibleRemedy(
            f"{with_own}{plural(count, 'worker')}",
            replace(plain, workers=count),
            write.loader(f"{write.workers}={count}"),
            "more samples are read and prepared at the same time",
            replace(base, workers=count),
        )
        if budget:
            yield PossibleRemedy(
                f"{with_own}{plural(count, 'worker')} and a cache of {config.show_size(budget)}",
                replace(plain, workers=count, cache=budget),
                write.loader(
                    f'{write.workers}={count}, cache="{short_size(budget)}"',
                    stop=f'.cache("{short_size(budget)}")  # and .loader(..., workers={count})',
                ),
                "samples are read once, and more are prepared at the same time",
                replace(base, workers=count, cache=budget),
            )
    cores = 2 * setup.cores
    yield PossibleRemedy(
        f"a machine with {cores} cores",
        Change(cores=cores),
        "",
        f"with {write.workers}={cores} twice as many samples are prepared at the same time",
    )
    if report.costs.reuse_hit is not None:
        yield PossibleRemedy(
            f"refurbish with reuse {REUSE}",
            Change(reuse=REUSE),
            write.loader(f'reuse="auto"  # or reuse={REUSE}', stop=f".refurbish(reuse={REUSE})"),
            "the first part of preparation is done only for every third use of a sample",
            RunWith(reuse=True),
        )
    yield PossibleRemedy(
        f"echo with factor {ECHO}",
        Change(echo=ECHO),
        write.loader(f'echo={ECHO}, echo_at="batch"', stop=f".echo({ECHO})  # below batch()"),
        "every batch is used twice; the validation loss shows what the repeats are worth",
        RunWith(echo=ECHO),
    )
    yield PossibleRemedy(
        f"one preparation for {JOBS} jobs",
        Change(jobs=JOBS, share=True),
        write.loader('share="search-1"'),
        f"if {JOBS} jobs run on this machine, each sample is prepared once instead of {JOBS} times",
        RunWith(share="search-1"),
    )
    if report.costs.storage > 0 and setup.sample_bytes:
        faster = 4 * report.costs.storage
        yield PossibleRemedy(
            f"storage of {config.show_size(faster)}/s",
            Change(storage=faster),
            "",
            "samples that are not cached arrive faster: from a local copy on an SSD, or by larger "
            "requests to the object store",
        )
    yield from _offloads(report, write)


def cache_budget(report: AnalysisReport, memory: int) -> int:
    """Bytes of a cache for all data, or for half of the memory; 0 if that is no more than now."""
    data = report.setup.full_cache_bytes
    cached = min(data, memory / 2)
    return _round_up(cached) if data and cached > report.setup.cache else 0


def options_to_try(report: AnalysisReport, memory: int | None = None) -> list[RunWith]:
    """The options of all remedies that predict a gain, in the order of their gain."""
    found = []
    for candidate in candidates(report, memory or config.memory()):
        if candidate.options is not None:
            gain = gain_of(report, candidate.change)
            if gain.high >= LEAST_GAIN:
                found.append((gain.value, candidate.options))
    return [options for _, options in sorted(found, key=lambda one: -one[0])]


def _with_gain(
    report: AnalysisReport, candidate: PossibleRemedy, result: Result | None
) -> Remedy | None:
    """The remedy; ``None`` if its gain is too small, or it failed where it was tried."""
    trial, code = _accepted(report.trials, candidate.options), candidate.code
    change = candidate.change
    if trial is None and candidate.options is not None and report.trials:
        if not report.setup.of_torch or change != Change(workers=change.workers):
            return None
        code = f"DataLoader(..., num_workers={change.workers})"  # torch's own takes any number
    around, prediction = gain_of(report, change), predict(report, change)
    # Jobs that share are compared with as many jobs that do not.
    before = predict(report, replace(change, share=False) if change.share else None)
    gain, speed, baseline, error = around.value, prediction.speed, before.speed, 0.0
    limit = float("inf")
    if result is not None:
        factor, error = result.trust.factor, result.trust.error
        speed, baseline = speed * factor, baseline * factor
        # Only an accelerator that gets easier steps exceeds what the loader can bring.
        if result.trust.measured is not None and change.echo == 1 and not change.offload:
            limit = result.forecasts.most
            if result.rates.G is not None:
                limit = min(limit, result.rates.G.value)
            if not change.share:
                baseline = result.trust.measured.value
            if speed > limit:
                speed = limit
            gain = speed / baseline
    most = max(gain, min(around.high, limit / baseline))
    around = Interval(gain, min(around.low, gain), most)
    certain = not says_nothing(around, error)
    if (gain if certain else most) < LEAST_GAIN:
        return None
    options = candidate.options if trial is None else trial.options
    conditions, low = [], around.low * (1 - error)
    if options is not None and options.random is False:
        conditions.append("the datasets of the script draw no random numbers")
    setup = report.setup
    waiting = result is not None and result.bound == "latency"
    if waiting and (change.workers or 0) > setup.workers >= max(report.costs.scaling):
        # More workers were not tried, and whether they wait for the same thing is not known.
        conditions.append("workers do not wait for each other, or for a server at its limit")
        low = min(low, 1.0)
    if not certain:
        conditions.append("other processes leave the workers the cores that they need")
        low = min(low, 1.0)
    return Remedy(
        candidate.title,
        gain,
        code,
        candidate.why,
        prediction,
        change,
        command=_command(report, options) if trial is not None else "",
        condition=f"only if {', and '.join(conditions)}" if conditions else "",
        baseline=baseline,
        speed=speed,
        low=low,
        high=max(gain, min(around.high * (1 + error), limit / baseline)),
        certain=certain,
        measured=None if trial is None else trial.gain,
        tried=trial is not None,
        options=options,
    )


def _accepted(trials: Sequence[RemedyTrial], wanted: RunWith | None) -> RemedyTrial | None:
    """The trial that has worked with these options, or with a variant of them.

    ``--native`` is left out for datasets that it does not change, and ``--no-random`` is added
    where only a dataset that draws random numbers is refused.
    """
    if wanted is None:
        return None
    known = {trial.options: trial for trial in trials}
    return next(
        (known[one] for one in variants(wanted) if one in known and not known[one].refusal), None
    )


def variants(options: RunWith) -> tuple[RunWith, ...]:
    """The options, and others of the same effect, in the order in which they are preferred."""
    natives = (True, False) if options.native else (False,)
    kept = options.cache is not None or options.reuse
    randoms = (None, False) if kept else (None,)
    return tuple(
        replace(options, native=native, random=random) for random in randoms for native in natives
    )


def _command(report: AnalysisReport, options: RunWith | None) -> str:
    """The command that makes the change without an edit; empty for pipelines of Penstock's own."""
    if options is None or not report.setup.of_torch:
        return ""
    command = report.command or "python train.py"
    return shlex.join(["penstock", "run", *options.words]) + f" -- {command}"


def _fewer_workers(report: AnalysisReport, result: Result) -> Iterator[Remedy]:
    """Fewer workers, where they compete with the step. The gain is what they cost now: at most."""
    setup, shares = report.setup, result.shares
    if shares is None or setup.workers < 2 or result.trust.measured is None:
        return
    fewer = setup.workers // 2
    options = RunWith(workers=fewer)
    trial = _accepted(report.trials, options)
    if trial is None and report.trials:
        return
    baseline = result.trust.measured.value
    gain = 1 / max(0.01, 1 - shares.contention.value)
    change = Change(workers=fewer)
    yield Remedy(
        f"{plural(fewer, 'worker')} instead of {setup.workers}",
        gain,
        _CodeWriter(report).loader(f"{_CodeWriter(report).workers}={fewer}"),
        "workers take cores from the training step; the gain is at most what they take now",
        predict(report, change),
        change,
        command=_command(report, options) if trial is not None else "",
        baseline=baseline,
        speed=gain * baseline,
        low=1.0,
        high=gain,
        measured=None if trial is None else trial.gain,
        tried=trial is not None,
        options=options,
    )


def _without_detours(found: Sequence[Remedy]) -> list[Remedy]:
    """The remedies without those that do more than another of the same gain."""
    kept: list[Remedy] = []
    for remedy in sorted(found, key=_effort):
        simpler = [one for one in kept if _part_of(one.change, remedy.change)]
        if all(remedy.gain > BETTER * one.gain for one in simpler):
            kept.append(remedy)
    return kept


def _effort(remedy: Remedy) -> tuple[int, int]:
    """How much a remedy changes: the number of its changes, then of its workers."""
    default, change = Change(), remedy.change
    names = ("cache", "workers", "cores", "storage", "reuse", "echo", "share", "penstock")
    changed = sum(getattr(change, name) != getattr(default, name) for name in names)
    return changed, change.workers or 0


def _part_of(some: Change, more: Change) -> bool:
    """Whether ``more`` does everything that ``some`` does; more workers include fewer."""
    default = Change()
    for name in ("cache", "cores", "storage", "reuse", "echo", "share", "penstock", "device_prep"):
        value = getattr(some, name)
        if value not in (getattr(default, name), getattr(more, name)):
            return False
    if some.offload and some.offload != more.offload:
        return False
    return some.workers is None or (more.workers or 0) >= some.workers


def _offloads(report: AnalysisReport, write: _CodeWriter) -> Iterator[PossibleRemedy]:
    """Moving the last operations to the device, if they only convert numbers."""
    cheap = ("normalize", "normalise", "totensor", "to_tensor", "convert", "todtype", "to_float")
    last = 0
    for operation in reversed(report.operations):
        if operation.kind == "batch":
            last += 1
            continue
        if not any(word in operation.name.lower() for word in cheap):
            break
        last += 1
    moved = report.operations[-last:] if last else ()
    names = [operation.name for operation in moved if operation.kind != "batch"]
    if names and report.setup.accelerator != "cpu":
        yield PossibleRemedy(
            f"{' and '.join(names)} on the device",
            Change(offload=last),
            "images = images.to(device).float().sub_(mean).div_(std)  # uint8 until here",
            "a quarter of the bytes is copied, and workers have less to do",
        )
    # The drop-in has no such argument, and a remedy must work as it is printed.
    if report.setup.accelerator != "cpu" and write.pipeline and possible_on_device(report):
        yield PossibleRemedy(
            f"a share of the preparation on a device as fast as {DEVICE_SPEED:g} workers",
            Change(device_prep=DEVICE_SPEED),
            'penstock.torch.loader(pipeline, ..., device="cuda", device_prep="auto")',
            "the device prepares while training waits; its speed is assumed, not measured",
        )


class _CodeWriter:
    """Writes the code of remedies for the kind of loader that the script uses."""

    def __init__(self, report: AnalysisReport) -> None:
        self.pipeline = report.setup.loader == "penstock.Loader"
        self.workers = "workers" if self.pipeline else "num_workers"

    def loader(self, argument: str, stop: str = "") -> str:
        if self.pipeline:
            return stop or f"pipeline.loader(..., {argument})"
        given = f"..., {argument}" if argument else "..."
        return f"from penstock.torch import DataLoader\nDataLoader({given})"


def _round_up(nbytes: float) -> int:
    """Round up to two significant digits.

    >>> _round_up(5_432_100)
    5500000
    """
    scale: int = 10 ** max(0, len(str(int(nbytes))) - 2)
    return -(-int(nbytes) // scale) * scale
