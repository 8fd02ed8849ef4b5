"""A user may name a map as they like: stages are told apart by what they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.echo import Pace
from penstock.stats import Totals
from tests.support.contract import noise, plain


def add_one(value: Any) -> Any:
    return value + 1.0


def test_a_map_named_echo_does_not_mislead_echo_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[int | None] = []
    between = Pace.between

    def recording(before: Totals, after: Totals, stage: int | None, workers: int) -> Pace | None:
        stages.append(stage)
        return between(before, after, stage, workers)

    monkeypatch.setattr(Pace, "between", recording)
    source = ps.from_dataset(np.arange(8.0), random=False).map(add_one, random=False, name="echo")
    pipeline = source.map(noise).echo("auto").map(noise).batch(4)
    with pipeline.loader(workers=0) as loader:
        for _ in loader:
            pass
    # The source is stage 0, the maps are 1 and 2, and echo() is 3.
    assert stages == [3]


def test_a_map_named_cache_does_not_matter_to_a_checkpoint() -> None:
    source = ps.from_dataset(np.arange(12.0), random=False)
    with_cache = source.cache("1MB").map(add_one, random=False, name="cache").batch(3)
    without = source.map(add_one, random=False, name="cache").batch(3)
    with with_cache.loader(workers=0, seed=2) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        rest = [plain(batch) for batch in epoch]
    with without.loader(workers=0, seed=2) as loader:
        loader.load_state_dict(state)
        assert [plain(batch) for batch in loader] == rest
