"""Faults of the members of one group, of their node and of its workers.

All happen in the second epoch, except joining, which happens in the first.
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from typing import Any

from benchmarks.faults.fault import OTHERS, SUBJECT, Event, Fault
from benchmarks.faults.run import FaultRun

SLOWER = 3.0

UNSAVED = 5
"""Batches that a member receives after its checkpoint, and loses when it is killed."""


def _join(run: FaultRun, options: Namespace) -> Event:
    run.start(*OTHERS, SUBJECT)
    run.go(*OTHERS)
    run.wait_for_batches("a", _third(run))
    began = run.go(SUBJECT)
    return Event(began, it=(SUBJECT,), began=began)


def _leave(run: FaultRun, options: Namespace) -> Event:
    at = run.batches_per_epoch + _third(run)
    _start_all(run, leave_at=at)
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


MEMBER_FAULTS = (
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
