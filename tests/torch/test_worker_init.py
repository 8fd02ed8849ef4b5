"""Seeds that a ``worker_init_fn`` sets have no effect on samples, and the log says so."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.keyed import preserved_globals
from penstock.torch.worker import call_init


def seed_as_torch_recommends(worker: int) -> None:
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def warnings_of(
    worker_init_fn: Callable[[int], None], caplog: pytest.LogCaptureFixture, worker: int = 0
) -> list[str]:
    """What is logged in a worker whose generators are seeded as torch seeds them."""
    seed = 2**40 + 7
    with preserved_globals(), caplog.at_level("WARNING", "penstock.torch"):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        call_init(worker_init_fn, worker)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("worker_init_fn", "named"),
    [
        (lambda worker: np.random.seed(worker), "NumPy"),
        (lambda worker: random.seed(worker), "random"),
        (lambda worker: torch.manual_seed(worker) and None, "torch"),
        (lambda worker: (random.seed(worker), np.random.seed(worker))[1], "random and NumPy"),
    ],
    ids=["numpy", "random", "torch", "two"],
)
def test_seeds_without_effect_are_named_once(
    worker_init_fn: Callable[[int], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings_of(worker_init_fn, caplog)
    assert f"worker_init_fn seeded {named}, but Penstock seeds each sample" in warning
    assert "call torch.manual_seed in the script" in warning


def test_other_workers_do_not_repeat_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(lambda worker: np.random.seed(worker), caplog, worker=1) == []


@pytest.mark.parametrize(
    "worker_init_fn", [seed_as_torch_recommends, lambda worker: None], ids=["torch", "nothing"]
)
def test_seeds_that_repeat_are_no_reason_to_warn(
    worker_init_fn: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(worker_init_fn, caplog) == []
