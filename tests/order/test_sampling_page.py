"""The sampling schemes of docs/sampling.md: with ranks, resume, refurbish, sharing and torch."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.order import Cursor, Deal, Order
from tests.node.conftest import own_node
from tests.project.test_docs import blocks
from tests.support import ROOT
from tests.support.contract import noise

N = 60
LABELS = np.arange(N) % 7 // 3
SCHEMES = ("importance", "class-balanced", "curriculum")


@pytest.fixture(scope="module")
def classes() -> dict[str, Any]:
    """The classes that the page defines; its examples are run by tests of all pages."""
    found: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "sampling.md"):
        if "class " in block.code:
            code = block.code.split("\n\n\nlabels =")[0].split("\n\n\ndifficulty =")[0]
            exec(compile(code, "sampling.md", "exec"), found)
    return found


def make(name: str, classes: dict[str, Any], folder: Path) -> Order:
    order: Order
    if name == "importance":
        # The weights of epoch 2 and later; epochs before have equal ones.
        np.save(folder / "weights-0002.npy", np.where(np.arange(N) < 6, 30.0, 1.0))
        order = classes["Importance"](str(folder), 48)
    elif name == "class-balanced":
        order = classes["ClassBalanced"](LABELS, 16)
    else:
        order = classes["Curriculum"](np.arange(N)[::-1])
    return order


@pytest.mark.parametrize("name", SCHEMES)
def test_any_batch_can_be_resumed_with_another_world(
    name: str, classes: dict[str, Any], tmp_path: Path
) -> None:
    order = make(name, classes, tmp_path)

    def deal(rank: int, world: int) -> Deal:
        return Deal(order, N, 3, 4, rank=rank, world=world, tail="drop")

    for epoch in range(4):
        sequence = Counter(order.indices(N, 3, epoch).tolist())
        for before, after in ((1, 2), (3, 2), (2, 5)):
            whole = [list(deal(r, before).batches(Cursor(epoch))) for r in range(before)]
            assert len({len(batches) for batches in whole}) == 1
            for stop in range(len(whole[0]) + 1):
                cursor = Cursor(epoch)
                for batch in whole[0][:stop]:
                    cursor = deal(0, before).after(cursor, batch)
                rest = [list(deal(r, after).batches(cursor)) for r in range(after)]
                assert len({len(batches) for batches in rest}) == 1
                dealt = Counter(
                    index
                    for batches in [*(w[:stop] for w in whole), *rest]
                    for batch in batches
                    for index in batch.indices.tolist()
                )
                assert not dealt - sequence
                assert sum(sequence.values()) - sum(dealt.values()) < before + after


@pytest.mark.parametrize("name", SCHEMES)
def test_below_refurbish_and_shared_the_batches_are_those_of_a_plain_loader(
    name: str, classes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = make(name, classes, tmp_path)
    pipeline = ps.from_dataset(np.arange(float(N))).map(noise).refurbish(2).map(noise).batch(8)

    def epochs(count: int, state: Any = None, **options: Any) -> tuple[list[Any], Any]:
        with pipeline.loader(seed=5, order=order, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found = [[batch.tolist() for batch in loader] for _ in range(count)]
            return found, loader.state_dict()

    expected, _ = epochs(4, workers=0)
    assert epochs(4, workers=2, kind="threads")[0] == expected
    first, state = epochs(2, workers=0)
    # The samples that refurbish kept are lost, and the same ones are prepared again.
    assert first + epochs(2, state, workers=0)[0] == expected
    if name != "class-balanced":
        return  # a node takes seconds to start, and does the same for every order
    received: dict[int, Any] = {}

    def run(number: int) -> None:
        received[number] = epochs(4, kind="threads", share="s")[0]

    with own_node(tmp_path, monkeypatch):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert received == {0: expected, 1: expected}


def test_weights_written_after_an_epoch_count_in_the_next_one(
    classes: dict[str, Any], tmp_path: Path
) -> None:
    order = classes["Importance"](str(tmp_path), 200)
    with (
        ps.from_dataset(np.arange(N))
        .batch(10)
        .loader(workers=2, kind="threads", seed=1, order=order) as loader
    ):
        for epoch in range(3):
            assert len(loader) == 20  # counting an epoch must not fix its weights
            seen = np.bincount(np.concatenate(list(loader)), minlength=N)
            assert seen[epoch] > 150 if epoch else seen.max() < 50
            weights = np.zeros(N)
            weights[epoch + 1] = 1
            np.save(tmp_path / f"weights-{epoch + 1:04}.npy", weights)


def test_an_order_that_is_not_ahead_is_asked_again_when_its_epoch_begins() -> None:
    class Changing:
        ahead = False
        shift = 0

        def indices(self, n: int, seed: int, epoch: int) -> Any:
            return (np.arange(n) + self.shift) % n

    order = Changing()
    pipeline = ps.from_dataset(np.arange(6))
    for batched in (pipeline.batch(3), pipeline.batch(3, by=np.ones(6))):
        with batched.loader(workers=0, order=order) as loader:
            for shift in (1, 4):
                assert len(loader) == 2
                order.shift = shift
                assert next(iter(loader))[0] == shift or batched.batching.budget is not None  # type: ignore[union-attr]
                assert np.concatenate(list(loader)).sum() == 15


def test_torch_gets_the_same_samples(classes: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    import penstock.torch

    order = make("class-balanced", classes, Path())
    pipeline = ps.from_dataset(np.arange(N)).batch(8)
    with penstock.torch.loader(pipeline, workers=0, seed=2, order=order) as tensors:
        found = [batch.tolist() for batch in tensors]
    with pipeline.loader(workers=0, seed=2, order=order) as loader:
        assert found == [batch.tolist() for batch in loader]
