"""``device=``: batches arrive on a device, ahead of the loop. The device is a fake one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock.device import delivery
from penstock.device.delivery import Delivery
from penstock.device.fake import FakeDevice
from penstock.device.rows import PartlyOnDevice
from penstock.device.shared_copy import UseShared
from penstock.errors import PipelineError
from penstock.order.plan import BatchKeys
from penstock.torch import DataLoader

ROWS, BYTES = 8, 8 * 100 * 8
DATA = np.random.default_rng(0).random((80, 100))
PIPELINE = ps.from_dataset(DATA, random=False).batch(ROWS)


POOLS: list[dict[str, Any]] = [
    {"workers": 0},
    {"workers": 2, "kind": "threads"},
    {"workers": 2, "kind": "processes"},
]


@pytest.mark.parametrize("options", POOLS, ids=str)
def test_batches_on_the_device_are_those_on_the_host(
    fake: FakeDevice, options: dict[str, Any]
) -> None:
    with penstock.torch.loader(PIPELINE, seed=3, **options) as plain:
        expected = [batch.tolist() for _ in range(3) for batch in plain]
    with penstock.torch.loader(PIPELINE, device="cuda", seed=3, **options) as loader:
        found = [batch.tolist() for _ in range(3) for batch in loader]
    assert found == expected
    assert fake.arrived == 30


@pytest.mark.parametrize("options", POOLS[1:], ids=str)
def test_the_memory_of_batches_is_registered_once(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    registered: list[int] = []
    copied: list[bool] = []
    register, copy = fake.register, fake.copy

    def counted_register(address: int, nbytes: int) -> Any:
        registered.append(address)
        return register(address, nbytes)

    def counted_copy(source: torch.Tensor) -> torch.Tensor:
        copied.append(fake.is_registered(source))
        return copy(source)

    monkeypatch.setattr(fake, "register", counted_register)
    monkeypatch.setattr(fake, "copy", counted_copy)
    with penstock.torch.loader(PIPELINE, device="cuda", **options) as loader:
        for _ in range(5):
            for batch in loader:
                del batch
    assert copied == [True] * 50
    assert 0 < len(registered) <= 8


def test_a_slot_goes_back_only_after_its_copy(fake: FakeDevice) -> None:
    fake.pause()
    release = threading.Timer(0.2, fake.go_on)
    release.start()
    with penstock.torch.loader(
        PIPELINE, device="cuda", workers=2, kind="threads", memory=3 * BYTES, shuffle=False
    ) as loader:
        found = torch.cat(list(loader))
    release.join()
    # The fake device reports host memory that is written during its copy (see ``fake``).
    assert found.tolist() == DATA.tolist()


def test_memory_on_the_device_is_bounded(fake: FakeDevice) -> None:
    with penstock.torch.loader(PIPELINE, device="cuda", workers=2, kind="threads") as loader:
        for _ in range(3):
            for batch in loader:
                assert fake.memory().in_use >= batch.nbytes
    # Two ahead, the one that the loop holds, and the next one, which it takes before it drops it.
    assert fake.peak <= 4 * BYTES


def test_a_device_without_room_ahead_gets_batches_when_the_loop_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice(capacity=2 * BYTES)
    ahead = Delivery(device)
    sources = [torch.full((ROWS, 100), float(number), dtype=torch.float64) for number in range(4)]
    converted = []
    for source in sources:
        converted.append(ahead.convert((source, "text")))
        ahead.settle()
    # The third has no room. The fourth would take the room that the third needs.
    assert [batch.event is None for batch in converted] == [False, False, True, True]
    (warned,) = caplog.records
    assert warned.message.startswith("fake:0 has no memory for batches ahead of the loop")
    values = []
    while converted:
        tensor, text = ahead.hand_out(converted.pop(0))
        values.append((float(tensor[0, 0]), text))
        del tensor
    device.close()
    assert values == [(0.0, "text"), (1.0, "text"), (2.0, "text"), (3.0, "text")]
    assert (device.peak, device.faults) == (2 * BYTES, [])


def test_rows_of_the_device_are_moved_once_if_another_field_has_no_room() -> None:
    rows = torch.arange(6, dtype=torch.uint8)
    device = FakeDevice(capacity=6 + 32)
    kept = device.allocate((32,), torch.uint8)
    memory = device.allocate((6,), torch.uint8)
    device.copy_to(memory, rows)
    device.record().wait()
    # Samples 0 and 3 were skipped. The device has prepared 1, 2, 4 and 5; the CPU none.
    parts = PartlyOnDevice(rows, memory, {1: 2, 4: 2}, [(1, 2), (4, 2)])
    delivery = Delivery(device)
    value = (parts, torch.arange(4))
    late = delivery.convert(value)
    delivery.settle()
    assert late.event is None  # the labels had no room
    del kept
    moved, labels = delivery.hand_out(late)
    assert (moved.tolist(), labels.tolist()) == ([1, 2, 4, 5], [0, 1, 2, 3])
    del moved, labels, memory, parts, late, value
    device.close()
    assert device.faults == []


class OneCopy:
    """A desk at which another job has made every copy, in one place."""

    name = "share='one'"

    def __init__(self, handle: bytes, layout: str, read: threading.Event) -> None:
        self._handle, self._layout, self._read = handle, layout, read
        self.closed_after_reading: bool | None = None

    def join(self, device: str) -> None:
        pass

    def ask(self, keys: BatchKeys) -> UseShared:
        return UseShared(7, 0, 1, self._layout)

    def made(self, version: int, layout: str, handles: dict[int, bytes]) -> None:
        raise AssertionError("this job copies nothing for others")

    def ended(self) -> None:
        raise AssertionError("the copy may still be read")

    def handle(self, owner: int, place: int, version: int) -> bytes:
        return self._handle

    def gone(self) -> list[int]:
        return []

    def close(self) -> None:
        self.closed_after_reading = self._read.is_set()


def test_a_shared_copy_is_unmapped_only_when_nothing_reads_it() -> None:
    owner, device = FakeDevice(shared=True), FakeDevice(capacity=64, shared=True)
    values = torch.zeros(512, dtype=torch.uint8)
    copy = owner.copy(values)
    owner.record().wait()
    read = threading.Event()
    desk = OneCopy(owner.export(copy), "uint8[32], uint8[96]", read)
    delivery = Delivery(device, desk=desk)
    sources = torch.zeros(32, dtype=torch.uint8), torch.zeros(96, dtype=torch.uint8)
    device.pause()  # the first tensor is being read when the second finds no memory
    device.run(read.set, "copy")
    threading.Timer(0.1, device.go_on).start()
    late = delivery.convert(sources, BatchKeys(0, 0, np.arange(2), None))
    delivery.settle()
    assert late.event is None
    assert desk.closed_after_reading
    del late, copy
    owner.close()
    device.close()
    assert (owner.faults, device.faults) == ([], [])


def test_memory_that_cannot_be_registered_is_a_warning(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> Callable[[], None]:
        raise OSError("no locked memory")

    monkeypatch.setattr(fake, "register", refuse)
    with (
        caplog.at_level(logging.WARNING, "penstock.device"),
        penstock.torch.loader(PIPELINE, device="cuda", workers=0, shuffle=False) as loader,
    ):
        assert torch.cat(list(loader)).tolist() == DATA.tolist()
    (record,) = caplog.records
    assert "no locked memory" in record.message
    assert "ulimit -l" in record.message


def test_a_loader_resumes_after_the_batches_that_the_loop_got(fake: FakeDevice) -> None:
    def made() -> Any:
        return penstock.torch.loader(PIPELINE, device="cuda", workers=2, kind="threads", seed=1)

    with made() as loader:
        epoch = iter(loader)
        for _ in range(4):
            next(epoch)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in epoch]
    with made() as again:
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == rest
    assert len(rest) == 6


def test_the_drop_in_delivers_tensors_and_keeps_other_values(fake: FakeDevice) -> None:
    data = [{"x": np.float32(i), "name": f"n{i}"} for i in range(6)]
    batches = list(DataLoader(data, batch_size=3, device="cuda"))
    assert [batch["x"].tolist() for batch in batches] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert batches[1]["name"] == ["n3", "n4", "n5"]
    assert fake.arrived == 2


def test_what_a_collate_made_is_delivered(fake: FakeDevice) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor(samples), samples

    found = list(DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=collate, device="cuda"))
    assert [(tensor.tolist(), rest) for tensor, rest in found] == [
        ([1, 2], [1, 2]),
        ([3, 4], [3, 4]),
    ]
    assert fake.arrived == 2


def test_the_cpu_as_device_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(delivery, "make_device")
    with penstock.torch.loader(PIPELINE, device="cpu", workers=0, shuffle=False) as loader:
        assert torch.cat(list(loader)).tolist() == DATA.tolist()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "torch sees no CUDA device"),
        ("gpu", "not a device of torch"),
        (3.5, "not a device of torch"),
    ],
)
def test_a_wrong_device_is_refused(device: Any, message: str) -> None:
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("there is a CUDA device")
    with pytest.raises(PipelineError, match=message):
        penstock.torch.loader(PIPELINE, device=device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PipelineError, match="sees 2 CUDA devices"):
        penstock.torch.loader(PIPELINE, device="cuda:2")
