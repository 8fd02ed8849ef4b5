"""Memory of batches: descriptors do not grow with held batches, and the ring shrinks."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools.processes import ProcessPool
from penstock.engine.pools.wire import MappedSlots
from penstock.engine.pools.worker import WorkerSlot
from penstock.engine.slots import FEWEST, OPEN_SLOTS, SPARE, WINDOW, Ring, Slot
from penstock.errors import SlotError
from penstock.loader import Loader

SIZE = 4096


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_memory(pid: int | str = "self") -> int:
    """Bytes of the shared memory of batches that a process has mapped."""
    total = 0
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if "/memfd:penstock" in line:
                first, last = line.split(maxsplit=1)[0].split("-")
                total += int(last, 16) - int(first, 16)
    return total


def acquire(ring: Ring) -> Slot:
    slot = ring.acquire(SIZE)
    assert slot is not None
    return slot


def test_a_slot_has_one_descriptor_and_maps_shared_memory() -> None:
    gc.collect()  # what other tests have left may have descriptors
    before = descriptors()
    slot = Slot(1, SIZE, shared=True)
    assert descriptors() == before + 1
    slot.map[:5] = b"hello"
    assert os.pread(slot.fd, 5, 0) == b"hello"
    os.ftruncate(slot.fd, 2 * SIZE)
    slot.refresh()
    assert (slot.size, slot.map[:5], descriptors()) == (2 * SIZE, b"hello", before + 1)
    slot.close_descriptor()
    assert (slot.map[:5], descriptors()) == (b"hello", before)
    mapped = mapped_memory()
    del slot
    assert mapped_memory() == mapped - 2 * SIZE


def test_descriptors_do_not_grow_with_held_batches() -> None:
    ring, before = Ring(1 << 30), descriptors()
    held: list[Any] = []
    for number in range(5 * OPEN_SLOTS):
        slot = acquire(ring)
        slot.map[:4] = number.to_bytes(4, "little")
        held.append(ring.lease(slot))
    assert descriptors() - before <= OPEN_SLOTS
    assert [int.from_bytes(buffer[:4], "little") for buffer in held] == list(range(5 * OPEN_SLOTS))
    held.clear()
    # Slots without a descriptor cannot be sent to workers again, and are freed.
    del slot
    acquire(ring)
    assert len(ring) == OPEN_SLOTS


@pytest.mark.parametrize("shared", [True, False])
def test_a_ring_frees_the_slots_that_a_loop_no_longer_needs(shared: bool) -> None:
    ring = Ring(1 << 30, shared=shared)
    held = [ring.lease(acquire(ring)) for _ in range(40)]
    assert len(ring) == 40
    held.clear()
    for _ in range(2 * WINDOW):
        ring.release(acquire(ring))
    assert len(ring) == SPARE + 1


@pytest.mark.parametrize("held", [0, 1, 2, 17, OPEN_SLOTS - 2])
def test_a_steady_loop_never_gets_a_new_slot(held: int) -> None:
    ring = Ring(1 << 30)
    window: list[Any] = []
    numbers = set()
    for step in range(10 * WINDOW):
        # It holds one batch more or less from time to time.
        while len(window) > held + step % 2:
            window.pop(0)
        slot = acquire(ring)
        if step >= WINDOW:
            numbers.add(slot.id)
        window.append(ring.lease(slot))
    assert max(numbers) == ring._next <= held + 4


LIMITED = """
import os, resource, sys, time, warnings
import numpy as np
import penstock as ps

limit = 200
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
warnings.simplefilter("always")
collate = {collate}
pipeline = ps.from_dataset(np.arange(2000.0)).map(lambda x: np.full(8, x), random=False)
with pipeline.batch(4, collate=collate).loader(
    workers=2, kind="processes", shuffle=False, prefetch={prefetch}
) as loader:
    held, files = [], []
    for batch in loader:
        held.append(batch)
        if {hog} and len(held) == 10:
            while not loader.queue().ready:
                time.sleep(1e-3)  # the next batch must have its memory, or there is none for it
            try:
                while True:
                    files.append(os.dup(0))
            except OSError:
                pass
    for file in files:
        os.close(file)
    held = [np.array(batch) for batch in held]
    assert np.concatenate(held)[:, 0].tolist() == list(map(float, range(2000)))
    assert len(held) == 500
    print("descriptors", len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("prefetch", [1, None])
@pytest.mark.parametrize("collate", ["None", "list"])
@pytest.mark.parametrize("hog", [False, True], ids=["free", "none left"])
def test_a_loop_may_hold_many_batches_at_a_low_limit_of_descriptors(
    hog: bool, collate: str, prefetch: int | None
) -> None:
    code = LIMITED.format(hog=hog, collate=collate, prefetch=prefetch)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("RuntimeWarning") == int(hog), run.stderr
    assert ("limit of 200 open files" in run.stderr) == hog


def test_no_descriptor_for_the_first_slot_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(nbytes: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("penstock.engine.slots.shared_file", none_left)
    ring = Ring(1 << 30)
    assert ring.acquire(SIZE) is None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with pytest.raises(SlotError, match=f"limit of {limit} open files.*ulimit -n"):
        raise ring.exhausted(SIZE)


def workers_of(loader: Loader) -> list[int]:
    assert isinstance(loader._feed, Engine)
    assert isinstance(loader._feed.pool, ProcessPool)
    pids = [worker.process.pid for worker in loader._feed.pool._workers.values()]
    return [pid for pid in pids if pid is not None]


def test_released_memory_is_unmapped_in_workers_too() -> None:
    row = np.zeros(SIZE // 8)
    pipeline = ps.from_dataset(np.arange(400.0)).map(lambda x: row + x, random=False).batch(4)
    with pipeline.loader(workers=2, kind="processes", shuffle=False, prefetch=2) as loader:
        # Batches of loaders and nodes of earlier tests in this process may be mapped still.
        gc.collect()
        before = mapped_memory()
        epoch = iter(loader)
        held = [next(epoch) for _ in range(50)]
        assert mapped_memory() >= before + 50 * 4 * SIZE
        held.clear()
        for _ in range(3):
            for _batch in loader:
                pass
        del _batch
        engine = loader._feed
        assert isinstance(engine, Engine)
        kept = len(engine.ring)
        assert kept <= FEWEST + SPARE + 3
        # The work of the loader is mapped as well.
        assert mapped_memory() <= before + kept * 4 * SIZE
        for pid in workers_of(loader):
            # One slot may have been freed after the last message to the worker.
            assert mapped_memory(pid) <= (kept + WINDOW // 8) * 4 * SIZE


def test_both_ends_of_a_wire_forget_the_same_slots() -> None:
    mapped = MappedSlots(limit=2)
    assert mapped.touch(1) == (False, None)
    assert mapped.touch(2) == (False, None)
    assert mapped.forget(1)
    assert not mapped.forget(1)
    assert mapped.touch(3) == (False, None)
    assert mapped.touch(4) == (False, 2)


def test_a_worker_that_needs_a_longer_slot_does_not_shorten_it_for_others() -> None:
    slot = Slot(1, 4096, shared=True)
    first, second = (WorkerSlot(1, os.dup(slot.fd)) for _ in range(2))
    second.grow(40_960)
    first.grow(8_192)
    assert os.fstat(slot.fd).st_size == first.size == second.size == 40_960
    second.map[40_959] = 7
    assert first.map[40_959] == 7
    first.close()
    second.close()


def test_a_fork_keeps_no_free_slot_but_the_batches_of_the_loop() -> None:
    ring = Ring(1 << 20)
    free, held = ring.acquire(4096), ring.acquire(4096)
    assert free is not None
    assert held is not None
    held.map[0] = 7
    batch = np.frombuffer(ring.lease(held), np.uint8)
    ring.release(free)
    fd = free.fd
    del free, held
    child = os.fork()
    if not child:
        try:
            os.fstat(fd)
            os._exit(1)
        except OSError:
            os._exit(int(batch[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os.fstat(fd).st_size == 4096
