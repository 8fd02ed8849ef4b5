"""Profiles: time is charged to the stage that spent it, and the user's state is not changed."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import cli, native
from penstock.diagnose.profile import Profile, StageCost
from penstock.diagnose.profile.measure import measure
from penstock.diagnose.profile.probes import Clocks
from penstock.errors import PenstockError, PipelineError, SampleError
from penstock.image import kernel, partial
from penstock.image.codec import Decode
from penstock.image.geometry import RandomFlip, RandomResizedCrop
from penstock.operation import Operation
from penstock.pipeline import Pipeline
from penstock.source import FolderSource, Source


class Time:
    """Clocks that advance only when a test spends time."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.cpu = 0.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall, lambda: self.cpu)

    def spend(self, ms: float, cpu: float | None = None) -> None:
        self.wall += ms / 1e3
        self.cpu += (ms if cpu is None else cpu) / 1e3

    def takes(self, ms: float, name: str = "", cpu: float | None = None) -> Callable[[Any], Any]:
        def work(value: Any) -> Any:
            self.spend(ms, cpu)
            return value

        work.__name__ = name or f"takes_{ms}"
        return work


class Slow(Source):
    """Samples that take time to read."""

    threadsafe = True

    def __init__(self, time: Time, ms: float, cpu: float, count: int = 40) -> None:
        self.time, self.ms, self.cpu, self.count = time, ms, cpu, count
        self.read_indices: list[int] = []

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Any) -> list[Any]:
        self.read_indices += indices
        self.time.spend(self.ms * len(indices), self.cpu * len(indices))
        return [np.full(3, index, np.float32) for index in indices]


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for number in range(24):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        picture = cv2.resize(coarse, (80 + number, 60), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(folder / f"{number:02}.jpg"), picture)
    return root


def ms(rows: tuple[StageCost, ...]) -> dict[str, float]:
    return {row.name: round(row.ms, 6) for row in rows}


def by_name(rows: tuple[StageCost, ...], name: str) -> StageCost:
    return next(row for row in rows if row.name == name)


# Attribution


def test_every_stage_is_charged_the_time_it_spent(time: Time) -> None:
    pipeline = (
        Pipeline(Slow(time, 2.0, 0.5))
        .map(time.takes(3.0, "crop"), random=False)
        .map(time.takes(5.0, "blur", cpu=1.0))
    )
    profile = measure(pipeline, clocks=time.clocks)
    assert ms(profile.written) == {"source": 2.0, "crop": 3.0, "blur": 5.0}
    assert [round(row.cpu_ms, 6) for row in profile.rows] == [0.5, 3.0, 1.0]
    assert [round(row.share, 6) for row in profile.rows] == [0.2, 0.3, 0.5]
    assert [row.samples for row in profile.rows] == [40, 40, 40]
    assert [row.random for row in profile.rows] == [False, False, True]
    assert profile.samples == 40
    assert profile.total_written == pytest.approx(10.0)
    assert profile.per_second == pytest.approx(100.0)
    assert profile.slowest.name == "blur"


def test_fast_samples_run_in_groups_and_are_charged_correctly(time: Time) -> None:
    pipeline = (
        Pipeline(Slow(time, 0.01, 0.01, count=500))
        .map(time.takes(0.03, "crop"), random=False)
        .map(time.takes(0.02, "blur"), random=False)
    )
    profile = measure(pipeline, clocks=time.clocks)
    assert ms(profile.rows) == {"source": 0.01, "crop": 0.03, "blur": 0.02}
    assert profile.samples == 256


@given(st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=6))
def test_rows_add_up_for_any_cost_of_the_stages(costs: list[int]) -> None:
    time = Time()
    pipeline = Pipeline(Slow(time, 1.0, 1.0, count=9))
    for number, cost in enumerate(costs):
        pipeline = pipeline.map(time.takes(cost / 8), random=False, name=f"m{number}")
    profile = measure(pipeline, clocks=time.clocks)
    assert [row.ms for row in profile.rows] == pytest.approx([1.0, *(c / 8 for c in costs)])
    assert sum(row.share for row in profile.rows) == pytest.approx(1.0)


def test_the_slow_first_sample_belongs_to_the_warm_up(time: Time) -> None:
    calls: list[int] = []

    def loads_something(value: Any) -> Any:
        time.spend(1.0 if calls else 900.0)
        calls.append(1)
        return value

    profile = measure(
        Pipeline(Slow(time, 1.0, 1.0)).map(loads_something, random=False), clocks=time.clocks
    )
    assert ms(profile.rows)["loads_something"] == 1.0


def test_one_disturbed_round_does_not_change_the_result(time: Time) -> None:
    calls: list[int] = []

    def disturbed(value: Any) -> Any:
        calls.append(1)
        time.spend(500.0 if len(calls) == 20 else 1.0)
        return value

    profile = measure(
        Pipeline(Slow(time, 1.0, 1.0)).map(disturbed, random=False), clocks=time.clocks
    )
    assert ms(profile.rows)["disturbed"] == 1.0


def test_a_profile_ends_after_the_given_seconds(time: Time) -> None:
    source = Slow(time, 1000.0, 1000.0, count=500)
    profile = measure(Pipeline(source), seconds=10.0, clocks=time.clocks)
    assert 4 <= profile.samples <= 10
    assert time.wall <= 15.0


def test_samples_come_in_shuffled_order(time: Time) -> None:
    source = Slow(time, 1.0, 1.0, count=1000)
    measure(Pipeline(source), samples=20, seed=3, clocks=time.clocks)
    seen = source.read_indices[8:]
    assert len(set(seen)) == 20
    assert seen != sorted(seen)
    again = Slow(time, 1.0, 1.0, count=1000)
    measure(Pipeline(again), samples=20, seed=3, clocks=time.clocks)
    assert again.read_indices == source.read_indices


def test_a_batch_is_charged_for_its_collate(time: Time) -> None:
    def collate(samples: list[Any]) -> Any:
        time.spend(2.0 * len(samples))
        return np.stack(samples)

    pipeline = Pipeline(Slow(time, 1.0, 1.0)).batch(4, collate=collate)
    row = measure(pipeline, clocks=time.clocks).rows[-1]
    assert (row.name, row.kind, round(row.ms, 6)) == ("batch", "batch", 2.0)
    assert row.leaves == "float32 4x3"
    assert row.needs_process == "collate may hold the GIL"


def test_a_stacked_batch_is_described_before_it_is_full(time: Time) -> None:
    row = measure(Pipeline(Slow(time, 1.0, 1.0)).batch(512), clocks=time.clocks).rows[-1]
    assert (row.leaves, row.nbytes) == ("float32 512x3", 512 * 12)


def test_the_last_operation_writes_into_the_row_of_its_sample(time: Time) -> None:
    rows: list[Any] = []

    class Writes(Operation):
        def output(self, spec: Any) -> Any:
            return spec

        def apply(self, value: Any, params: Any) -> Any:
            return value * 2

        def apply_to(self, value: Any, params: Any, out: Any) -> Any:
            if out is None:
                return self.apply(value, params)
            rows.append(out)
            return np.multiply(value, 2, out=out)

    pipeline = Pipeline(Slow(time, 1.0, 1.0)).map(Writes())
    profile = measure(pipeline.batch(4), clocks=time.clocks)
    # All samples but the first, which determines the layout.
    assert len(rows) == 8 + 40 - 1
    assert profile.rows[1].leaves == "float32 3"
    rows.clear()
    measure(pipeline.batch(4, collate=list), clocks=time.clocks)
    assert rows == []


def test_the_output_of_each_stage_is_described(photos: Path) -> None:
    pipeline = ps.from_folder(photos).map(ps.image.decode()).map(ps.image.center_crop(32)).batch(6)
    rows = pipeline.profile(samples=12).written
    assert [row.leaves for row in rows] == [
        "bytes",
        "uint8 60x?x3",
        "uint8 32x32x3",
        "uint8 6x32x32x3",
    ]
    assert rows[2].nbytes == 32 * 32 * 3
    assert all(row.needs_process == "" for row in rows)


# Fusing


@pytest.fixture
def priced(time: Time, monkeypatch: pytest.MonkeyPatch) -> Time:
    """Decode, crop and flip take 4, 2 and 1 ms; all three in one step take 3 ms."""

    def pricing(cost: float, result: Any) -> Callable[..., Any]:
        def apply(self: Any, value: Any, params: Any, out: Any = None) -> Any:
            time.spend(cost)
            return result

        return apply

    picture = np.zeros((8, 8, 3), np.uint8)
    for kind, cost in ((RandomResizedCrop, 2.0), (RandomFlip, 1.0)):
        monkeypatch.setattr(kind, "apply", pricing(cost, picture))
        monkeypatch.setattr(kind, "apply_to", pricing(cost, picture))
    monkeypatch.setattr(Decode, "apply", pricing(4.0, np.zeros((60, 80, 3), np.uint8)))
    monkeypatch.setattr(native, "kernel_available", lambda: True)
    monkeypatch.setattr(kernel, "size", lambda data: (60, 80, 3))
    monkeypatch.setattr(partial.JpegFile, "size", (60, 80, 3))
    monkeypatch.setattr(partial, "region", lambda *_, **__: time.spend(3.0))

    def regions(requests: Sequence[Any], marks: Any = None) -> list[None]:
        time.spend(3.0 * len(requests))
        return [None] * len(requests)

    monkeypatch.setattr(kernel, "regions", regions)
    return time


def fusible(photos: Path) -> Pipeline:
    return (
        ps.from_folder(photos)
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(8))
        .map(ps.image.random_flip())
    )


def test_the_saving_is_the_difference_of_the_two_plans(priced: Time, photos: Path) -> None:
    pipeline = fusible(photos).map(priced.takes(5.0, "own"), on=0, random=False).batch(6)
    profile = measure(pipeline, clocks=priced.clocks)
    assert ms(profile.written) == {
        "source": 0.0,
        "decode": 4.0,
        "random_resized_crop": 2.0,
        "random_flip": 1.0,
        "own": 5.0,
        "batch": 0.0,
    }
    assert ms(profile.fused) == {
        "source": 0.0,
        "decode+random_resized_crop+random_flip": 3.0,
        "own": 5.0,
        "batch": 0.0,
    }
    assert profile.rows == profile.fused
    assert profile.total_written == pytest.approx(12.0)
    assert profile.total_fused == pytest.approx(8.0)
    assert profile.saved == pytest.approx(4.0)
    shown = str(profile)
    assert "fused: saves 4.000 ms a sample (33%)" in shown
    assert "as written" in shown
    assert "as it runs" in shown
    step = by_name(profile.fused, "decode+random_resized_crop+random_flip")
    assert (step.kind, step.random) == ("fused", True)


def test_both_plans_are_charged_the_cost_of_the_first_reading(
    priced: Time, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = fusible(photos)
    original = FolderSource.read
    seen: set[int] = set()

    def read(self: FolderSource, indices: Sequence[int]) -> list[Any]:
        priced.spend(10.0 * len(set(indices) - seen))  # the disk is read once per sample
        seen.update(indices)
        return original(self, indices)

    monkeypatch.setattr(FolderSource, "read", read)
    profile = measure(pipeline, clocks=priced.clocks)
    # Eight of the 24 samples were read in the warm-up, before anything was timed.
    assert ms(profile.written)["source"] == ms(profile.fused)["source"] == 10.0
    assert profile.saved == pytest.approx(4.0)


def test_a_pipeline_without_fused_steps_has_one_table(time: Time) -> None:
    profile = measure(Pipeline(Slow(time, 1.0, 1.0)).batch(4), clocks=time.clocks)
    assert [row.name for row in profile.fused] == [row.name for row in profile.written]
    assert profile.saved == 0
    assert "fused" not in str(profile)


def test_without_the_kernel_the_hint_says_why(
    priced: Time, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure(fusible(photos), clocks=priced.clocks).hint == ""
    monkeypatch.setattr(native, "kernel_available", lambda: False)
    monkeypatch.setattr(native, "why_no_kernel", lambda: "the kernel is not built.")
    profile = measure(fusible(photos), clocks=priced.clocks)
    assert profile.hint == "the compiled kernel would do this step faster: the kernel is not built."
    assert f"hint: {profile.hint}" in str(profile)


def test_a_fused_step_that_saves_nothing_gets_a_note(
    priced: Time, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(data: Any) -> Any:
        raise kernel.Unsupported("no JPEG")

    assert measure(fusible(photos), clocks=priced.clocks).notes == ()
    monkeypatch.setattr(kernel, "size", unsupported)
    profile = measure(fusible(photos), clocks=priced.clocks)
    assert profile.saved == pytest.approx(0.0)
    assert [note for note in profile.notes if "saved nothing here" in note]


def test_the_hint_names_a_map_between_decode_and_crop(priced: Time, photos: Path) -> None:
    pipeline = (
        ps.from_folder(photos)
        .map(ps.image.decode())
        .map(ps.image.random_flip())
        .map(ps.image.random_resized_crop(8))
    )
    profile = measure(pipeline, clocks=priced.clocks)
    assert [row.name for row in profile.fused] == [row.name for row in profile.written]
    assert "Here random_flip stands between them" in profile.hint


# Parts


def test_a_compose_is_timed_by_its_transforms_and_draws_the_same(
    time: Time, torchvision: Any
) -> None:
    drawn: list[float] = []

    def noise(value: Any) -> Any:
        time.spend(2.0)
        drawn.append(random.random())
        return value + drawn[-1]

    def shift(value: Any) -> Any:
        time.spend(6.0)
        return value + random.random()

    compose = torchvision.transforms.Compose([noise, shift, noise])
    numbers = ps.from_dataset(np.arange(8.0)).map(compose)
    expected = np.concatenate(list(numbers.batch(4).loader(workers=0, shuffle=False)))
    expected_draws = sorted(drawn)
    drawn.clear()
    seen: list[float] = []
    pipeline = numbers.map(seen.append, random=False)
    before = random.getstate()
    profile = measure(pipeline, clocks=time.clocks)
    assert random.getstate() == before
    row = by_name(profile.rows, "Compose")
    assert {part.name: round(part.ms, 6) for part in row.parts} == {
        "noise": 2.0,
        "shift": 6.0,
        "noise#2": 2.0,
    }
    assert sorted(set(seen)) == sorted(expected.tolist())
    assert sorted(set(drawn)) == sorted(set(expected_draws))
    assert row.needs_process == "may draw from the global generators"


def test_a_compose_class_of_the_user_is_not_taken_apart(time: Time) -> None:
    class Compose:
        transforms = (1, 2)

        def __call__(self, value: Any) -> Any:
            time.spend(1.0)
            return value

    profile = measure(ps.from_dataset(np.arange(8.0)).map(Compose()), clocks=time.clocks)
    assert by_name(profile.rows, "Compose").parts == ()


def test_the_compose_of_a_dataset_is_timed_in_a_copy(time: Time, torchvision: Any) -> None:
    class Numbers:
        def __init__(self) -> None:
            self.transform = torchvision.transforms.Compose(
                [time.takes(1.0, "open"), time.takes(3.0, "crop")]
            )

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            time.spend(2.0)
            return self.transform(float(index))

    dataset = Numbers()
    compose = dataset.transform
    profile = measure(ps.from_dataset(dataset), clocks=time.clocks)
    source = profile.rows[0]
    assert round(source.ms, 6) == 6.0
    assert {part.name: round(part.ms, 6) for part in source.parts} == {"open": 1.0, "crop": 3.0}
    assert dataset.transform is compose
    assert "Remove the transform and add its steps as maps" in profile.hint


def test_a_compose_of_pictures_and_labels_is_timed_too(time: Time, torchvision: Any) -> None:
    from torchvision.transforms import v2

    class Both(v2.Transform):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Any:
            time.spend(2.0)
            return inputs

    class Pairs:
        transform = v2.Compose([Both(), Both()])

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return self.transform(float(index), index)

    profile = measure(ps.from_dataset(Pairs()).batch(2), clocks=time.clocks)
    assert profile.bad == 0
    assert [(part.name, round(part.ms, 6)) for part in profile.rows[0].parts] == [
        ("Both", 2.0),
        ("Both#2", 2.0),
    ]


# Caches


def test_misses_and_hits_of_a_cache_are_timed_separately(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.store import LmdbStore

    get, put = LmdbStore.get_many, LmdbStore.put_many

    def slow_get(self: Any, keys: Any) -> Any:
        time.spend(0.5 * len(keys))
        return get(self, keys)

    def slow_put(self: Any, items: Any) -> Any:
        time.spend(1.0 * len(items))
        return put(self, items)

    monkeypatch.setattr(LmdbStore, "get_many", slow_get)
    monkeypatch.setattr(LmdbStore, "put_many", slow_put)
    pipeline = (
        Pipeline(Slow(time, 7.0, 7.0))
        .map(time.takes(2.0, "above"), random=False)
        .cache("1GB")
        .map(time.takes(4.0, "below"))
        .batch(4)
    )
    profile = measure(pipeline, clocks=time.clocks)
    assert ms(profile.rows) == {
        "source": 7.0,
        "above": 2.0,
        "cache": 1.5,
        "below": 4.0,
        "batch": 0.0,
    }
    row = by_name(profile.rows, "cache")
    assert row.hit_ms == pytest.approx(0.5)
    assert row.holds == 1.0
    assert profile.total_fused == pytest.approx(14.5)
    assert profile.total_cached == pytest.approx(4.5)
    assert "later epochs, all in the cache: 222 samples/s" in str(profile)


def test_warm_up_samples_are_removed_from_caches_before_measuring(time: Time) -> None:
    profile = measure(Pipeline(Slow(time, 7.0, 7.0, count=5)).cache("1MB"), clocks=time.clocks)
    assert ms(profile.rows)["source"] == 7.0


def test_a_cache_that_is_too_small_serves_the_share_that_fits(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 8.0, 8.0, count=100)).cache("1KB").batch(4)
    profile = measure(pipeline, clocks=time.clocks)
    holds = by_name(profile.rows, "cache").holds
    assert holds is not None
    assert 0 < holds < 0.2
    assert profile.total_cached == pytest.approx((1 - holds) * 8.0)


def test_the_lowest_cache_that_holds_a_sample_serves_it() -> None:
    def row(name: str, cost: float, **more: Any) -> StageCost:
        kind: Any = "cache" if more else "map"
        return StageCost(name, kind, cost, cost, 0.0, 1, **more)

    rows = (
        row("source", 10.0),
        row("cache", 1.0, hit_ms=0.5, holds=0.75),
        row("decode", 4.0),
        row("cache#2", 1.0, hit_ms=0.25, holds=0.5),
        row("flip", 2.0),
    )
    profile = Profile("it", 1, 1, rows, rows, 1, "none")
    # Half: a hit in the lower cache, then flip. A quarter: a hit in the upper cache. The rest runs
    # through all stages.
    expected = 0.5 * (0.25 + 2) + 0.25 * (0.5 + 4 + 1 + 2) + 0.25 * 18
    assert profile.total_cached == pytest.approx(expected)


def test_the_disk_cache_of_the_user_is_not_touched(
    time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    pipeline = Pipeline(Slow(time, 1.0, 1.0)).cache("1MB", where="disk").batch(4)
    profile = measure(pipeline, clocks=time.clocks)
    assert not (tmp_path / "kept").exists()
    assert any("measured in memory" in note for note in profile.notes)


# Bad samples


def failing(*bad: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if int(value[0]) in bad:
            raise ValueError(f"no good: {int(value[0])}")
        return value

    return check


def test_bad_samples_are_named_and_do_not_change_the_times(time: Time) -> None:
    pipeline = (
        Pipeline(Slow(time, 1.0, 1.0))
        .map(time.takes(2.0, "two"), random=False)
        .map(failing(3, 17), random=False)
    )
    profile = measure(pipeline, clocks=time.clocks)
    assert profile.bad == 2
    assert {(b.index, b.name, b.stage, b.error) for b in profile.bad_samples} == {
        (3, "sample 3", "check", "ValueError: no good: 3"),
        (17, "sample 17", "check", "ValueError: no good: 17"),
    }
    assert profile.samples == 38
    assert ms(profile.rows) == {"source": 1.0, "two": 2.0, "check": 0.0}
    assert "bad: 2 samples failed and were left out" in str(profile)
    assert "sample 17 in check: ValueError: no good: 17" in str(profile)


def test_a_bad_sample_in_a_group_of_fast_ones_is_found(time: Time) -> None:
    source = Slow(time, 0.001, 0.001, count=300)
    profile = measure(Pipeline(source).map(failing(*range(9)), random=False), clocks=time.clocks)
    assert profile.samples == 256 - profile.bad
    assert {sample.index for sample in profile.bad_samples} <= set(range(9))
    assert ms(profile.rows) == {"source": 0.001, "check": 0.0}


def test_it_is_an_error_if_all_samples_are_bad(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 1.0, 1.0)).map(failing(*range(40)), random=False)
    with pytest.raises(
        SampleError, match=r"tried 40 samples, and all of them failed.*no good"
    ) as caught:
        measure(pipeline, clocks=time.clocks)
    assert caught.value.stage == "check"


def test_samples_that_do_not_stack_get_a_note(time: Time) -> None:
    ragged = ps.from_dataset([np.zeros(n % 3 + 1) for n in range(30)])
    profile = measure(ragged.batch(4), clocks=time.clocks)
    assert [row.name for row in profile.rows] == ["source"]
    assert any("cannot stack these samples" in note for note in profile.notes)
    padded = measure(ragged.batch(4, pad=0), clocks=time.clocks)
    assert [row.name for row in padded.rows] == ["source", "batch"]
    assert padded.notes == ()


# Streams


def test_a_stream_is_read_from_its_start(time: Time) -> None:
    closed: list[int] = []

    def numbers() -> Iterator[Any]:
        try:
            for number in range(1000):
                time.spend(2.0)
                yield np.full(2, number)
        finally:
            closed.append(1)

    seen: list[int] = []

    def look(value: Any) -> Any:
        seen.append(int(value[0]))
        time.spend(1.0)
        return value

    profile = measure(
        ps.from_dataset(numbers).map(look, random=False).batch(4), samples=20, clocks=time.clocks
    )
    assert ms(profile.rows) == {"source": 2.0, "look": 1.0, "batch": 0.0}
    assert seen == [*range(8), *range(20)]
    assert len(closed) == 2
    assert profile.source == "samples (StreamSource)"


def test_a_short_stream_ends_the_profile(time: Time) -> None:
    profile = measure(ps.from_dataset(lambda: iter(range(5))), clocks=time.clocks)
    assert profile.samples == 5
    with pytest.raises(PipelineError, match="the stream is empty"):
        measure(ps.from_dataset(lambda: iter(())), clocks=time.clocks)


# Other data


def test_other_data_replaces_the_source_of_the_pipeline(photos: Path) -> None:
    pipeline = ps.from_folder(photos / "cat").map(ps.image.decode()).map(ps.image.center_crop(8))
    assert "of 12 samples (FolderSource)" in str(pipeline.profile(samples=4))
    for data, expected in (
        (photos, "24 samples (FolderSource)"),
        (str(photos / "dog"), "12 samples (FolderSource)"),
        (sorted((photos / "dog").iterdir())[:5], "5 samples (FilesSource)"),
        ([(photos / "dog" / "01.jpg").read_bytes()] * 3, "3 samples (DatasetSource)"),
        (ps.from_folder(photos), "24 samples (FolderSource)"),
    ):
        assert pipeline.profile(data, samples=4).source == expected


def test_files_get_a_label_if_the_pipeline_expects_one(photos: Path) -> None:
    pipeline = ps.from_folder(photos).map(lambda pair: pair[0][:2] + bytes(pair[1]), random=False)
    for data in (photos / "cat", list((photos / "cat").iterdir())):
        assert pipeline.profile(data, samples=4).bad == 0


@pytest.mark.parametrize("data", [7, 3.5, bytes(3), dict, {"a": 1}])
def test_data_of_the_wrong_type_is_refused(data: Any) -> None:
    with pytest.raises(PipelineError, match=r"profile\(\) got data=.*Give a folder"):
        ps.from_dataset(np.arange(4)).profile(data)


def test_data_that_does_not_fit_is_refused(photos: Path) -> None:
    pipeline = ps.from_dataset(np.zeros((4, 8, 8, 3), np.uint8)).map(ps.image.random_flip())
    with pytest.raises(PipelineError, match=r"does not fit the pipeline: .*Put decode\(\) above"):
        pipeline.profile(photos)
    cached = ps.from_dataset(np.arange(4)).cache("1MB")
    with pytest.raises(PipelineError, match="which is a stream"):
        cached.profile(lambda: iter(range(4)))


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"samples": True}, {"seconds": 0}, {"seconds": "long"}]
)
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match=rf"profile\(\) got {next(iter(options))}="):
        ps.from_dataset(np.arange(4)).profile(**options)


# Hints and notes


def test_the_hint_for_a_waiting_source_is_a_cache(time: Time) -> None:
    profile = measure(Pipeline(Slow(time, 9.0, 1.0)), clocks=time.clocks)
    assert profile.hint.startswith("reading waits for the disk or the network: put cache(...)")
    assert "480 B" in profile.hint


def test_the_hint_for_decoding_with_pil_is_decode(photos: Path) -> None:
    import io

    pil = pytest.importorskip("PIL.Image")
    pipeline = ps.from_folder(photos).map(
        lambda data: pil.open(io.BytesIO(data)).convert("RGB"), on=0, random=False, name="opening"
    )
    profile = pipeline.profile(samples=12)
    assert profile.rows[1].leaves == "PIL RGB 60x?"
    assert profile.hint.startswith("opening decodes with PIL")


def test_the_hint_names_a_map_that_holds_the_gil(time: Time) -> None:
    profile = measure(
        Pipeline(Slow(time, 1.0, 1.0)).map(time.takes(4.0, "mine"), random=False),
        clocks=time.clocks,
    )
    assert profile.hint.startswith("mine may hold the GIL, so the pipeline runs in processes")
    assert "processes (mine may hold the GIL)" in profile.workers
    assert "runs in" in str(profile)


def test_maps_that_wait_get_a_note(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 1.0, 1.0)).map(time.takes(4.0, "mine", cpu=1.0), random=False)
    profile = measure(pipeline, clocks=time.clocks)
    assert any("4.000 ms a sample and 1.000 ms of CPU" in note for note in profile.notes)


def test_the_repr_of_a_profile_is_its_table(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 2.0, 1.0)).map(time.takes(3.0, "three"), random=False).batch(2)
    profile = measure(pipeline, clocks=time.clocks)
    assert repr(profile) == str(profile)
    lines = repr(profile).splitlines()
    assert lines[0] == "40 of 40 samples (Slow), one thread, 8 rounds"
    assert lines[2].split()[:3] == ["stage", "ms/sample", "CPU"]
    assert lines[3].split()[:4] == ["source", "2.000", "1.000", "40%"]
    assert lines[6].split() == ["total", "5.000", "4.000"]


def test_a_notebook_shows_the_profile_as_an_escaped_html_table(priced: Time, photos: Path) -> None:
    pipeline = fusible(photos).map(priced.takes(1.0), on=0, random=False, name="<b>&").batch(6)
    profile = measure(pipeline, clocks=priced.clocks)
    page = profile._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert ">&lt;b&gt;&amp;</td>" in page
    assert "<b>" not in page
    assert ">&nbsp;&nbsp;+ random_flip</td>" in page
    assert ">4.000</td>" in page
    assert "fused: saves" in page


def test_a_profile_survives_pickling_and_comparison(time: Time) -> None:
    profile = measure(Pipeline(Slow(time, 2.0, 1.0)).batch(2), clocks=time.clocks)
    copied = pickle.loads(pickle.dumps(profile))
    assert copied == profile
    assert repr(copied) == repr(profile)


def test_json_has_the_rows_and_the_totals(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 2.0, 1.0)).map(time.takes(3.0, "three"), random=False).batch(2)
    profile = json.loads(measure(pipeline, clocks=time.clocks).to_json())
    assert profile["total_fused"] == pytest.approx(5.0)
    assert [row["name"] for row in profile["written"]] == ["source", "three", "batch"]
    assert profile["slowest"] == "three"
    free = json.loads(measure(ps.from_dataset([1, 2]), clocks=time.clocks).to_json())
    assert free["per_second"] is None


def test_a_profile_does_not_change_the_global_generators(time: Time) -> None:
    pipeline = Pipeline(Slow(time, 1.0, 1.0)).map(lambda x: x + np.random.random())
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    measure(pipeline, clocks=time.clocks)
    assert np.random.random() == expected


def test_an_operation_draws_the_same_random_numbers_as_in_training(time: Time) -> None:
    seen: dict[float, float] = {}

    class Noise(Operation):
        random = True

        def output(self, spec: Any) -> Any:
            return spec

        def draw(self, rng: np.random.Generator, shape: Any) -> float:
            return rng.random()

        def apply(self, value: Any, params: Any) -> Any:
            seen[float(value[0])] = params
            return value

    pipeline = Pipeline(Slow(time, 1.0, 1.0)).map(Noise())
    measure(pipeline, seed=9, clocks=time.clocks)
    profiled, seen = dict(seen), {}
    for _ in pipeline.batch(8).loader(workers=0, seed=9):
        pass
    assert profiled == seen


# The command


SCRIPT = """
import numpy as np
import penstock as ps
{more}
"""


def script(folder: Path, more: str) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(more=more))
    return str(path)


def test_the_command_profiles_the_only_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_it.py").write_text("def double(x):\n    return x * 2\n")
    path = script(
        tmp_path,
        "import sys\nfrom beside_it import double\nassert len(sys.argv) == 1\n"
        "train = ps.from_dataset(np.arange(30.0)).map(double, random=False).batch(4)\n"
        "loader = train.loader(workers=0)\n"
        "if __name__ == '__main__':\n    raise SystemExit(9)\n",
    )
    place = tmp_path / "costs.json"
    assert cli.main(["profile", path, "--samples", "20", "--json", str(place)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("20 of 30 samples (DatasetSource), one thread")
    assert "double" in shown.out
    assert shown.err == ""
    assert json.loads(place.read_text())["samples"] == 20


def test_the_command_prints_only_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "train = ps.from_dataset(np.arange(9.0)).batch(3)\n")
    assert cli.main(["profile", f"{path}:train", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 9


def test_the_command_reads_other_data(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "p = ps.from_dataset([b'']).map(ps.image.decode())\n")
    assert cli.main(["profile", path, "--data", str(photos), "--samples", "6"]) == 0
    assert "6 of 24 samples (FolderSource)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "name", "message"),
    [
        ("x = 1", "", "has no pipeline among its variables"),
        ("a = ps.from_dataset([1])\nb = a.batch(2)", "", "several pipelines. Choose one:"),
        ("a = ps.from_dataset([1])\nx = 1", ":x", "x in {path} is a int, not a pipeline"),
        ("a = ps.from_dataset([1])", ":b", "has no variable 'b'. Its pipelines: a."),
        ("raise SystemExit(3)", "", "exited (exit code 3)"),
        ("def (", "", "is not valid Python"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_file(
    more: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, more)
    assert cli.main(["profile", path + name]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message.format(path=path) in shown.err


def test_the_command_reports_a_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(tmp_path / "none.py:train")]) == 1
    assert "there is no file" in capsys.readouterr().err
    path = script(tmp_path, "a = ps.from_dataset([1])")
    assert cli.main(["profile", path, "--json", str(tmp_path / "no" / "where.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_missing_folder_is_a_penstock_error() -> None:
    with pytest.raises(PenstockError):
        ps.from_dataset(np.arange(4)).profile("nowhere")


# Reuse


@pytest.mark.parametrize("kind", ["refurbish", "echo"])
def test_a_stage_that_reuses_samples_has_misses_hits_and_a_share(kind: str) -> None:
    def noise(value: Any, rng: np.random.Generator) -> Any:
        return value + rng.random()

    pipeline = ps.from_dataset(np.zeros((64, 1000))).map(noise)
    pipeline = pipeline.refurbish(4) if kind == "refurbish" else pipeline.echo(4)
    profile = pipeline.map(noise).batch(8).profile(seconds=1)
    row = next(row for row in profile.rows if row.kind == kind)
    assert row.holds == 0.75
    assert row.hit_ms is not None
    assert row.hit_ms > 0
    assert profile.total_cached is not None
    assert f"with 75% from {kind}" in str(profile)
