"""Members of a group that come and go, lag and die, and a node that does: what each costs the rest,
and whether anybody lost a sample or had one twice."""

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

from benchmarks.faults.member import Life
from benchmarks.faults.stage import Stage, StageError
from benchmarks.faults.verdict import Epochs, Verdict, judged, waited
from benchmarks.faults.work import epochs
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table

OTHERS = ("a", "b")
IT = "c"
"""The member that something happens to."""

SLOWER = 3.0

UNSAVED = 5
"""Batches that a member has behind its checkpoint, and loses when it is killed."""


@dataclass(frozen=True)
class Happened:
    """The moment, and who was who. ``it`` are the processes of the member that it happened to, if
    that goes on; ``began`` is when it could begin, where it had nothing before, and ``pause`` what
    it did not have to wait for, but stood still or was slow by itself."""

    since: float
    others: tuple[str, ...] = OTHERS
    it: tuple[str, ...] = ()
    began: float | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Something that happens, and what follows from it."""

    name: str
    title: str
    follows: str
    provoke: Callable[[Stage, Namespace], Happened]
    kind: Literal["threads", "processes"] = "threads"
    lag: Literal["detach", "wait"] = "detach"


@dataclass(frozen=True)
class Outcome:
    """One fault, once. ``others`` and ``it`` are seconds that the longest wait was longer than is
    usual; ``prepared`` batches of ``distinct`` different ones."""

    verdict: Verdict
    others: float
    it: float | None
    prepared: int
    distinct: int


# What can happen. Each is in the second epoch, unless it is about joining the first.


def _joins(stage: Stage, options: Namespace) -> Happened:
    stage.start(*OTHERS, IT)
    stage.go(*OTHERS)
    stage.has("a", _third(stage))
    began = stage.go(IT)
    return Happened(began, it=(IT,), began=began)


def _leaves(stage: Stage, options: Namespace) -> Happened:
    at = stage.epoch + _third(stage)
    _together(stage, leave_at=at)
    stage.cut(IT)
    return Happened(stage.has(IT, at))


def _is_killed(stage: Stage, options: Namespace) -> Happened:
    _together(stage)
    stage.has(IT, stage.epoch + _third(stage))
    return Happened(stage.send(IT, signal.SIGKILL))


def _is_stopped(stage: Stage, options: Namespace) -> Happened:
    _together(stage)
    stage.has(IT, stage.epoch + _third(stage))
    since = stage.send(IT, signal.SIGSTOP)
    time.sleep(options.stop)
    stage.send(IT, signal.SIGCONT)
    return Happened(since, it=(IT,), pause=options.stop)


def _is_slow(stage: Stage, options: Namespace) -> Happened:
    at = stage.epoch
    _together(stage, slow_from=at, slower=SLOWER)
    pause = (SLOWER - 1) * stage.life.step
    return Happened(stage.has(IT, at), it=(IT,), pause=pause)


def _resumes(stage: Stage, options: Namespace) -> Happened:
    at, again = stage.epoch + _third(stage), f"{IT}-again"
    stage.start(again, resume=str(stage.papers(IT).state))
    _together(stage, save_at=at)
    stage.saved(IT)
    stage.has(IT, at + UNSAVED)
    since = stage.send(IT, signal.SIGKILL)
    return Happened(since, it=(IT, again), began=stage.go(again))


def _finishes(stage: Stage, options: Namespace) -> Happened:
    _together(stage, epochs=1)
    return Happened(stage.has(IT, stage.epoch))


def _node_dies(stage: Stage, options: Namespace) -> Happened:
    _together(stage)
    stage.has(IT, stage.epoch + _third(stage))
    return Happened(stage.kill_node(), others=(*OTHERS, IT))


def _worker_dies(stage: Stage, options: Namespace) -> Happened:
    _together(stage)
    stage.has(IT, stage.epoch + _third(stage))
    return Happened(stage.kill_worker(), others=(*OTHERS, IT))


def _together(stage: Stage, **life_of_it: Any) -> None:
    stage.start(*OTHERS)
    stage.start(IT, **life_of_it)
    stage.go(*OTHERS, IT)


def _third(stage: Stage) -> int:
    return max(1, stage.epoch // 3)


FAULTS = (
    Fault(
        "join",
        "a member joins in the middle of an epoch",
        "begins with the batch that the others are at; what it missed comes last",
        _joins,
    ),
    Fault(
        "leave",
        "a member leaves in the middle of an epoch",
        "what was there for it alone is dropped",
        _leaves,
    ),
    Fault("kill", "a member is killed with -9", "as if it had left: its line closes", _is_killed),
    Fault(
        "stop",
        "a member is stopped, and goes on",
        "the others go on; what it finds gone is prepared again",
        _is_stopped,
    ),
    Fault(
        "slow",
        "a member becomes 3 times slower",
        "the others go on; what it finds gone is prepared again",
        _is_slow,
    ),
    Fault(
        "wait",
        'a member becomes 3 times slower, lag="wait"',
        "all go at its pace, and nothing is prepared again",
        _is_slow,
        lag="wait",
    ),
    Fault(
        "resume",
        "a member is killed, and resumes from a checkpoint",
        "goes on behind the batch where the checkpoint was taken",
        _resumes,
    ),
    Fault("finish", "a member finishes early", "the others go on", _finishes),
    Fault(
        "node",
        "the node is killed with -9",
        "a member starts another; each goes on from where it stands",
        _node_dies,
    ),
    Fault(
        "worker",
        "a worker of the node is killed with -9",
        "another takes its place and prepares its samples again",
        _worker_dies,
        kind="processes",
    ),
)


def run(options: Namespace) -> Result:
    life = Life(options.items, options.batch, "threads", options.epochs, options.step)
    if life.work.batches < UNSAVED + 4 or options.epochs < 2:
        raise SystemExit(
            f"{options.items} samples in batches of {options.batch} are {life.work.batches} "
            f"batches an epoch, and {options.epochs} epochs: give at least {UNSAVED + 4} batches "
            "and 2 epochs, or there is no middle for anything to happen in."
        )
    reference = dict(epochs(life.work, options.epochs))
    chosen = [fault for fault in FAULTS if fault.name in options.only]
    outcomes: dict[str, list[Outcome]] = {fault.name: [] for fault in chosen}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for fault in chosen:
            progress(f"faults: round {number + 1} of {options.rounds}: {fault.title}")
            try:
                outcome = provoked(fault, life, reference, options)
            except StageError as error:
                failed[fault.name] = str(error)
                progress(f"  {error}")
                continue
            outcomes[fault.name].append(outcome)
            progress(f"  {outcome}")
    return told(chosen, outcomes, failed, life, options)


def provoked(fault: Fault, life: Life, reference: Epochs, options: Namespace) -> Outcome:
    """Let it happen once, among real processes."""
    life = replace(life, kind=fault.kind, lag=fault.lag)
    with (
        tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place,
        Stage(Path(place), life, options.workers) as stage,
    ):
        happened = fault.provoke(stage, options)
        stage.end()
        it = happened.it or (IT,)
        verdict = judged(stage.had(*it), reference, ended=stage.ended(it[-1]))
        for name in OTHERS:
            verdict += judged(stage.had(name), reference, ended=stage.ended(name))
        waits = [waited(stage.had(name), happened.since) for name in happened.others]
        return Outcome(
            verdict,
            max((wait.more for wait in waits if wait is not None), default=0.0),
            _own(stage, happened),
            stage.prepared,
            sum(len(batches) for batches in reference.values()),
        )


def _own(stage: Stage, happened: Happened) -> float | None:
    """What the one that it happened to had to wait."""
    if not happened.it:
        return None
    had = stage.had(happened.it[-1])
    if happened.began is not None:
        return had[0].at - happened.began if had else None
    wait = waited(had, happened.since)
    return None if wait is None else max(0.0, wait.more - happened.pause)


def told(
    faults: Sequence[Fault],
    outcomes: Mapping[str, Sequence[Outcome]],
    failed: Mapping[str, str],
    life: Life,
    options: Namespace,
) -> Result:
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
        all_of_it = sum((outcome.verdict for outcome in seen), Verdict())
        if not all_of_it.good:
            wrong.append(
                f"faults: {fault.name}: {all_of_it.lost} samples lost, {all_of_it.repeated} "
                f"repeated, {all_of_it.different} batches differ from an unshared loader's"
            )
        rows.append(
            (
                name,
                f"{all_of_it.samples:,}",
                str(all_of_it.lost),
                str(all_of_it.repeated),
                "all" if not all_of_it.different else f"all but {all_of_it.different}",
                _ms([outcome.others for outcome in seen]),
                _ms([outcome.it for outcome in seen if outcome.it is not None]),
                f"{statistics.median(o.prepared for o in seen):.0f} of {seen[0].distinct}",
            )
        )
    title = (
        f"faults: {len(OTHERS) + 1} members, {options.epochs} epochs of {life.work.batches} "
        f"batches of {life.batch}, {1e3 * life.step:g} ms a batch; rounds: {options.rounds}"
    )
    heads = (
        "what happens, and what follows",
        "samples had",
        "lost",
        "repeated",
        "batches equal to an unshared loader's",
        "others wait longer by ms",
        "it waits longer by ms",
        "batches prepared",
    )
    notes = (
        "faults: waits are the longest from one batch to the next since it happened, less the "
        "usual one before, and less what a member stood still or was slow by itself; of one that "
        "begins, the time to its first batch",
        f"faults: stopped for {options.stop:g} s; the checkpoint is {UNSAVED} batches old when its "
        "member is killed, and what it had since then is not counted",
        "faults: members ask for a few batches ahead, also beyond the last epoch: these are "
        "prepared too",
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
    parser.add_argument("--items", type=count, default=4096, help="samples (4096)")
    parser.add_argument("--epochs", type=count, default=4, help="of each member (4)")
    parser.add_argument(
        "--step", type=positive, default=0.01, help="seconds that a member takes for a batch (0.01)"
    )
    parser.add_argument("--stop", type=positive, default=3.0, help="seconds it is stopped for (3)")
    parser.add_argument(
        "--only",
        type=_names,
        default=known,
        metavar="LIST",
        help=f"some of: {', '.join(known)}",
    )


BENCHMARK = Benchmark(
    "faults",
    "members that join late, lag, die and resume, and a node that dies: what is lost (nothing)",
    run,
    _arguments,
)
