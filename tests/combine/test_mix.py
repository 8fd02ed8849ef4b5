"""Mixes: the maps of each source, exact shares, ranks, resume, sharing, reuse, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.combine.mix import MixSource
from penstock.errors import PipelineError, SampleError, ShapeError, StateError
from tests.node.conftest import own_node
from tests.support.contract import noise, packed


def doubled(value: Any) -> Any:
    return 2 * value


def webs() -> ps.Pipeline:
    return ps.from_dataset(np.arange(40.0)).map(noise)


def codes() -> ps.Pipeline:
    return ps.from_dataset(np.arange(500.0, 510.0)).map(doubled, random=False)


def mixture(**options: Any) -> ps.Pipeline:
    return ps.mix({"web": (webs(), 3), "code": (codes(), 1)}, **options)


def epochs(pipeline: ps.Pipeline, count: int = 2, **options: Any) -> list[list[list[float]]]:
    with pipeline.loader(**{"workers": 0, "seed": 4, **options}) as loader:
        return [[batch.tolist() for batch in loader] for _ in range(count)]


def test_each_source_passes_its_own_maps_in_exact_shares() -> None:
    for epoch in epochs(mixture().batch(8)):
        assert [len(batch) for batch in epoch] == [8] * 6 + [2]
        for batch in epoch[:6]:
            assert sum(value >= 1000 for value in batch) == 2
        values = [value for batch in epoch for value in batch]
        assert all(value < 41 or (value >= 1000 and value % 2 == 0) for value in values)


def test_another_source_changes_no_sample_of_this_one() -> None:
    def web(parts: dict[str, Any]) -> list[float]:
        (epoch,) = epochs(ps.mix(parts, samples=400).batch(8), 1)
        return [value for batch in epoch for value in batch if value < 100][:40]

    alone = web({"code": (codes(), 1), "web": (webs(), 1)})
    other = ps.from_dataset(np.full(99, 300.0))
    assert sorted(alone) == sorted(web({"web": (webs(), 1), "b": (other, 1), "code": (codes(), 2)}))


def test_stages_below_the_mix_apply_to_all_and_draw_other_numbers() -> None:
    twice = mixture().map(noise).batch(50)
    values = [value for epoch in epochs(twice, 1) for batch in epoch for value in batch]
    fractions = [value - int(value) for value in values if value < 100]
    assert len(set(fractions)) == len(fractions)
    # The two maps of a sample draw different numbers: their sum is seldom an even multiple.
    once = {value for e in epochs(mixture().batch(50), 1) for b in e for value in b if value < 100}
    drawn = sorted(value % 1 for value in once)
    assert not np.allclose(sorted(f % 1 for f in fractions), [2 * d % 1 for d in drawn])


def test_a_resume_at_any_batch_with_other_workers_and_another_world() -> None:
    pipeline = mixture(samples=48).batch(4)
    expected = epochs(pipeline, 3)
    for stop_at in (0, 1, 5, 12):
        with pipeline.loader(workers=0, seed=4) as loader:
            for _ in loader:
                pass
            second = iter(loader)
            seen = [next(second).tolist() for _ in range(stop_at)]
            state = loader.state_dict()
        with pipeline.loader(workers=2, kind="threads", seed=4) as again:
            again.load_state_dict(state)
            assert seen + [batch.tolist() for batch in again] == expected[1]
            assert [batch.tolist() for batch in again] == expected[2]
        rest: list[float] = []
        for rank in range(3):
            with pipeline.loader(workers=0, seed=4, rank=rank, world=3, tail="drop") as part:
                part.load_state_dict(state)
                rest += [value for batch in part for value in batch.tolist()]
        left = {value for batch in expected[1][stop_at:] for value in batch}
        assert set(rest) <= left
        assert len(left) - len(set(rest)) < 3


def test_a_checkpoint_with_other_weights_is_refused() -> None:
    with mixture().batch(4).loader(workers=0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = ps.mix({"web": (webs(), 2), "code": (codes(), 1)}).batch(4)
    with (
        other.loader(workers=0) as loader,
        pytest.raises(StateError, match="order was 'shuffled, mixed"),
    ):
        loader.load_state_dict(state)


def test_statistics_by_source() -> None:
    with mixture().batch(10).loader(workers=0) as loader:
        next(iter(loader))
        stats = loader.stats()
        assert [(p.name, p.share, p.samples) for p in stats.mix] == [
            ("web", 0.75, 8),
            ("code", 0.25, 2),
        ]
        assert [p.passes for p in stats.mix] == [8 / 40, 2 / 10]
        stages = {stage.name: stage.samples for stage in stats.stages}
        assert stages == {"source": 10, "web: noise": 8, "code: doubled": 2}
        assert "mix        web: 8 samples in this epoch (75.0% by weight), 0.20 passes" in str(
            stats
        )


def test_cache_refurbish_and_echo_below_a_mix() -> None:
    fixed = ps.mix({"a": (ps.from_dataset(np.arange(9.0)), 2), "b": (codes(), 1)}, samples=30)
    cached = fixed.cache("1MB").map(noise).batch(6)
    assert epochs(cached, 3) == epochs(fixed.map(noise).batch(6), 3)
    with cached.loader(workers=0) as loader:
        for _ in range(2):
            list(loader)
        cache = loader.stats().caches[0]
        assert (cache.misses, cache.hits) == (19, 41)
    reused = mixture().refurbish(2).map(noise).batch(8)
    assert epochs(reused, 4) == epochs(reused, 4, workers=2, kind="threads")
    echoed = mixture().echo(2).map(noise).batch(8)
    assert [len(epoch) for epoch in epochs(echoed, 2)] == [13, 13]


def test_a_reservoir_reads_the_shards_of_each_source() -> None:
    numbers = packed().map(lambda pair: float(pair[1]), random=False)
    reservoir = ps.Reservoir(window=12)
    with pytest.raises(PipelineError, match="DatasetSource, which has no shards"):
        ps.mix({"a": (numbers, 1), "b": (codes(), 1)}).batch(4).loader(order=reservoir)
    order = ps.Weighted([1.0] * 10)
    pipeline = ps.mix({"shards": (numbers, 1), "code": (codes(), 1, order)}, samples=106)
    (epoch,) = epochs(pipeline.batch(2), 1, order=reservoir)
    mine = [value for batch in epoch for value in batch if value < 100]
    assert sorted(mine) == list(range(53))
    # Samples come in the sequence of their shards, apart from the window of 12.
    assert len({int(value) // 9 for value in mine[:12]}) <= 3


class _Announced:
    """Stands for the way of a source to its store."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.forgotten = 0

    def expect(self, indices: Iterable[int]) -> None:
        self.samples += indices

    def forget(self) -> None:
        self.forgotten += 1


def test_each_source_fetches_its_samples_ahead_in_the_order_of_the_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    web, code = ps.from_dataset(np.arange(40)), ps.from_dataset(np.arange(1000, 1010))
    mixed = ps.mix({"web": (web, 3), "code": (code, 1)})
    assert isinstance(mixed.source, MixSource)
    assert mixed.source.objects is None
    ways = [_Announced(), _Announced()]
    for source, way in zip(mixed.source.sources, ways, strict=True):
        # A class for each: objects is a property.
        kind = type("Fetched", (type(source),), {"objects": way})
        monkeypatch.setattr(source, "__class__", kind)
    with mixed.batch(5).loader(workers=0, seed=1) as loader:
        drawn = np.concatenate(list(loader))
    assert ways[0].samples[: (drawn < 1000).sum()] == drawn[drawn < 1000].tolist()
    assert ways[1].samples[: (drawn >= 1000).sum()] == (drawn[drawn >= 1000] - 1000).tolist()
    assert all(way.forgotten for way in ways)


def test_jobs_that_share_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = mixture().batch(8)
    expected = epochs(pipeline)
    received: dict[int, Any] = {}

    def run(number: int) -> None:
        received[number] = epochs(pipeline, workers="auto", kind="threads", share="m")

    def run_rank(rank: int) -> None:
        options: Any = {"workers": "auto", "kind": "threads", "share": "r", "world": 2}
        received[rank] = epochs(pipeline, rank=rank, **options)

    with own_node(tmp_path, monkeypatch):
        for target in (run, run_rank):
            threads = [threading.Thread(target=target, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if target is run:
                assert received == {0: expected, 1: expected}
        # Within the node's directory, where these loaders publish their status.
        alone = {rank: epochs(pipeline, rank=rank, world=2) for rank in range(2)}
    assert received == alone


def test_failures_name_the_source() -> None:
    def fail(value: float) -> float:
        raise ValueError(f"no {value}")

    bad = ps.mix({"a": (webs(), 1), "b": (codes().map(fail, random=False), 1)}).batch(4)
    with pytest.raises(
        SampleError, match=r"b: sample \d of ndarray \(index 4\d\) failed in b: fail"
    ):
        epochs(bad, 1)
    ragged = ps.mix(
        {"a": (ps.from_dataset([np.zeros(3)] * 4), 1), "b": (ps.from_dataset([np.zeros(5)] * 4), 1)}
    )
    with pytest.raises(ShapeError, match=r"(a|b): sample \d of list .*has \(\d,\) \((a|b): sample"):
        epochs(ragged.batch(4), 1)


def test_mistakes_are_refused_when_the_mix_is_made() -> None:
    one = ps.from_dataset(np.arange(4.0))
    images = ps.from_files(["x.jpg"]).map(ps.image.decode())
    small, large = (images.map(ps.image.center_crop(size)) for size in (32, 64))
    for parts, message in (
        ({}, "Give a dict of the sources"),
        ({"a": one}, "Give a tuple"),
        ({"a": ([1.0], 1)}, "got list as the pipeline of 'a'"),
        ({"a": (one.batch(2), 1)}, r"'a' in mix\(\) has a batch\(\)"),
        ({"a": (one.cache("1MB"), 1)}, r"has a cache\(\).*ps.mix\(...\).cache\(...\)"),
        ({"a": (ps.from_dataset(lambda: iter([1])), 1)}, "'a' in mix.. is a stream"),
        ({"a": (ps.mix({"b": (one, 1)}), 1)}, "is a mix itself"),
        ({"a": (one, -1)}, "weight of 'a' in epoch 0 is -1"),
        ({"a": (one, [])}, "weights of 'a' in mix.. are empty"),
        ({"s": (small, 1), "l": (large, 1)}, r"'s' in uint8 \(32, 32, 3\), 'l' in uint8 \(64"),
    ):
        with pytest.raises(PipelineError, match=message):
            ps.mix(parts)  # type: ignore[arg-type]
