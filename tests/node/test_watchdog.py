"""A group that stands still is noticed and mended; one whose workers are busy is left alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.pools.processes import ProcessPool
from penstock.errors import WorkerError
from penstock.node.client import request_status
from penstock.node.service import Service
from penstock.node.staging import StagingEngine
from penstock.node.watchdog import RESTARTS, STALL, Observation, Watchdog
from tests.node.conftest import Clock
from tests.node.test_leaving import eventually
from tests.support.contract import WaitsForFile, WaitsToLoad

STALLED = Observation(starving=True, busy=False, progress=1)


def test_steps_follow_each_other_until_the_group_is_given_up() -> None:
    watchdog = Watchdog()
    assert watchdog.look(STALLED, 0.0) is None
    steps = [watchdog.look(STALLED, STALL * number) for number in range(1, RESTARTS + 3)]
    assert steps == ["nudge", *["restart"] * RESTARTS, "give up"]


def test_progress_ends_a_stall() -> None:
    watchdog = Watchdog()
    watchdog.look(STALLED, 0.0)
    assert watchdog.look(STALLED, STALL) == "nudge"
    assert watchdog.look(STALLED._replace(progress=2), 2 * STALL) is None
    assert watchdog.look(STALLED._replace(progress=2), 3 * STALL) == "nudge"


@given(
    st.lists(
        st.tuples(
            st.builds(Observation, st.booleans(), st.booleans(), st.integers(0, 2)),
            st.floats(0.0, 3 * STALL),
        )
    )
)
def test_a_worker_busy_with_a_long_sample_is_no_stall(
    looks: list[tuple[Observation, float]],
) -> None:
    """Steps come only after a time in which members starved, and nothing was busy or moved."""
    watchdog, now = Watchdog(), 0.0
    still_since: float | None = None
    progress: int | None = None
    for seen, seconds in looks:
        now += seconds
        if seen.progress != progress or seen.busy or not seen.starving:
            still_since = None
        progress = seen.progress
        if still_since is None and seen.starving and not seen.busy:
            still_since = now
        if watchdog.look(seen, now) is not None:
            assert still_since is not None
            assert now - still_since >= STALL


def engine_of(service: Service) -> StagingEngine:
    engine = service.groups["a"]._engine
    assert engine is not None
    return engine


def lost_count(service: Service) -> Callable[[], None]:
    """The count of busy workers has leaked: the node believes that all are busy."""

    def spoil() -> None:
        engine = engine_of(service)
        while service.workers.begin(0.5, engine):
            pass

    return spoil


def lost_notification(service: Service) -> Callable[[], None]:
    """The engine is not told that members want batches."""

    def spoil() -> None:
        service.groups["a"]._hungry = False

    return spoil


def lost_piece(service: Service) -> Callable[[], None]:
    """The next pieces of work are given to nobody."""

    def spoil() -> None:
        engine = engine_of(service)
        schedule = engine._schedule
        take, left = schedule.take, [4]

        def to_nobody(worker: int) -> Any:
            while left[0]:
                if take(worker) is None:
                    return None
                left[0] -= 1
            return take(worker)

        schedule.take = to_nobody  # type: ignore[method-assign]

    return spoil


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("fault", [lost_count, lost_notification, lost_piece])
def test_a_node_mends_a_group_that_stands_still(
    service: Service, clock: Clock, kind: str, fault: Any
) -> None:
    source = ps.from_dataset(np.arange(64.0), random=False, version="1")
    if kind == "processes":
        source = source.map(np.float32, random=False, version="1")
    with source.batch(4).loader(share="a", shuffle=False, prefetch=2) as loader:
        epoch = iter(loader)
        received = [next(epoch).tolist() for _ in range(2)]
        group = service.groups["a"]
        assert group.assembly is not None
        assert group.assembly.choice.kind == kind
        # All that was asked for has come, so the workers are idle.
        assert eventually(lambda: engine_of(service).load == 0 and not group._names)
        fault(service)()
        rest: list[Any] = []
        job = threading.Thread(target=lambda: rest.extend(batch.tolist() for batch in epoch))
        job.start()
        deadline = [0]
        while job.is_alive() and deadline[0] < 600:
            # Time passes only while members starve; the group itself works in real time.
            if group.state.is_starving() and not engine_of(service).load:
                clock.now += STALL / 2
            job.join(0.2)
            deadline[0] += 1
        assert not job.is_alive()
        assert received + rest == [[4.0 * n + k for k in range(4)] for n in range(16)]
        if fault is not lost_notification:  # it may be made good by the next message
            assert group.stalls > 0
            status = request_status(service.directory)
            assert status is not None
            assert status["groups"][0]["stalls"] == group.stalls
            assert "members wait and workers are idle" in status["groups"][0]["trouble"]


def test_a_group_that_cannot_be_mended_is_an_error(service: Service, clock: Clock) -> None:
    with ps.from_dataset(np.arange(64.0)).batch(4).loader(share="a", prefetch=2) as loader:
        epoch = iter(loader)
        next(epoch)
        group = service.groups["a"]
        assert eventually(lambda: engine_of(service).load == 0 and not group._names)
        engine_of(service)._schedule.take = lambda worker: None  # type: ignore[method-assign]
        errors: list[BaseException] = []

        def run() -> None:
            try:
                for _ in epoch:
                    pass
            except WorkerError as error:
                errors.append(error)

        job = threading.Thread(target=run)
        job.start()
        for _ in range(600):
            clock.now += STALL / 2
            job.join(0.2)
            if not job.is_alive():
                break
        assert not job.is_alive()
        assert "starting other workers did not help" in str(errors[0])


def test_a_long_sample_is_waited_for(service: Service, clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    source = ps.from_dataset(np.arange(16.0), random=False, version="1")
    pipeline = source.map(WaitsForFile(file, first=4), random=False, version="1").batch(4)
    with pipeline.loader(share="a", shuffle=False) as loader:
        epoch = iter(loader)
        next(epoch)
        group = service.groups["a"]
        rest: list[Any] = []
        job = threading.Thread(target=lambda: rest.extend(epoch))
        job.start()
        assert eventually(lambda: group.state.is_starving() and engine_of(service).load > 0)
        for _ in range(5):
            clock.now += 10 * STALL
            group.watch()
        file.touch()
        job.join()
        assert len(rest) == 3
        assert group.stalls == 0


def test_workers_that_start_again_are_waited_for(
    service: Service, clock: Clock, tmp_path: Path
) -> None:
    """A restart would forget which samples have killed workers."""
    file = tmp_path / "wait"
    source = ps.from_dataset(np.arange(64.0), random=False, version="1")
    pipeline = source.map(WaitsToLoad(file), random=False, version="1").batch(4)
    with pipeline.loader(share="a", shuffle=False, prefetch=2) as loader:
        epoch = iter(loader)
        next(epoch)
        group, engine = service.groups["a"], engine_of(service)
        pool = engine.pool
        assert isinstance(pool, ProcessPool)
        # The second worker may still be starting, and batches may still be in preparation.
        assert eventually(lambda: all(w.ready for w in list(pool._workers.values())))
        assert eventually(lambda: engine.load == 0 and not group._names)
        assert not pool.starting
        file.touch()
        killed = list(pool._workers.values())
        # The workers end with the zygote, and the next one loads the pipeline, which takes long.
        assert pool._zygote is not None
        assert pool._zygote.pid is not None
        os.kill(pool._zygote.pid, signal.SIGKILL)
        assert eventually(
            lambda: len([w for w in list(pool._workers.values()) if w not in killed]) == 2
        )
        rest: list[Any] = []
        job = threading.Thread(target=lambda: rest.extend(batch.tolist() for batch in epoch))
        job.start()
        starves = eventually(lambda: group.state.is_starving() and not engine.load)
        for _ in range(5):
            clock.now += STALL
            group.watch()
        stalls, doing = group.stalls, group.doing(next(iter(group.peers.values())))
        file.unlink()
        job.join()
        assert starves
        assert stalls == 0
        assert doing == "worker processes are starting"
        assert rest == [[4.0 * n + k for k in range(4)] for n in range(1, 16)]
