"""The limit of workers over all groups of a node: who is notified, and by which thread."""

from __future__ import annotations

import threading
from typing import Any

from penstock.node.staging import WorkerLimit


class Waiting:
    """An engine that has reached the limit; its pool notes which threads notify it."""

    def __init__(self, *, guest: bool = False) -> None:
        self.guest = guest
        self.limited = False
        self.load = 0.0
        self.pool = self
        self.notified_by: list[threading.Thread] = []
        self.notified = threading.Event()

    def notify(self) -> None:
        self.notified_by.append(threading.current_thread())
        self.notified.set()


def limit_of(*engines: Any) -> WorkerLimit:
    limit = WorkerLimit(1)
    for engine in engines:
        limit.add(engine)
    return limit


def test_an_engine_that_finds_the_limit_reached_is_known_to_wait_at_once() -> None:
    first, second = Waiting(), Waiting()
    limit = limit_of(first, second)
    assert limit.begin(1.0, first)  # type: ignore[arg-type]
    assert not limit.begin(0.5, second)  # type: ignore[arg-type]
    assert second.limited
    limit.end(1.0, first)  # type: ignore[arg-type]
    limit.notify(first)  # type: ignore[arg-type]
    assert second.notified.is_set()
    assert not second.limited


def test_a_pool_that_asks_for_a_task_does_not_notify_another_pool_itself() -> None:
    """It holds its own lock then, and the other pool may be waiting for it with its own held."""
    first, second = Waiting(), Waiting()
    limit = limit_of(first, second)
    limit.notify_later(first)  # type: ignore[arg-type]
    assert second.notified_by == []
    second.limited = True
    limit.notify_later(first)  # type: ignore[arg-type]
    assert second.notified.wait(60)
    assert second.notified_by != [threading.current_thread()]


def test_guests_get_only_the_cores_that_are_lent() -> None:
    guest, own = Waiting(guest=True), Waiting()
    limit = limit_of(guest, own)
    limit.size, limit.lent = 4, 2
    assert limit.idle() == 4
    assert limit.begin(2.0, guest)  # type: ignore[arg-type]
    assert not limit.begin(0.5, guest)  # type: ignore[arg-type]
    assert limit.idle() == 4, "guests leave when jobs of this machine need their cores"
    assert limit.begin(1.5, own)  # type: ignore[arg-type]
    assert limit.idle() == 2.5


def test_a_guest_begins_nothing_while_a_job_of_this_machine_waits() -> None:
    guest, own = Waiting(guest=True), Waiting()
    limit = limit_of(guest, own)
    limit.size = limit.lent = 1
    assert limit.begin(1.0, guest)  # type: ignore[arg-type]
    assert not limit.begin(1.0, own)  # type: ignore[arg-type]
    assert limit.idle() == 0
    limit.end(1.0, guest)  # type: ignore[arg-type]
    assert not limit.begin(1.0, guest)  # type: ignore[arg-type]
    limit.notify(guest)  # type: ignore[arg-type]
    assert own.notified.is_set()
    assert limit.begin(1.0, own)  # type: ignore[arg-type]
