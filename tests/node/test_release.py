"""A node frees what only jobs needed that have ended, while others go on."""

from __future__ import annotations

import time

import numpy as np

import penstock as ps
from penstock.node.directory import NodeDirectory
from tests.node.conftest import Clock, service_here


def test_a_cache_that_no_job_needs_any_more_is_freed_while_another_job_goes_on(
    node_directory: NodeDirectory, clock: Clock
) -> None:
    def train(first: float) -> ps.Pipeline:
        data = np.arange(first, first + 16.0)
        return ps.from_dataset(data, version=str(first)).cache("1MB").batch(4)

    with service_here(node_directory, workers=1, clock=clock) as service:
        stores = service.shared_stores._stores
        with train(0.0).loader(share="stays", seed=0) as stays:
            list(stays)
            with train(100.0).loader(share="ends", seed=0) as ends:
                list(ends)
                assert len(stores) == 2
            limit = time.monotonic() + 60
            while not service.shared_stores.unused(0.0):  # the group ends in a thread of its own
                assert time.monotonic() < limit
                time.sleep(0.01)
            assert len(stores) == 2  # for a job that comes soon
            clock.now += 61.0
            while len(stores) == 2:
                assert time.monotonic() < limit
                time.sleep(0.01)
            assert len(stores) == 1
            list(stays)
            (cache,) = service.shared_stores._stores.values()
            assert len(cache) == 16
