"""A sample that kills its worker does not end the node, nor the jobs that share it."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory
from tests.support.hostile import deadly


@pytest.mark.parametrize("size", [1, 4])
def test_a_deadly_first_sample_is_skipped_and_the_node_lives(
    size: int, node_directory: NodeDirectory
) -> None:
    fine = ps.from_dataset(np.arange(64.0)).batch(4)
    pipeline = ps.from_dataset(np.arange(8.0)).map(partial(deadly, home=os.getpid()), random=False)
    with (
        fine.loader(share="fine", shuffle=False) as other,
        pipeline.batch(size).loader(share="a", shuffle=False, on_error="skip") as loader,
    ):
        epoch = iter(other)
        next(epoch)
        node = request_status(node_directory)
        assert node is not None
        assert [x for batch in loader for x in batch.tolist()] == list(map(float, range(1, 8)))
        assert [bad.index for bad in loader.stats().bad_samples] == [0]
        assert sum(len(batch) for batch in epoch) == 60
        still = request_status(node_directory)
        assert still is not None
        assert still["pid"] == node["pid"]
