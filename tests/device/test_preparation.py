"""CPU workers and a device prepare each batch together: the same bits, whatever happens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock as ps
import penstock.torch
from penstock.device import choose, delivery, pool, shared_schedule
from penstock.device.contract import StreamName
from penstock.device.fake import FakeDevice
from penstock.errors import PipelineError, SampleError
from penstock.loader import Loader
from penstock.pipeline import Pipeline
from tests.support.device_work import Shift, ShiftWork, pictures, shifted

COUNT, BATCH = 60, 16
SEED = 5


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    device = FakeDevice()
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield device
    device.close()
    assert device.faults == []
    if device.registered:
        gc.collect()  # errors refer to the memory of batches
    assert device.registered == {}, "memory was unmapped while it was registered"
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"penstock-device", "penstock-ahead"}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ShiftWork:
    made = ShiftWork(SEED)
    monkeypatch.setattr(shared_schedule, "FORESEES", False)
    monkeypatch.setattr(choose, "find_work", lambda road, **_: made)
    return made


def plain(batch: Any) -> Any:
    images, labels = batch
    return images.cpu().numpy().tobytes(), tuple(images.shape), labels.tolist()


def together(pipeline: Pipeline | None = None, **options: Any) -> Loader:
    options = {"workers": 2, "kind": "threads", "seed": SEED, "tiny_batch": 2, **options}
    pipeline = pipeline or shifted(COUNT, BATCH)
    return penstock.torch.loader(pipeline, device="cuda", device_prep=True, **options)


def expected(pipeline: Pipeline | None = None, epochs: int = 2, **options: Any) -> list[Any]:
    pipeline = pipeline or shifted(COUNT, BATCH)
    with penstock.torch.loader(pipeline, workers=0, seed=SEED, **options) as loader:
        return [plain(batch) for _ in range(epochs) for batch in loader]


def learnt(t: int, mode: str = "spatial") -> dict[str, Any]:
    """The state of a cooperation that learns no more: more than ``t`` is the device's alone."""
    return {"t": t, "frozen": True, "mode": mode, "decided": True, "ahead": 2}


ALL = 1000
"""A threshold that gives the device everything; ``-ALL`` gives it nothing."""


def begun(loader: Loader, state: Any) -> Loader:
    """A loader that begins with what was learnt before."""
    loader.load_state_dict({**loader.state_dict(), "device": state})
    return loader


# The same bits.


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mode", ["spatial", "temporal"])
@pytest.mark.parametrize("t", [-ALL, -2, 0, 3, ALL])
def test_batches_are_those_of_the_cpu_alone_with_any_split(
    fake: FakeDevice, work: ShiftWork, t: int, mode: str, workers: int
) -> None:
    with begun(together(workers=workers), learnt(t, mode)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        device = loader.stats().device
    assert found == expected()
    assert device is not None
    # The sample that shows the layout of batches is prepared by the CPU.
    assert device.samples + device.cpu_samples == 2 * COUNT - 1
    if abs(t) == ALL:
        assert device.samples == (2 * COUNT - 1 if t == ALL else 0)
    assert (device.threshold, device.mode, device.lost) == (t, mode, "")


@pytest.mark.parametrize("tiny_batch", [1, 5, "auto"])
def test_batches_are_those_of_the_cpu_alone_while_it_learns(
    fake: FakeDevice, work: ShiftWork, tiny_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_schedule, "FORESEES", True)
    with together(tiny_batch=tiny_batch) as loader:
        found = [plain(batch) for _ in range(6) for batch in loader]
        device = loader.stats().device
        state = loader.state_dict()
    assert found == expected(epochs=6)
    assert device is not None
    assert device.decided, "the trial takes 16 batches"
    assert state["device"]["mode"] == device.mode


def test_the_compiled_road_is_not_needed(fake: FakeDevice, work: ShiftWork) -> None:
    data = [{"image": image, "name": f"n{i}"} for image, i in pictures(20)]
    pipeline = ps.from_dataset(data, random=False).map(Shift()).batch(8)
    with begun(together(pipeline), learnt(ALL)) as loader:
        found = [(batch["image"].tolist(), batch["name"]) for batch in loader]
    with penstock.torch.loader(pipeline, workers=0, seed=SEED) as alone:
        assert found == [(batch["image"].tolist(), batch["name"]) for batch in alone]


def test_a_cache_above_is_filled_and_hit_as_by_the_cpu_alone(
    fake: FakeDevice, work: ShiftWork
) -> None:
    work.above = 1
    pipeline = ps.from_dataset(pictures(COUNT), random=False).cache("1MB").map(Shift()).batch(BATCH)

    def counted(loader: Loader) -> Any:
        batches = [plain(batch) for _ in range(3) for batch in loader]
        (cache,) = loader.stats().caches
        stages = [(stage.name, stage.samples) for stage in loader.stats().stages]
        return batches, (cache.hits, cache.misses, cache.admitted, cache.used), stages

    with begun(together(pipeline), learnt(3)) as loader:
        found = counted(loader)
        device = loader.stats().device
    with penstock.torch.loader(pipeline, workers=2, kind="threads", seed=SEED) as alone:
        assert found == counted(alone)
    assert device is not None
    assert device.samples > 0


def test_samples_that_the_work_refuses_are_prepared_by_the_cpu(
    fake: FakeDevice, work: ShiftWork
) -> None:
    work.refuse = frozenset(range(0, COUNT, 7))
    with begun(together(tiny_batch=1), learnt(ALL)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        device = loader.stats().device
    assert found == expected()
    assert device is not None
    assert work.refuse.isdisjoint(work.packed)
    assert device.cpu_samples >= 2 * len(work.refuse) - 1
    assert device.samples > 0


def fails_on_some(sample: Any) -> Any:
    if sample[1] % 11 == 3:
        raise ValueError("a bad sample")
    return sample


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("t", [2, ALL])
def test_bad_samples_are_skipped_or_substituted_as_by_the_cpu_alone(
    fake: FakeDevice, work: ShiftWork, on_error: str, t: int
) -> None:
    work.above, work.ordinal = 1, 1
    data = ps.from_dataset(pictures(COUNT), random=False)
    pipeline = data.map(fails_on_some, random=False).map(Shift()).batch(BATCH)
    with begun(together(pipeline, on_error=on_error), learnt(t)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        bad = sorted(sample.index for sample in loader.stats().bad_samples)
        device = loader.stats().device
    assert found == expected(pipeline, on_error=on_error)
    assert bad == sorted(2 * [i for i in range(COUNT) if i % 11 == 3])
    assert device is not None
    assert device.samples > 0


def test_a_bad_sample_is_an_error_that_names_it(fake: FakeDevice, work: ShiftWork) -> None:
    work.above, work.ordinal = 1, 1
    data = ps.from_dataset(pictures(COUNT), random=False)
    pipeline = data.map(fails_on_some, random=False).map(Shift()).batch(BATCH)
    with (
        begun(together(pipeline), learnt(ALL)) as loader,
        pytest.raises(SampleError, match="failed in fails_on_some: ValueError: a bad sample"),
    ):
        list(loader)


# Resuming.


@pytest.mark.parametrize("resumes_with_device", [True, False])
def test_a_checkpoint_goes_on_with_and_without_the_device(
    fake: FakeDevice, work: ShiftWork, resumes_with_device: bool
) -> None:
    def alone() -> Loader:
        return penstock.torch.loader(shifted(COUNT, BATCH), workers=2, kind="threads", seed=SEED)

    first, second = (alone(), together()) if resumes_with_device else (together(), alone())
    with first, second:
        epoch = iter(first)
        found = [plain(next(epoch)) for _ in range(3)]
        state = first.state_dict()
        assert ("device" in state) is not resumes_with_device
        second.load_state_dict(state)
        found += [plain(batch) for batch in second] + [plain(batch) for batch in second]
    assert found == expected()


def test_a_damaged_state_of_the_device_is_a_warning(
    fake: FakeDevice, work: ShiftWork, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(together(), {"t": "many"}) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
    assert found == expected()
    (record,) = caplog.records
    assert "affects speed only" in record.message


def test_an_epoch_that_is_left_early_leaves_nothing_behind(
    fake: FakeDevice, work: ShiftWork
) -> None:
    with begun(together(), learnt(ALL)) as loader:
        for _ in range(3):
            next(iter(loader))
        found = [plain(batch) for batch in loader]
    assert found == expected(epochs=4)[12:]


# A device that fails.


def test_a_device_that_fails_is_a_warning_and_the_cpu_goes_on(
    fake: FakeDevice, work: ShiftWork, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        if work.runs == 6:  # the first is the rehearsal
            raise RuntimeError("an illegal memory access")

    work.before_run = fail
    with begun(together(), learnt(ALL)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        device = loader.stats().device
    assert found == expected()
    assert device is not None
    assert device.lost == "RuntimeError: an illegal memory access"
    assert device.again > 0
    (record,) = caplog.records
    assert "fake:0 prepares no more samples: RuntimeError: an illegal" in record.message


def test_a_device_that_fails_before_the_first_batch_is_a_warning(
    fake: FakeDevice, work: ShiftWork, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    work.before_run = fail
    with begun(together(), learnt(ALL)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
    assert found == expected()
    (record,) = caplog.records
    assert "no such kernel" in record.message


def test_a_device_that_does_not_answer_is_given_up(
    fake: FakeDevice,
    work: ShiftWork,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.0)

    def stall() -> None:
        if work.runs == 4:
            fake.pause("prep")

    work.before_run = stall
    with begun(together(), learnt(ALL)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        device = loader.stats().device
        fake.go_on()  # what it does now must not get into a batch
    assert found == expected()
    assert device is not None
    assert "has not finished a task for 0 seconds" in device.lost
    assert len(caplog.records) == 1


def test_no_memory_on_the_device_is_a_warning_and_the_cpu_goes_on(
    fake: FakeDevice,
    work: ShiftWork,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate, count = fake.allocate, iter(range(1000))

    def limited(shape: Any, dtype: torch.dtype, stream: StreamName = "copy") -> torch.Tensor:
        # Two buffers and the rows of the rehearsal come first, then the rows of batches.
        if next(count) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(shape, dtype, stream)

    monkeypatch.setattr(fake, "allocate", limited)
    with begun(together(), learnt(ALL)) as loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        device = loader.stats().device
    assert found == expected()
    assert device is not None
    assert device.lost == "OutOfMemoryError: out of memory"
    (record,) = caplog.records
    assert "batches are the same" in record.message


# Memory.


@pytest.mark.parametrize("mode", ["spatial", "temporal"])
def test_memory_on_the_device_is_bounded_and_steady(
    fake: FakeDevice, work: ShiftWork, mode: str
) -> None:
    row = 4 * 5 * 3 + 8  # a picture, and its number
    epochs, ahead = 9, 6
    with begun(together(prefetch=8), learnt(ALL, mode)) as loader:
        for _ in range(epochs):
            batches = sum(1 for _ in loader)
        device = loader.stats().device
        # Two buffers are allocated, and then nothing but batches: their pictures and their numbers.
        # On a busy machine, all batches that may be ahead of the loop are there already.
        assert 0 <= fake.allocations - 2 - 2 * epochs * batches <= 2 * ahead
    assert device is not None
    # Rows of three batches are prepared at once; three more are delivered, and the loop has one.
    assert fake.peak <= device.buffers + (ahead + 1) * BATCH * row
    assert fake.memory().in_use <= BATCH * row


# The choice.


def test_a_loader_says_who_prepares_its_samples(fake: FakeDevice, work: ShiftWork) -> None:
    with together() as loader:
        assert repr(loader).endswith(", cuda prepares a share of each batch (shift)>")
        assert "device      cuda prepares a share of each batch (shift)" in loader.explain()
        assert len(list(loader)) == 4
        assert "% of the samples (" in str(loader.stats())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 2, "kind": "processes"}, "the workers are not threads of this process"),
        ({"workers": 0}, "the workers are not threads of this process"),
    ],
)
def test_a_loader_says_why_the_device_prepares_nothing(
    fake: FakeDevice, work: ShiftWork, options: Any, why: str
) -> None:
    def made(device_prep: Any) -> Loader:
        return penstock.torch.loader(
            shifted(COUNT, BATCH), device="cuda", device_prep=device_prep, seed=SEED, **options
        )

    with made("auto") as loader:
        assert f"the CPU alone prepares samples: {why}" in repr(loader)
        if not options["workers"]:
            assert [plain(batch) for batch in loader] == expected(epochs=1)
        assert loader.stats().device is None
    with pytest.raises(PipelineError, match=f"device_prep=True, but {why}"):
        made(True)


@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        (shifted(8, 4).echo(2), "repeats whole batches"),
        (ps.from_dataset(pictures(8)).batch(4, collate=list), "made by a collate function"),
    ],
)
def test_pipelines_whose_batches_cannot_be_shared(
    fake: FakeDevice, work: ShiftWork, pipeline: Pipeline, why: str
) -> None:
    with pytest.raises(PipelineError, match=why):
        together(pipeline)


@pytest.mark.parametrize("device_prep", ["always", 1, None])
def test_a_wrong_device_prep_is_refused(device_prep: Any) -> None:
    with pytest.raises(PipelineError, match="device_prep is"):
        penstock.torch.loader(shifted(8, 4), device_prep=device_prep)


def test_preparation_without_a_device_is_refused() -> None:
    with pytest.raises(PipelineError, match="no accelerator"):
        penstock.torch.loader(shifted(8, 4), device="cpu", device_prep=True)
