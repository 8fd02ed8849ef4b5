"""``pin_memory``: a background thread pins, with a pin function in place of CUDA's."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock.device import delivery
from penstock.device.fake import FakeDevice
from penstock.errors import SampleError
from penstock.torch import DataLoader, pinning
from penstock.torch.pinning import pinned

Pair = namedtuple("Pair", ["left", "right"])


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces pinning: returns a copy that tests can recognise."""
    return -tensor


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_every_tensor_of_a_batch_is_pinned_and_the_rest_kept() -> None:
    one = torch.ones(1)
    array, text = np.ones(1), ["a", "b"]
    batch = {"x": (one, [one]), "pair": Pair(one, 3), "array": array, "text": text}
    found = pinned(batch, negated)
    assert type(found["x"]) is tuple
    assert found["x"][0].item() == found["x"][1][0].item() == -1
    assert type(found["pair"]) is Pair
    assert (found["pair"].left.item(), found["pair"].right) == (-1, 3)
    assert found["array"] is array
    assert found["text"] == text
    assert type(pinned(OrderedDict(x=one), negated)) is OrderedDict
    assert pinned(Pinnable(), negated) == "pinned"


class Registered(torch.Tensor):  # type: ignore[misc]
    """A tensor over registered memory."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


def test_a_tensor_over_registered_memory_is_not_copied() -> None:
    tensor = torch.ones(1).as_subclass(Registered)
    assert pinned((tensor,), negated)[0] is tensor


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A device whose pinned tensors are negative. The names of the threads that pinned."""
    names: list[str] = []

    def begin() -> pinning.PinTensor:
        assert threading.current_thread() is threading.main_thread()

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            names.append(threading.current_thread().name)
            return negated(tensor)

        return pin

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pinning, "cuda_pin", begin)
    device = FakeDevice()
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: device)
    yield names
    device.close()
    assert device.faults == []
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-ahead")]


PIPELINE = ps.from_dataset(np.arange(1.0, 41.0), random=False).batch(4)


@pytest.mark.parametrize("options", [{"workers": 0}, {"kind": "threads", "workers": 2}])
def test_batches_are_pinned_in_order_by_another_thread(
    threads: list[str], options: dict[str, Any]
) -> None:
    with penstock.torch.loader(PIPELINE, seed=3, **options) as plain:
        expected = [batch.tolist() for epoch in range(2) for batch in plain]
    with penstock.torch.loader(PIPELINE, pin_memory=True, seed=3, **options) as loader:
        found = [(-batch).tolist() for epoch in range(2) for batch in loader]
    assert found == expected
    assert len(threads) == 20
    assert {name.rpartition("_")[0] for name in threads} == {"penstock-ahead"}


def test_a_checkpoint_counts_delivered_batches_only(threads: list[str]) -> None:
    def made() -> Any:
        return penstock.torch.loader(PIPELINE, pin_memory=True, kind="threads", workers=1)

    with made() as loader:
        epoch = iter(loader)
        first = [next(epoch) for _ in range(3)]
        while loader.queue().finished < 2:
            time.sleep(1e-3)
        first.append(next(epoch))
        while len(loader._ahead) == 0:  # the background thread takes the second one when it runs
            time.sleep(1e-3)
        state = loader.state_dict()
        assert (loader.batch, state["cursor"]["batch"]) == (4, 4)
        rest = [batch.tolist() for batch in epoch]
    with made() as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == rest
    assert len(first) + len(rest) == 10


def test_a_loop_that_is_left_gives_the_next_epoch_from_its_start(threads: list[str]) -> None:
    def epochs(pin_memory: bool) -> list[Any]:
        found: list[Any] = []
        loader = penstock.torch.loader(PIPELINE, pin_memory=pin_memory, kind="threads", workers=1)
        with loader:
            for batch in loader:
                found.append(batch.abs().tolist())
                if len(found) == 3:
                    break
            found += [batch.abs().tolist() for batch in loader]
        return found

    assert epochs(True) == epochs(False)


def test_an_error_of_a_sample_comes_after_the_batches_before_it(threads: list[str]) -> None:
    def fail(number: float) -> float:
        if number == 9.0:
            raise ValueError("nine")
        return number

    train = ps.from_dataset(np.arange(1.0, 17.0), random=False).map(fail, random=False).batch(4)
    found = []
    with penstock.torch.loader(
        train, pin_memory=True, kind="threads", workers=1, shuffle=False
    ) as loader:
        epoch = iter(loader)
        found += [next(epoch).tolist() for _ in range(2)]
        with pytest.raises(SampleError, match="nine"):
            next(epoch)
    assert found == [[-1, -2, -3, -4], [-5, -6, -7, -8]]


def test_the_drop_in_pins_what_a_collate_made_and_keeps_its_arrays(threads: list[str]) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor(samples), np.array(samples)

    data = [1, 2, 3, 4]
    for tensor, array in DataLoader(data, batch_size=2, collate_fn=collate, pin_memory=True):
        assert tensor.tolist() == (-array).tolist()
        assert isinstance(array, np.ndarray)
    for batch in DataLoader(data, batch_size=2, pin_memory=True):
        assert (batch < 0).all()


def test_a_forgotten_loader_leaves_no_thread(threads: list[str]) -> None:
    loader = penstock.torch.loader(PIPELINE, pin_memory=True, kind="threads", workers=1)
    next(iter(loader))
    del loader
