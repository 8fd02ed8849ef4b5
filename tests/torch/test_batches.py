"""``penstock.torch.loader``: the loader of a pipeline, with batches as tensors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock.errors import PipelineError
from penstock.options import Options
from penstock.order import Sequential
from penstock.pipeline import Pipeline

NUMBERS = ps.from_dataset(np.arange(12.0)).batch(4)

# A value other than the default for every argument of Pipeline.loader.
GIVEN: dict[str, Any] = {
    "workers": 1,
    "kind": "threads",
    "seed": 7,
    "shuffle": False,
    "order": Sequential(),
    "rank": 1,
    "world": 2,
    "tail": "drop",
    "prefetch": 3,
    "tiny_batch": 2,
    "on_error": "skip",
    "timeout": 9.0,
    "memory": "1GB",
    "share": "search",
    "lag": "wait",
    "join": "start",
    "cluster": "auto",
    "metrics_port": 9123,
}


def test_the_signature_is_that_of_pipeline_loader_with_arguments_for_devices() -> None:
    of_pipeline = dict(inspect.signature(Pipeline.loader).parameters)
    of_torch = dict(inspect.signature(penstock.torch.loader).parameters)
    del of_pipeline["self"]
    own = ["pipeline", "device", "device_prep", "decode", "device_normalize", "pin_memory"]
    assert list(of_torch)[: len(own)] == own
    for name in own:
        del of_torch[name]
    # These are found out if they are not given.
    for name in ("rank", "world"):
        given, found = of_pipeline.pop(name), of_torch.pop(name)
        assert (given.kind, found.default) == (found.kind, None)
    # Parameters are equal if name, kind, default and annotation are.
    assert list(of_torch.values()) == list(of_pipeline.values())


def test_every_argument_reaches_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = inspect.signature(Pipeline.loader).parameters
    assert set(GIVEN) == set(defaults) - {"self"}
    assert all(value != defaults[name].default for name, value in GIVEN.items())
    made: list[Options] = []
    # Records the options and makes no loader, which would serve metrics on a port.
    monkeypatch.setattr(
        "penstock.torch.batches.Loader", lambda pipeline, options, custom: made.append(options)
    )
    penstock.torch.loader(NUMBERS, **GIVEN)
    assert made == [Options(**GIVEN)]


def test_batches_are_tensors_in_the_memory_of_the_arrays() -> None:
    pairs = [(np.full(2, i), {"label": i}) for i in range(4)]
    pipeline = ps.from_dataset(pairs).batch(2)
    with penstock.torch.loader(pipeline, workers=0, shuffle=False) as loader:
        batches = list(loader)
    assert [type(batch) for batch in batches] == [tuple, tuple]
    assert torch.equal(batches[1][0], torch.tensor([[2, 2], [3, 3]]))
    assert torch.equal(batches[1][1]["label"], torch.tensor([2, 3]))


def test_unknown_arguments_are_refused() -> None:
    unknown: dict[str, Any] = {"num_workers": 2}
    with pytest.raises(TypeError, match="num_workers"):
        penstock.torch.loader(NUMBERS, **unknown)
    with pytest.raises(PipelineError, match="workers is -1"):
        penstock.torch.loader(NUMBERS, workers=-1)
