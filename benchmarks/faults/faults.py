"""Faults of shared preparation and of single jobs: jobs join late, lag, die or resume; the node, a
worker, a disk or a sample fails.

Measures how long the other members wait, and whether a job lost a sample, received one twice or
hung.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.fault import OTHERS, Event, Fault
from benchmarks.faults.job_faults import JOB_FAULTS
from benchmarks.faults.member import MemberPlan
from benchmarks.faults.member_faults import MEMBER_FAULTS, UNSAVED
from benchmarks.faults.node_faults import NODE_FAULTS
from benchmarks.faults.run import (
    HANG_LIMIT,
    FaultRun,
    FaultRunError,
    HangError,
    SkippedFaultError,
)
from benchmarks.faults.verdict import Verdict, longest_wait
from benchmarks.faults.work import NumberedSamples, References
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table

FAULTS = (*MEMBER_FAULTS, *NODE_FAULTS, *JOB_FAULTS)


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of one run of a fault.

    ``others`` and ``it``: seconds by which the longest wait of the other members, and of the
    affected one, exceeds the usual wait, where that is measured. ``prepared``: batches prepared in
    total, of ``distinct`` different batches; both are 0 for faults that do not count them.
    ``hung``: 1 if a job received no batch for longer than the limit. ``defects``: other failures.
    """

    verdict: Verdict
    others: float | None = None
    it: float | None = None
    prepared: int = 0
    distinct: int = 0
    hung: int = 0
    defects: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line without the stacks that a defect may contain."""
        shortened = tuple(defect[:200] for defect in self.defects)
        return str(replace(self, defects=shortened))


def run(options: Namespace) -> Result:
    plan = MemberPlan(NumberedSamples(options.items, options.batch), options.epochs, options.step)
    if plan.work.batches < UNSAVED + 4 or options.epochs < 2:
        raise SystemExit(
            f"{options.items} samples in batches of {options.batch} are {plan.work.batches} "
            f"batches per epoch, for {options.epochs} epochs. Faults happen in the middle of an "
            f"epoch: give at least {UNSAVED + 4} batches per epoch and 2 epochs."
        )
    references = References()
    chosen = [fault for fault in FAULTS if fault.name in options.only]
    outcomes: dict[str, list[FaultOutcome]] = {fault.name: [] for fault in chosen}
    skipped: dict[str, str] = {}
    for number in range(options.rounds):
        for fault in chosen:
            progress(f"faults: round {number + 1} of {options.rounds}: {fault.title}")
            try:
                outcome = provoke_fault(fault, plan, references, options)
            except SkippedFaultError as reason:
                skipped[fault.name] = str(reason)
                progress(f"  skipped: {reason}")
                continue
            outcomes[fault.name].append(outcome)
            progress(f"  {outcome.summary}")
    return make_result(chosen, outcomes, skipped, plan, options)


def provoke_fault(
    fault: Fault, plan: MemberPlan, references: References, options: Namespace
) -> FaultOutcome:
    """Provoke a fault once, with real processes. What fails is part of the outcome."""
    work = replace(plan.work, kind=fault.kind)
    plan = replace(plan, work=work, options={"lag": fault.lag})
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place,
        FaultRun(Path(place), plan, options.workers, fault.node, options.hang) as run,
    ):
        event = Event()
        defects: list[str] = []
        try:
            event = fault.provoke(run, options)
            run.end()
            defects += event.defects
        except FaultRunError as error:
            run.hangs += isinstance(error, HangError)
            defects.append(str(error))
        except (OSError, psutil.Error) as error:
            defects.append(f"the fault could not be provoked: {type(error).__name__}: {error}")
        prepared = run.prepared
        left = run.close()
        if left:
            defects.append(f"processes were left: {'; '.join(left)}")
        judgement = run.judge(references)
        outcome = FaultOutcome(
            judgement.verdict, hung=min(1, run.hangs), defects=(*defects, *judgement.defects)
        )
        if event.since is None:
            return outcome
        waits = [longest_wait(run.received(name), event.since) for name in event.others]
        return replace(
            outcome,
            others=max((wait.more for wait in waits if wait is not None), default=0.0),
            it=_own_wait(run, event),
            prepared=prepared,
            distinct=plan.epochs * plan.work.batches,
        )


def _own_wait(run: FaultRun, event: Event) -> float | None:
    """Seconds that the affected member waited longer than usual."""
    if not event.it or event.since is None:
        return None
    received = run.received(event.it[-1])
    if event.began is not None:
        return received[0].at - event.began if received else None
    wait = longest_wait(received, event.since)
    return None if wait is None else max(0.0, wait.more - event.pause)


def make_result(
    faults: Sequence[Fault],
    outcomes: Mapping[str, Sequence[FaultOutcome]],
    skipped: Mapping[str, str],
    plan: MemberPlan,
    options: Namespace,
) -> Result:
    """One row per fault. A lost or repeated sample, a hang or a defect makes the result invalid."""
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    data: dict[str, Any] = {}
    for fault in faults:
        seen = outcomes[fault.name]
        name = f"{fault.title}\n{fault.follows}"
        data[fault.name] = {
            "fault": fault.title,
            "follows": fault.follows,
            "skipped": skipped.get(fault.name, ""),
            "rounds": [asdict(outcome) for outcome in seen],
        }
        if not seen:
            rows.append((f"{name}\nskipped: {skipped.get(fault.name, '')}", *[""] * 8))
            continue
        total = sum((outcome.verdict for outcome in seen), Verdict())
        hung = sum(outcome.hung for outcome in seen)
        if not total.good:
            wrong.append(
                f"faults: {fault.name}: {total.lost} samples lost, {total.repeated} "
                f"repeated, {total.different} batches differ from an undisturbed loader's"
            )
        wrong += [f"faults: {fault.name}: {defect}" for one in seen for defect in one.defects]
        rows.append(
            (
                name,
                f"{total.samples:,}",
                str(total.lost),
                str(total.repeated),
                "all" if not total.different else f"all but {total.different}",
                str(hung),
                _ms([outcome.others for outcome in seen if outcome.others is not None]),
                _ms([outcome.it for outcome in seen if outcome.it is not None]),
                _prepared(seen),
            )
        )
    title = (
        f"faults: {len(OTHERS) + 1} members, {options.epochs} epochs of {plan.work.batches} "
        f"batches of {plan.work.batch}, {1e3 * plan.step:g} ms a batch; rounds: {options.rounds}"
    )
    heads = (
        "fault, and expected consequence",
        "samples received",
        "lost",
        "repeated",
        "batches equal to an undisturbed loader's",
        "hung",
        "extra wait of the others, ms",
        "extra wait of the member, ms",
        "batches prepared",
    )
    notes = (
        "faults: an extra wait is the longest time between two batches after the fault, minus the "
        "usual time before it, and minus the time that a member was stopped or slow by itself; for "
        "a member that starts, the time to its first batch",
        f"faults: a stopped member is stopped for {options.stop:g} s; a member that resumes is "
        f"killed {UNSAVED} batches after its checkpoint, and those batches are not counted",
        "faults: members request a few batches ahead, even past the last epoch, so more batches "
        "are prepared than received",
        f"faults: hung counts the runs in which a job received no batch for {options.hang:g} s",
    )
    return Result((Table(title, heads, tuple(rows)),), notes, tuple(wrong), {"faults": data})


def _prepared(seen: Sequence[FaultOutcome]) -> str:
    counted = [outcome for outcome in seen if outcome.distinct]
    if not counted:
        return ""
    median = statistics.median(outcome.prepared for outcome in counted)
    return f"{median:.0f} of {counted[0].distinct}"


def _ms(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    middle, most = (1e3 * value for value in (statistics.median(seconds), max(seconds)))
    return f"{middle:,.0f}" if len(seconds) == 1 else f"{middle:,.0f}\nat most {most:,.0f}"


def _names(text: str) -> tuple[str, ...]:
    known = [fault.name for fault in FAULTS]
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ArgumentTypeError(f"there is no fault {name!r}; there are: {', '.join(known)}")
    return names


def _arguments(parser: ArgumentParser) -> None:
    known = tuple(fault.name for fault in FAULTS)
    parser.add_argument("--items", type=count, default=4096, help="number of samples (4096)")
    parser.add_argument("--epochs", type=count, default=4, help="epochs of each member (4)")
    parser.add_argument(
        "--step", type=positive, default=0.01, help="seconds of a member's step for a batch (0.01)"
    )
    parser.add_argument(
        "--stop", type=positive, default=3.0, help="seconds for which a member is stopped (3)"
    )
    parser.add_argument(
        "--hang",
        type=positive,
        default=HANG_LIMIT,
        metavar="SECONDS",
        help=f"seconds without progress after which a job is taken to hang ({HANG_LIMIT:g})",
    )
    parser.add_argument(
        "--only",
        type=_names,
        default=known,
        metavar="LIST",
        help=f"run only these faults, of: {', '.join(known)}",
    )


BENCHMARK = Benchmark(
    "faults",
    "jobs that lag, die or resume, and a node, disk or sample that fails: samples lost (none)",
    run,
    _arguments,
)
