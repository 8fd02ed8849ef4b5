"""A refused checkpoint leaves the loader as it was, whatever it is refused for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StateError
from penstock.pipeline import Pipeline
from tests.support.contract import noise, plain


def refurbished() -> Pipeline:
    numbers = ps.from_dataset(np.arange(30.0), random=False)
    return numbers.map(noise).refurbish("auto").map(noise).batch(5)


def echoed() -> Pipeline:
    return ps.from_dataset(np.arange(30.0), random=False).map(noise).echo("auto").batch(5)


def plain_road() -> Pipeline:
    return ps.from_dataset(np.arange(30.0), random=False).map(noise).batch(5)


def numbers() -> Iterator[float]:
    return iter(np.arange(30.0))


def stream() -> Pipeline:
    return ps.from_dataset(numbers).batch(5)


Damage = Callable[[dict[str, Any]], None]

CASES: list[tuple[Callable[[], Pipeline], Damage]] = [
    (refurbished, lambda state: state.update(refurbish={"place": 1, "reuse": 7}, seed=99)),
    (refurbished, lambda state: state.update(refurbish={"place": 1, "reuse": 7}, kept="all")),
    (refurbished, lambda state: state.update(refurbish=None)),
    (echoed, lambda state: state.update(echo=None)),
    (echoed, lambda state: state.update(cursor={"epoch": 0})),
    (plain_road, lambda state: state.update(cursor={**state["cursor"], "batch": -1})),
    (plain_road, lambda state: state.update(version=1)),
    (plain_road, lambda state: state.update(first_batch=2, dealing={"world": 3, "batch": 5})),
    (stream, lambda state: state.update(plan={"delivered": [1, 2, 3], "turn": 1})),
    (stream, lambda state: state.update(plan=None)),
]


@pytest.mark.parametrize(("make", "damage"), CASES)
def test_a_refused_checkpoint_changes_nothing(make: Callable[[], Pipeline], damage: Damage) -> None:
    with make().loader(workers=0, seed=4) as loader, make().loader(workers=0, seed=4) as other:
        # What refurbish("auto") measures differs from run to run.
        other.load_state_dict(loader.state_dict())
        epoch = iter(other)
        next(epoch)
        state = other.state_dict()
        damage(state)
        before = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
        after = [plain(batch) for batch in loader]
        other.load_state_dict(before)
        assert [plain(batch) for batch in other] == after
