"""Every source with every order and batching: exactly once, equal ranks, resume at any batch.

The tables are in ``tests/support/combinations.py``: a new row is tested with all others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from benchmarks.storage.server import ObjectServer
from penstock.errors import PipelineError, StateError
from penstock.order import Cursor, Plan
from penstock.order.plan import BatchKeys
from penstock.pipeline import Pipeline
from tests.node.conftest import own_node
from tests.support.combinations import (
    BATCHINGS,
    ORDERS,
    SEED,
    SOURCES,
    BatchingRow,
    N,
    OrderRow,
    SourceRow,
    jitter,
    numbers,
    values,
    write_data,
)
from tests.support.contract import plain

Epoch = list[Any]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """The folder with the data, and the URL and settings of a server that serves it."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path_factory.mktemp("kept")))
        write_data(folder)
        with ObjectServer(folder) as server:
            yield folder, server.url("train"), server.storage


@dataclass
class Combination:
    """One source with one order and one batching."""

    source: SourceRow
    order_row: OrderRow
    batching: BatchingRow
    pipeline: Pipeline
    order: Any

    def loader(self, workers: int = 0, **options: Any) -> Any:
        return self.pipeline.loader(
            workers=workers,
            kind="threads" if workers else "auto",
            seed=SEED,
            order=self.order,
            memory="64MB",
            **{**self.order_row.options, **options},
        )

    def quietly(self, world: int) -> Any:
        """Expects the warning of an order that warns with several ranks."""
        warns = self.order_row.warns if world > 1 else ""
        return pytest.warns(RuntimeWarning, match=warns) if warns else nullcontext()

    def run(
        self, rank: int = 0, world: int = 1, state: Any = None, tail: str = "drop", epoch: int = 0
    ) -> tuple[Epoch, list[Any]]:
        """The batches of an epoch, or of its rest, and the state before each and after the last."""
        with self.quietly(world), self.loader(rank=rank, world=world, tail=tail) as loader:
            if state is not None:
                loader.load_state_dict(state)
            else:
                loader.set_epoch(epoch)
            states = [loader.state_dict()]
            batches = []
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
        return batches, states

    def check_counts(self, batches: list[Any], world: int, tail: str, epoch: int = 0) -> None:
        """Every sample comes as often as its order says, up to what ``tail`` and drop_last do."""
        found = Counter(int(value) for batch in batches for value in values(batch))
        copies, group = self.batching.copies, self.order_row.group
        assert all(count % copies == 0 for count in found.values())
        least, most = self.order_row.allowed(self.order, epoch)
        total = self.order_row.total or sum(most.values())
        uneven = (world - 1) * group + world * self.batching.drops
        missing = sum((least - found).values()) if copies == 1 else 0
        again = sum((found - Counter({k: v * copies for k, v in most.items()})).values()) // copies
        assert missing <= (uneven if tail == "drop" or self.batching.drops else 0)
        assert again <= (uneven if tail == "pad" else 0)
        if self.order_row.times is None or self.order_row.total:
            assert abs(sum(found.values()) / copies - total) <= uneven


def combination(source: str, order: str, batching: str, places: Any) -> Combination:
    row, order_row, batching_row = SOURCES[source], ORDERS[order], BATCHINGS[batching]
    pipeline = order_row.stages(row.pipeline(*places))
    samples = len(pipeline.source)
    pipeline = batching_row.make(pipeline, samples)
    return Combination(row, order_row, batching_row, pipeline, order_row.make())


def refused(source: str, order: str, batching: str) -> str | None:
    """What the error of a combination says; ``None`` if it works."""
    if ORDERS[order].needs_shards and not SOURCES[source].shards:
        return r"has no shards.*shards="
    if ORDERS[order].echo and BATCHINGS[batching].by_length:
        return r"echo\(\) stands above batch\(by=...\).*Put echo\(\) below batch"
    if ORDERS[order].echo and BATCHINGS[batching].copies > 1:
        return "second echo"
    return None


def chosen(source: str, order: str) -> list[str]:
    """One of the batchings, or all with PENSTOCK_TEST_ALL. All sources together have every order
    with every batching, and all orders together every source with nearly every batching."""
    if os.environ.get("PENSTOCK_TEST_ALL"):
        return list(BATCHINGS)
    number = list(SOURCES).index(source) + list(ORDERS).index(order)
    return [list(BATCHINGS)[number % len(BATCHINGS)]]


def test_all_pairs_are_among_the_chosen_combinations() -> None:
    local = [source for source, row in SOURCES.items() if not row.orders]
    found = {(s, o, b) for s in local for o in ORDERS for b in chosen(s, o)}
    assert len({(s, b) for s, _, b in found}) == len(local) * len(BATCHINGS)
    assert len({(o, b) for _, o, b in found}) == len(ORDERS) * len(BATCHINGS)


@pytest.mark.parametrize(
    ("source", "order"), [(s, o) for s in SOURCES for o in SOURCES[s].orders or ORDERS]
)
def test_batches_of(source: str, order: str, places: Any) -> None:
    if "bucket" in source:
        pytest.importorskip("obstore", reason="obstore is not installed")
    for batching in chosen(source, order):
        turn = len(source + order + batching)
        message = refused(source, order, batching)
        if message is not None:
            with pytest.raises(PipelineError, match=f"(?s){message}"):
                combination(source, order, batching, places).loader().close()
            continue
        with adding_note(f"batching: {batching}"):
            check(combination(source, order, batching, places), turn)


def check(made: Combination, turn: int) -> None:
    """``turn`` chooses the place of the resumes and the numbers of ranks."""
    batches, states = made.run()
    made.check_counts(batches, 1, "drop")
    # Any batch, with other workers: the same bits, and the next epoch too.
    at = turn % len(states)
    with made.loader(workers=2) as loader:
        loader.load_state_dict(states[at])
        rest = [plain(batch) for batch in loader]
        assert rest == [plain(batch) for batch in batches[at:]]
    # Ranks, and a resume with another number of them.
    before, after = ((2, 3), (3, 2), (2, 1))[turn % 3]
    tail = ("drop", "pad")[turn % 2]
    ranks = [made.run(rank, before, tail=tail, epoch=1) for rank in range(before)]
    assert len({len(found) for found, _ in ranks}) == 1
    made.check_counts([b for found, _ in ranks for b in found], before, tail, epoch=1)
    at = turn % len(ranks[0][1])
    state = ranks[0][1][at]
    if made.order_row.echo or made.batching.copies > 1:
        if 0 < at < len(ranks[0][0]):
            with (
                made.quietly(after),
                made.loader(world=after) as loader,
                pytest.raises(StateError) as error,
            ):
                loader.load_state_dict(state)
            assert "number of ranks" in str(error.value)
        after = before
    if at == len(ranks[0][0]):
        return  # the epoch is over
    rests = [made.run(rank, after, state, tail)[0] for rank in range(after)]
    assert len({len(rest) for rest in rests}) == 1
    seen = [batch for found, _ in ranks for batch in found[:at]]
    everything = [*seen, *(batch for rest in rests for batch in rest)]
    if made.batching.copies == 1:
        made.check_counts(everything, max(before, after), tail, epoch=1)
    if after == before:
        assert [list(map(plain, rest)) for rest in rests] == [
            list(map(plain, found[at:])) for found, _ in ranks
        ]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_any_batch_can_be_resumed_with_any_world(order: str, batching: str, places: Any) -> None:
    """Without reading samples: the keys that each rank asks for, after every batch."""
    source = "parquet" if ORDERS[order].needs_shards else "array"
    if refused(source, order, batching) is not None or BATCHINGS[batching].copies > 1:
        return  # the test above
    made = combination(source, order, batching, places)
    plans: dict[int, list[Plan]] = {}
    for world in (1, 2, 3, 5):
        for rank in range(world):
            with made.quietly(world), made.loader(rank=rank, world=world, tail="drop") as loader:
                plans.setdefault(world, []).append(loader.plan)
    for epoch in (1,):
        everything = Counter(keys_of(plans[1][0].batches(Cursor(epoch))))
        if not ORDERS[order].echo:
            assert max(everything.values()) == 1
        for before, after in ((1, 1), (1, 3), (2, 5), (3, 2), (5, 1)):
            if made.order_row.echo:
                after = before
            dealt = [list(plan.batches(Cursor(epoch))) for plan in plans[before]]
            assert len({len(batches) for batches in dealt}) == 1
            cursor = Cursor(epoch)
            for stop in range(len(dealt[0]) + 1):
                rest = [list(plan.batches(cursor)) for plan in plans[after]]
                assert [len(batches) for batches in rest] == [
                    plans[after][0].length(cursor)
                ] * after
                seen = Counter(keys_of(b for batches in dealt for b in batches[:stop]))
                seen.update(keys_of(batch for batches in rest for batch in batches))
                if made.order_row.echo:
                    assert seen == Counter(keys_of(b for batches in dealt for b in batches))
                else:
                    assert not seen - everything
                    lost = sum(everything.values()) - sum(seen.values())
                    assert lost < before + after + max(before, after) * made.batching.drops
                if stop < len(dealt[0]):
                    cursor = plans[before][0].after(cursor, dealt[0][stop])


def keys_of(batches: Iterable[BatchKeys]) -> Iterator[tuple[int, int]]:
    """The samples of batches and their replica numbers."""
    for batch in batches:
        replicas = np.zeros_like(batch.indices) if batch.replicas is None else batch.replicas
        yield from zip(batch.indices.tolist(), replicas.tolist(), strict=True)


@pytest.mark.parametrize("batching", [name for name in BATCHINGS if name != "echoed batches"])
@pytest.mark.parametrize("echo", [1, 2])
def test_a_stream_can_be_resumed_at_any_batch(batching: str, echo: int) -> None:
    pipeline = ps.from_dataset(numbers)
    if echo > 1:
        pipeline = pipeline.echo(echo, window=10)
    if BATCHINGS[batching].by_length:
        with pytest.raises(PipelineError, match="on a stream"):
            BATCHINGS[batching].make(pipeline.map(jitter), N)
        return
    pipeline = BATCHINGS[batching].make(pipeline.map(jitter), N)
    with pipeline.loader(workers=0, seed=SEED) as loader:
        batches, states, found = [], [loader.state_dict()], Counter[int]()
        for batch in loader:
            batches.append(plain(batch))
            states.append(loader.state_dict())
            found.update(int(value) for value in values(batch))
    drops = BATCHINGS[batching].drops
    assert set(found) <= set(range(N))
    assert max(found.values()) == echo
    assert sum(found.values()) >= echo * N - max(0, drops - 1)
    for at in range(len(batches) + 1):
        with pipeline.loader(workers=0, seed=SEED) as again:
            again.load_state_dict(states[at])
            assert [plain(batch) for batch in again] == batches[at:]
    with (
        pipeline.loader(workers=2, seed=SEED) as other,
        pytest.raises(StateError, match=r"taken with 1 streams.*Give the loader workers=1"),
    ):
        other.load_state_dict(states[1])


@pytest.mark.parametrize("order", ["weighted", "reservoir", "late"])
def test_a_stream_refuses_orders_and_ranks(order: str) -> None:
    pipeline = ps.from_dataset(numbers).batch(4)
    with pytest.raises(PipelineError, match=r"order on a stream.*give the dataset __len__"):
        pipeline.loader(order=ORDERS[order].make())
    with pytest.raises(PipelineError, match=r"world=2 on a stream.*Divide it where it is made"):
        pipeline.loader(world=2)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One node for all orders, because starting it takes seconds."""
    with pytest.MonkeyPatch.context() as patch, own_node(tmp_path_factory.mktemp("node"), patch):
        patch.setenv("PENSTOCK_NODE_IDLE", "60")
        yield


@pytest.mark.parametrize(
    ("order", "batching"),
    [(order, batching) for order in ORDERS for batching in ("count", "tokens")]
    if os.environ.get("PENSTOCK_TEST_ALL")
    else [("reservoir in lanes", "tokens"), ("late", "count"), ("echoed", "count")],
)
def test_jobs_and_ranks_that_share(order: str, batching: str, places: Any, node: None) -> None:
    """Two jobs get the batches of a loader that does not share; so do two ranks, resumed.

    Sharing treats all plans alike and its loaders take a while, so only some are shared here; more
    are in the tests of mixes, budgets and sampling schemes.
    """
    if refused("parquet", order, batching) is not None:
        return  # the first test
    made = combination("parquet", order, batching, places)
    expected = [list(map(plain, made.run(epoch=epoch)[0])) for epoch in (0, 1)]
    received: dict[Any, Any] = {}

    def run(job: int) -> None:
        with made.loader(workers=2, share=f"{order} {batching}") as loader:
            received[job] = [[plain(batch) for batch in loader] for _ in range(2)]

    in_threads(run, 2)
    assert received == {0: expected, 1: expected}
    ranks = [made.run(rank, 2, epoch=1) for rank in range(2)]
    at = len(ranks[0][0]) // 2

    def run_rank(rank: int) -> None:
        options = {"share": f"{order} {batching} ranks", "rank": rank, "world": 2, "tail": "drop"}
        with made.loader(workers=2, **options) as loader:
            loader.load_state_dict(ranks[rank][1][at])
            received[f"rank {rank}"] = [plain(batch) for batch in loader]

    in_threads(run_rank, 2)
    for rank in range(2):
        assert received[f"rank {rank}"] == list(map(plain, ranks[rank][0][at:]))


def in_threads(run: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


@contextmanager
def adding_note(note: str) -> Iterator[None]:
    """Adds a note to an error."""
    try:
        yield
    except BaseException as error:
        error.args = (f"{error} [{note}]",)
        raise
