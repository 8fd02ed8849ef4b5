"""The contract of devices, for each body: torch's CPU, the fake device, and a GPU if present."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.device.contract import Device, StreamName
from penstock.device.cuda import CudaDevice
from penstock.device.fake import POISON, FakeDevice, Times
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


def test_memory_can_be_registered_again_after_it_was_unregistered(device: Device) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    for _ in range(2):
        end = device.register(memory.ctypes.data, memory.nbytes)
        end()


def test_memory_in_use_is_within_the_capacity(device: Device) -> None:
    before = device.memory()
    assert 0 <= before.in_use <= before.capacity


STREAMS: list[StreamName] = ["copy", "prep", "loop"]


@pytest.mark.parametrize("stream", STREAMS)
def test_work_runs_on_each_stream_in_order(device: Device, stream: StreamName) -> None:
    source = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    memory = device.allocate((2, 3), torch.int32, stream)
    other = device.allocate((3,), torch.int32, stream)
    assert (memory.shape, memory.dtype) == (source.shape, source.dtype)
    device.copy_to(memory, source, stream)

    def double() -> None:
        memory.mul_(2)

    def add() -> None:
        other.copy_(memory[0] + memory[1])

    device.run(double, stream, reads=[memory], writes=[memory])
    device.run(add, stream, reads=[memory], writes=[other])
    event = device.record(stream)
    event.wait()
    assert event.done()
    assert other.cpu().tolist() == [6, 10, 14]


def test_a_stream_waits_for_the_event_of_another(device: Device) -> None:
    source = torch.ones(1000, dtype=torch.int32)
    memory = device.allocate((1000,), torch.int32)

    def add() -> None:
        memory.add_(1)

    for _ in range(5):
        device.copy_to(memory, source)
        device.wait("prep", device.record("copy"))
        device.run(add, "prep", reads=[memory], writes=[memory])
        device.wait("copy", device.record("prep"))
    device.arrive([memory], device.record("prep"))
    assert memory.cpu().tolist() == [2] * 1000
    # The host waits before the memory is freed, which belongs to another stream.
    device.record("prep").wait()


def test_rows_are_written_in_place_by_two_streams(device: Device) -> None:
    batch = device.allocate((4, 2), torch.uint8, "prep")
    rows = torch.full((2, 2), 7, dtype=torch.uint8)
    device.wait("copy", device.record("prep"))
    device.copy_to(batch[2:], rows)

    def fill() -> None:
        batch[:2].fill_(3)

    device.run(fill, "prep", writes=[batch[:2]])
    device.wait("copy", device.record("prep"))
    event = device.record("copy")
    event.wait()
    device.arrive([batch], event)
    assert batch.cpu().tolist() == [[3, 3], [3, 3], [7, 7], [7, 7]]


def test_an_error_of_work_is_reported(device: Device) -> None:
    def refuse() -> None:
        raise RuntimeError("no such kernel")

    def run() -> None:
        device.run(refuse, "prep")
        device.record("prep").wait()

    with pytest.raises(RuntimeError, match="no such kernel"):
        run()


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


def test_the_fake_device_has_poison_in_memory_that_nothing_has_written(fake: FakeDevice) -> None:
    assert fake.allocate((3,), torch.uint8, "prep").tolist() == [POISON] * 3


def test_the_fake_device_finds_a_stream_that_did_not_wait(fake: FakeDevice) -> None:
    fake.pause()
    source = torch.zeros(8, dtype=torch.uint8)
    memory = fake.allocate((8,), torch.uint8)
    fake.copy_to(memory[:4], source[:4])
    # Another stream may use other bytes, but not those of the copy.
    fake.run(lambda: None, "prep", writes=[memory[4:]])
    assert fake.faults == []
    fake.run(lambda: None, "prep", reads=[memory[3:6]])
    assert fake.faults == ["the stream prep uses memory that the stream copy is still using"]
    fake.wait("prep", fake.record("copy"))
    fake.run(lambda: None, "prep", reads=[memory[3:6]])
    assert len(fake.faults) == 1
    fake.go_on()
    fake.record("prep").wait()


def test_the_fake_device_finds_a_stream_that_did_not_wait_for_new_memory(fake: FakeDevice) -> None:
    fake.pause()
    fake.run(lambda: None, "prep")  # may still use the memory that is allocated next
    memory = fake.allocate((8,), torch.uint8, "prep")
    fake.run(lambda: None, "prep", writes=[memory[:4]])
    assert fake.faults == []
    fake.run(lambda: None, "loop", writes=[memory[4:]])
    assert fake.faults == ["the stream loop uses memory that the stream prep is still using"]
    fake.go_on()
    fake.record("prep").wait()
    fake.record("loop").wait()


def test_the_fake_device_finds_a_buffer_that_is_reused_in_flight(fake: FakeDevice) -> None:
    fake.pause()
    source = torch.zeros(8, dtype=torch.uint8)
    memory = fake.allocate((8,), torch.uint8)
    fake.copy_to(memory, source)
    fake.wait("prep", fake.record("copy"))
    fake.run(lambda: None, "prep", reads=[memory])
    fake.copy_to(memory, source)
    assert fake.faults == ["the stream copy uses memory that the stream prep is still using"]
    fake.go_on()
    fake.record("prep").wait()
    fake.copy_to(memory, source)
    assert len(fake.faults) == 1
    fake.record("copy").wait()


def test_the_fake_device_finds_memory_that_is_freed_in_flight(fake: FakeDevice) -> None:
    fake.pause()
    memory = fake.allocate((8,), torch.uint8, "copy")
    fake.run(lambda: None, "prep", reads=[memory])
    del memory
    fake.go_on()
    fake.record("prep").wait()
    (fault,) = fake.faults
    assert fault == "memory of the stream copy was freed while the stream prep used it"


def test_the_fake_device_adds_up_virtual_time() -> None:
    fake = FakeDevice(times=Times(launch=1.0, bus=10.0, prep=5.0))
    source = torch.zeros(20, dtype=torch.uint8)
    memory = fake.allocate((20,), torch.uint8)
    fake.copy_to(memory, source)  # 1 + 2 seconds
    fake.run(lambda: None, "prep", writes=[fake.allocate((5,), torch.uint8, "prep")])
    assert fake.seconds == 3.0
    fake.wait("prep", fake.record("copy"))
    fake.run(lambda: None, "prep", reads=[memory])
    assert fake.seconds == 4.0
    fake.record("prep").wait()
    fake.close()
    assert fake.faults == []


def test_work_of_the_fake_device_fails_on_request(fake: FakeDevice) -> None:
    fake.fail("prep", RuntimeError("the device is gone"))
    fake.run(lambda: None, "prep")
    with pytest.raises(RuntimeError, match="is gone"):
        fake.record("prep").wait()


# Memory of the fake device that another process maps.

PEER = """
import sys, time
import torch
from penstock.device.fake import FakeDevice
device = FakeDevice(shared=True)
kept = device.copy(source := torch.arange(100))
device.record().wait()
print(device.export(kept).hex(), flush=True)
mapped = device.from_export(bytes.fromhex(sys.stdin.readline()))
print(int(mapped.sum()), flush=True)
time.sleep(600)
"""


def test_a_process_that_is_killed_frees_its_memory_and_no_other() -> None:
    device = FakeDevice(shared=True)
    own = torch.arange(1000)
    tensor = device.copy(own)
    device.record().wait()
    with subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        try:
            assert peer.stdin is not None
            assert peer.stdout is not None
            handle = bytes.fromhex(peer.stdout.readline())
            mapped = device.from_export(handle)
            peer.stdin.write(device.export(tensor).hex() + "\n")
            peer.stdin.flush()
            assert int(peer.stdout.readline()) == int(own.sum())
        finally:
            peer.kill()
    # What it mapped is unchanged, and what was mapped of it stays.
    assert torch.equal(tensor, own)
    assert torch.equal(mapped, torch.arange(100))
    with pytest.raises(OSError, match="No such file"):
        device.from_export(handle)
    del tensor
    assert device.memory().in_use == 0
    device.close()
    assert device.faults == []


def test_memory_that_is_freed_too_early_is_poison_for_the_process_that_maps_it() -> None:
    device = FakeDevice(shared=True)
    source = torch.arange(100)
    tensor = device.copy(source)
    device.record().wait()
    mapped = device.from_export(device.export(tensor[10:]))
    assert torch.equal(mapped, source[10:])
    tensor[13] = 7
    assert int(mapped[3]) == 7  # one memory for both
    del tensor
    device.record().wait()
    assert bytes(mapped.numpy().tobytes()) == bytes([POISON]) * mapped.nbytes
    device.close()


@pytest.mark.parametrize("shared", [True, False])
def test_other_memory_cannot_be_exported(shared: bool) -> None:
    device = FakeDevice(shared=shared)
    source = torch.zeros(4)
    with pytest.raises(OSError, match="cannot share"):
        device.export(source)
    with pytest.raises(OSError, match="cannot share"):
        PlainDevice(torch.device("cpu")).export(source)
    device.close()
