"""The contract of devices, for each body: torch's CPU, the fake device, and a GPU if present."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.device.contract import Device
from penstock.device.cuda import CudaDevice
from penstock.device.fake import POISON, FakeDevice
from penstock.device.plain import PlainDevice


@pytest.fixture(params=["plain", "fake", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "plain":
        yield PlainDevice(torch.device("cpu"))
    elif request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        yield CudaDevice(0)
    else:
        fake = FakeDevice()
        yield fake
        fake.close()
        assert fake.faults == []


TENSORS = [
    torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
    torch.tensor([1.5, float("nan"), float("-inf")]),
    torch.arange(12).reshape(3, 4).T,
    torch.tensor([True, False]),
    torch.tensor(7, dtype=torch.int64),
    torch.zeros(0, 3),
    torch.ones(4, dtype=torch.bfloat16),
    torch.ones(2, 2, dtype=torch.complex64),
]


@pytest.mark.parametrize("source", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_a_copy_has_the_same_values_and_memory_of_its_own(
    device: Device, source: torch.Tensor
) -> None:
    expected = source.clone()
    copy = device.copy(source)
    event = device.record()
    device.arrive([copy], event)
    event.wait()
    assert event.done()
    if source.numel():
        assert copy.data_ptr() != source.data_ptr()
    assert copy.dtype == source.dtype
    assert torch.equal(copy.cpu().nan_to_num(), expected.nan_to_num())


def test_copies_arrive_in_order(device: Device) -> None:
    sources = [torch.full((100,), number) for number in range(10)]
    copies, events = [], []
    for source in sources:
        copies.append(device.copy(source))
        events.append(device.record())
    events[-1].wait()
    assert all(event.done() for event in events)
    device.arrive(copies, events[-1])
    assert [int(copy[0]) for copy in copies] == list(range(10))


def test_a_tensor_is_computed_after_the_copies_that_it_is_computed_from(device: Device) -> None:
    def fill(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        out.copy_(left)
        out.add_(right)

    sources = [torch.arange(4), torch.full((4,), 10)]
    copies = [device.copy(source) for source in sources]
    made = device.compute(fill, copies, (4,), torch.float32)
    event = device.record()
    del copies
    event.wait()
    device.arrive([made], event)
    assert made.dtype == torch.float32
    assert made.tolist() == [10.0, 11.0, 12.0, 13.0]


def test_memory_can_be_registered_again_after_it_was_unregistered(device: Device) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    for _ in range(2):
        end = device.register(memory.ctypes.data, memory.nbytes)
        end()


def test_memory_in_use_is_within_the_capacity(device: Device) -> None:
    before = device.memory()
    assert 0 <= before.in_use <= before.capacity


# The fake device itself: it must find the faults for which it is there.


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    made = FakeDevice(capacity=1000)
    yield made
    made.close()


def test_the_fake_device_has_poison_until_the_copy_is_done(fake: FakeDevice) -> None:
    fake.pause()
    source = torch.zeros(4, dtype=torch.uint8)
    copy = fake.copy(source)
    event = fake.record()
    assert copy.tolist() == [POISON] * 4
    assert not event.done()
    fake.go_on()
    event.wait()
    assert copy.tolist() == source.tolist()
    assert fake.faults == []


def test_the_fake_device_has_poison_until_a_tensor_is_computed(fake: FakeDevice) -> None:
    fake.pause()
    source = torch.ones(4, dtype=torch.uint8)
    made = fake.compute(torch.Tensor.copy_, [fake.copy(source)], (4,), torch.uint8)
    event = fake.record()
    assert made.tolist() == [POISON] * 4
    fake.go_on()
    event.wait()
    assert made.tolist() == [1] * 4
    assert fake.memory().in_use == 4


def test_the_fake_device_finds_a_source_that_is_written_too_early(fake: FakeDevice) -> None:
    fake.pause()
    source = torch.zeros(4)
    copy = fake.copy(source)
    source[0] = 1
    event = fake.record()
    fake.go_on()
    event.wait()
    assert len(copy) == 4
    assert fake.faults == ["host memory was written while it was copied to the device"]


def test_the_fake_device_finds_a_source_that_is_given_up_too_early(fake: FakeDevice) -> None:
    fake.pause()
    copy = fake.copy(torch.zeros(4))
    event = fake.record()
    fake.go_on()
    event.wait()
    assert len(copy) == 4
    assert fake.faults == ["host memory was given up while it was copied to the device"]


def test_the_fake_device_counts_memory_until_the_last_view_is_gone(fake: FakeDevice) -> None:
    copy = fake.copy(torch.zeros(100))
    view = copy[3:]
    assert fake.memory().in_use == 400
    del copy
    assert fake.memory().in_use == 400
    with pytest.raises(torch.OutOfMemoryError):
        fake.copy(torch.zeros(200))
    fake.record().wait()
    del view
    assert (fake.memory().in_use, fake.peak) == (0, 400)


def test_the_fake_device_finds_wrong_registrations(fake: FakeDevice) -> None:
    end = fake.register(4096, 100)
    fake.register(4100, 8)()
    end()
    end()
    assert len(fake.faults) == 2
