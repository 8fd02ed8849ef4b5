"""A group that has no memory for another batch waits until there is some, and goes on."""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine import slots
from penstock.node.service import Service
from tests.node.test_leaving import eventually

ROW = 32_768
"""Numbers in a sample: a batch of four takes 1 MB."""


def pipeline_of(kind: str, count: int) -> ps.Pipeline:
    samples = [np.full(ROW, number, np.float64) for number in range(count)]
    source = ps.from_dataset(samples, random=False, version="1")
    if kind == "processes":
        source = source.map(np.negative, random=False, version="1").map(
            np.negative, random=False, version="1"
        )
    return source.batch(4)


def firsts(batches: list[Any]) -> list[float]:
    return [float(batch[0, 0]) for batch in batches]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_group_waits_while_the_node_has_no_descriptor_left(
    service: Service, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make, lacking, refused = slots.shared_file, threading.Event(), threading.Event()

    def shared_file(nbytes: int) -> int:
        if lacking.is_set():
            if threading.current_thread().name == "penstock-a":  # of the group, not of a worker
                refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return make(nbytes)

    monkeypatch.setattr("penstock.engine.slots.shared_file", shared_file)
    with pipeline_of(kind, 128).loader(share="a", shuffle=False, prefetch=2) as loader:
        epoch = iter(loader)
        kept = [next(epoch)]
        group = service.groups["a"]
        assert group.assembly is not None
        assert group.assembly.choice.kind == kind
        lacking.set()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                kept.extend(epoch)
            except BaseException as error:
                errors.append(error)

        job = threading.Thread(target=run)
        job.start()
        waits = eventually(lambda: refused.is_set() or not job.is_alive())
        lacking.clear()
        job.join()
        assert not errors
        assert waits
        assert group.broken is None
        assert firsts(kept) == [4.0 * number for number in range(32)]


def test_memory_of_a_job_does_not_bound_its_group(service: Service) -> None:
    """A job that is far behind is detached by the node's budget, and stops no other job."""
    options: Any = {"share": "a", "shuffle": False, "memory": "4MB", "join": "start"}
    pipeline = pipeline_of("threads", 128)
    with (
        pipeline.loader(**options, lag="detach") as slow,
        pipeline.loader(**options, lag="detach") as fast,
    ):
        slow_epoch = iter(slow)
        behind = [next(slow_epoch)]
        expected = [4.0 * number for number in range(32)]
        assert [float(batch[0, 0]) for batch in fast] == expected
        assert firsts([*behind, *slow_epoch]) == expected
