"""Faults of shared preparation: members of a group join late, lag, die or resume, or the node dies.

Measures how long the other members wait, and whether a member lost a sample or received one twice.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.member import MemberPlan
from benchmarks.faults.run import FaultRun, FaultRunError
from benchmarks.faults.verdict import Reference, Verdict, judge, longest_wait
from benchmarks.faults.work import epochs
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table

OTHERS = ("a", "b")
SUBJECT = "c"
"""The member that the fault happens to."""

SLOWER = 3.0

UNSAVED = 5
"""Batches that a member receives after its checkpoint, and loses when it is killed."""


@dataclass(frozen=True)
class Event:
    """When a fault happened, and the roles of the members.

    ``it``: processes of the affected member, if it continues. ``began``: the time at which it could
    start, if it had no batches before. ``pause``: seconds that it was stopped or slow by itself,
    which do not count as waiting.
    """

    since: float
    others: tuple[str, ...] = OTHERS
    it: tuple[str, ...] = ()
    began: float | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class Fault:
    """A fault, its expected consequence, and the function that provokes it."""

    name: str
    title: str
    follows: str
    provoke: Callable[[FaultRun, Namespace], Event]
    kind: Literal["threads", "processes"] = "threads"
    lag: Literal["detach", "wait"] = "detach"


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of one run of a fault.

    ``others`` and ``it``: seconds by which the longest wait of the other members, and of the
    affected one, exceeds the usual wait. ``prepared``: batches prepared in total, of ``distinct``
    different batches.
    """

    verdict: Verdict
    others: float
    it: float | None
    prepared: int
    distinct: int


# The faults. All happen in the second epoch, except joining, which happens in the first.


def _join(run: FaultRun, options: Namespace) -> Event:
    run.start(*OTHERS, SUBJECT)
    run.go(*OTHERS)
    run.wait_for_batches("a", _third(run))
    began = run.go(SUBJECT)
    return Event(began, it=(SUBJECT,), began=began)


def _leave(run: FaultRun, options: Namespace) -> Event:
    at = run.batches_per_epoch + _third(run)
    _start_all(run, leave_at=at)
    run.expect_cut_off(SUBJECT)
    return Event(run.wait_for_batches(SUBJECT, at))


def _kill(run: FaultRun, options: Namespace) -> Event:
    _start_all(run)
    run.wait_for_batches(SUBJECT, run.batches_per_epoch + _third(run))
    return Event(run.send(SUBJECT, signal.SIGKILL))


def _stop(run: FaultRun, options: Namespace) -> Event:
    _start_all(run)
    run.wait_for_batches(SUBJECT, run.batches_per_epoch + _third(run))
    since = run.send(SUBJECT, signal.SIGSTOP)
    time.sleep(options.stop)
    run.send(SUBJECT, signal.SIGCONT)
    return Event(since, it=(SUBJECT,), pause=options.stop)


def _slow_down(run: FaultRun, options: Namespace) -> Event:
    at = run.batches_per_epoch
    _start_all(run, slow_from=at, slower=SLOWER)
    pause = (SLOWER - 1) * run.plan.step
    return Event(run.wait_for_batches(SUBJECT, at), it=(SUBJECT,), pause=pause)


def _resume(run: FaultRun, options: Namespace) -> Event:
    at, again = run.batches_per_epoch + _third(run), f"{SUBJECT}-again"
    run.start(again, resume=str(run.files(SUBJECT).state))
    _start_all(run, save_at=at)
    run.wait_for_checkpoint(SUBJECT)
    run.wait_for_batches(SUBJECT, at + UNSAVED)
    since = run.send(SUBJECT, signal.SIGKILL)
    return Event(since, it=(SUBJECT, again), began=run.go(again))


def _finish(run: FaultRun, options: Namespace) -> Event:
    _start_all(run, epochs=1)
    return Event(run.wait_for_batches(SUBJECT, run.batches_per_epoch))


def _kill_node(run: FaultRun, options: Namespace) -> Event:
    _start_all(run)
    run.wait_for_batches(SUBJECT, run.batches_per_epoch + _third(run))
    return Event(run.kill_node(), others=(*OTHERS, SUBJECT))


def _kill_worker(run: FaultRun, options: Namespace) -> Event:
    _start_all(run)
    run.wait_for_batches(SUBJECT, run.batches_per_epoch + _third(run))
    return Event(run.kill_worker(), others=(*OTHERS, SUBJECT))


def _start_all(run: FaultRun, **changes: Any) -> None:
    run.start(*OTHERS)
    run.start(SUBJECT, **changes)
    run.go(*OTHERS, SUBJECT)


def _third(run: FaultRun) -> int:
    return max(1, run.batches_per_epoch // 3)


FAULTS = (
    Fault(
        "join",
        "a member joins in the middle of an epoch",
        "starts with the current batch of the others; the batches it missed come last",
        _join,
    ),
    Fault(
        "leave",
        "a member leaves in the middle of an epoch",
        "batches that only it still needed are dropped",
        _leave,
    ),
    Fault(
        "kill", "a member is killed with -9", "the same as leaving: its connection closes", _kill
    ),
    Fault(
        "stop",
        "a member is stopped, then continues",
        "the others go on; batches it finds dropped are prepared again",
        _stop,
    ),
    Fault(
        "slow",
        "a member becomes 3 times slower",
        "the others go on; batches it finds dropped are prepared again",
        _slow_down,
    ),
    Fault(
        "wait",
        'a member becomes 3 times slower, lag="wait"',
        "all members run at its pace; nothing is prepared again",
        _slow_down,
        lag="wait",
    ),
    Fault(
        "resume",
        "a member is killed and resumes from a checkpoint",
        "continues after the last batch of the checkpoint",
        _resume,
    ),
    Fault("finish", "a member finishes early", "the others go on", _finish),
    Fault(
        "node",
        "the node is killed with -9",
        "a member starts a new one; each continues from its own position",
        _kill_node,
    ),
    Fault(
        "worker",
        "a worker of the node is killed with -9",
        "a new worker replaces it and prepares its samples again",
        _kill_worker,
        kind="processes",
    ),
)


def run(options: Namespace) -> Result:
    plan = MemberPlan(options.items, options.batch, "threads", options.epochs, options.step)
    if plan.work.batches < UNSAVED + 4 or options.epochs < 2:
        raise SystemExit(
            f"{options.items} samples in batches of {options.batch} are {plan.work.batches} "
            f"batches per epoch, for {options.epochs} epochs. Faults happen in the middle of an "
            f"epoch: give at least {UNSAVED + 4} batches per epoch and 2 epochs."
        )
    reference = dict(epochs(plan.work, options.epochs))
    chosen = [fault for fault in FAULTS if fault.name in options.only]
    outcomes: dict[str, list[FaultOutcome]] = {fault.name: [] for fault in chosen}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for fault in chosen:
            progress(f"faults: round {number + 1} of {options.rounds}: {fault.title}")
            try:
                outcome = provoke_fault(fault, plan, reference, options)
            except FaultRunError as error:
                failed[fault.name] = str(error)
                progress(f"  {error}")
                continue
            outcomes[fault.name].append(outcome)
            progress(f"  {outcome}")
    return make_result(chosen, outcomes, failed, plan, options)


def provoke_fault(
    fault: Fault, plan: MemberPlan, reference: Reference, options: Namespace
) -> FaultOutcome:
    """Provoke a fault once, with real processes."""
    plan = replace(plan, kind=fault.kind, lag=fault.lag)
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place,
        FaultRun(Path(place), plan, options.workers) as run,
    ):
        event = fault.provoke(run, options)
        run.end()
        it = event.it or (SUBJECT,)
        verdict = judge(run.received(*it), reference, ended=run.is_complete(it[-1]))
        for name in OTHERS:
            verdict += judge(run.received(name), reference, ended=run.is_complete(name))
        waits = [longest_wait(run.received(name), event.since) for name in event.others]
        return FaultOutcome(
            verdict,
            max((wait.more for wait in waits if wait is not None), default=0.0),
            _own_wait(run, event),
            run.prepared,
            sum(len(batches) for batches in reference.values()),
        )


def _own_wait(run: FaultRun, event: Event) -> float | None:
    """Seconds that the affected member waited longer than usual."""
    if not event.it:
        return None
    received = run.received(event.it[-1])
    if event.began is not None:
        return received[0].at - event.began if received else None
    wait = longest_wait(received, event.since)
    return None if wait is None else max(0.0, wait.more - event.pause)


def make_result(
    faults: Sequence[Fault],
    outcomes: Mapping[str, Sequence[FaultOutcome]],
    failed: Mapping[str, str],
    plan: MemberPlan,
    options: Namespace,
) -> Result:
    """One row per fault. Samples lost or repeated make the result invalid."""
    rows: list[tuple[str, ...]] = []
    wrong = [f"faults: {name}: {why}" for name, why in failed.items()]
    data: dict[str, Any] = {}
    for fault in faults:
        seen = outcomes[fault.name]
        name = f"{fault.title}\n{fault.follows}"
        data[fault.name] = {
            "fault": fault.title,
            "follows": fault.follows,
            "failed": failed.get(fault.name, ""),
            "rounds": [asdict(outcome) for outcome in seen],
        }
        if not seen:
            rows.append((name, *[""] * 7))
            continue
        total = sum((outcome.verdict for outcome in seen), Verdict())
        if not total.good:
            wrong.append(
                f"faults: {fault.name}: {total.lost} samples lost, {total.repeated} "
                f"repeated, {total.different} batches differ from an unshared loader's"
            )
        rows.append(
            (
                name,
                f"{total.samples:,}",
                str(total.lost),
                str(total.repeated),
                "all" if not total.different else f"all but {total.different}",
                _ms([outcome.others for outcome in seen]),
                _ms([outcome.it for outcome in seen if outcome.it is not None]),
                f"{statistics.median(o.prepared for o in seen):.0f} of {seen[0].distinct}",
            )
        )
    title = (
        f"faults: {len(OTHERS) + 1} members, {options.epochs} epochs of {plan.work.batches} "
        f"batches of {plan.batch}, {1e3 * plan.step:g} ms a batch; rounds: {options.rounds}"
    )
    heads = (
        "fault, and expected consequence",
        "samples received",
        "lost",
        "repeated",
        "batches equal to an unshared loader's",
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
    )
    return Result((Table(title, heads, tuple(rows)),), notes, tuple(wrong), {"faults": data})


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
        "--only",
        type=_names,
        default=known,
        metavar="LIST",
        help=f"run only these faults, of: {', '.join(known)}",
    )


BENCHMARK = Benchmark(
    "faults",
    "members that join late, lag, die or resume, and a node that dies: samples lost (none)",
    run,
    _arguments,
)
