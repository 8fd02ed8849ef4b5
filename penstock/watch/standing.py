"""Where a loader is right now. The one place outside of it that looks into loader and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.engine import Engine
from penstock.node.recut import Recut
from penstock.node.share import Member
from penstock.watch.snapshot import Standing

if TYPE_CHECKING:
    from penstock.loader import Loader


class Queue(NamedTuple):
    """What an engine has open; ``ready`` says that the next batch can be taken at once."""

    finished: int = 0
    unfinished: int = 0
    ready: bool = False
    slots: int = 0
    slot_bytes: int = 0


def queue_of(engine: Engine | Member | None) -> Queue:
    """What lies ready, and what is being prepared."""
    if engine is None:
        return Queue()
    if isinstance(engine, Engine):
        with engine._lock:
            jobs = list(engine._jobs.values())
            ready, ring = engine._finished() is not None, engine.ring
            finished = sum(job.complete for job in jobs)
            slots = len(ring) - len(ring._free) - len(ring._returned)
            return Queue(finished, len(jobs) - finished, ready, max(0, slots), ring.used)
    member = engine._inner if isinstance(engine, Recut) else engine
    wanted, arrived = len(member._wants), len(member._arrived)
    ready = bool(member._wants) and member._wants[0][0] in member._arrived
    return Queue(arrived, wanted - arrived, ready, len(member._leases))


def standing_of(loader: Loader, queue: Queue) -> Standing:
    options, cursor = loader.options, loader._cursor
    try:
        batches: int | None = len(loader)
    except TypeError:  # a stream has no length
        batches = None
    return Standing(
        name=repr(loader),
        epoch=cursor.epoch,
        batch=cursor.batch,
        batches=batches,
        share=options.share,
        rank=options.rank,
        world=options.world,
        finished=queue.finished,
        unfinished=queue.unfinished,
        slots=queue.slots,
        slot_bytes=queue.slot_bytes,
    )
