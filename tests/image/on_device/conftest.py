"""The CPU's results for the same samples, to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock import native
from penstock.image.fused import fuse, fuse_augment
from penstock.image.on_device.parameters import DeviceParameters
from penstock.image.on_device.program import DeviceProgram, device_program
from penstock.image.on_device.ragged import Ragged
from penstock.keyed import Keys
from penstock.operation import Operation
from penstock.stats import Tally
from penstock.stops.map import Map
from penstock.stops.stop import StepContext, Stop
from tests.image.conftest import make_photo

Image = NDArray[np.uint8]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not native.kernel_available():
        for item in items:
            if "on_device" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="the bits are those of the C kernel"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors do not need more, and threads that wait for each other take time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stops_of(operations: Sequence[Operation]) -> tuple[Stop, ...]:
    """The stops as a road has them: fused where the CPU runs several operations as one."""
    maps = tuple(Map(operation, ordinal=n) for n, operation in enumerate(operations))
    return fuse_augment(fuse(maps))


def on_cpu(stops: Sequence[Stop], pictures: Sequence[Image], keys: Keys, seed: int) -> list[Any]:
    """The results of the CPU."""
    context = StepContext(seed, Tally(len(stops) + 1, 0))
    samples: list[Any] = list(pictures)
    for stop in stops:
        step = stop.step(context)
        samples = step(keys, lambda keys, made=samples: made)  # type: ignore[misc]
    return samples


def regions_of(pictures: Sequence[Image], parameters: DeviceParameters) -> Ragged:
    """Only the regions that are needed, as a decoder makes them."""
    parts = []
    for place, (top, left, height, width) in zip(
        parameters.places.tolist(), parameters.regions.tolist(), strict=True
    ):
        parts.append(pictures[place][top : top + height, left : left + width])
    whole = Ragged.of(parts)
    return Ragged.packed(whole.data, whole.host[:, 1:3], parameters.regions[:, :2])


def on_device(
    stops: Sequence[Stop],
    pictures: Sequence[Image],
    keys: Keys,
    seed: int,
    backend: str,
) -> tuple[DeviceProgram, DeviceParameters, NDArray[Any]]:
    """The program, the parameters, and the rows of the tiny-batch."""
    program = device_program(stops, seed, backend=backend)
    sizes = [(picture.shape[0], picture.shape[1]) for picture in pictures]
    parameters = program.draw(keys, sizes)
    kind = getattr(torch, program.dtype.name)
    rows = torch.full((len(pictures), *program.shape), 77, dtype=kind)
    if len(parameters):
        program.run(regions_of(pictures, parameters), parameters, rows)
    return program, parameters, rows.numpy()


def check_same_bits(
    operations: Sequence[Operation],
    sizes: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    epoch: int = 0,
    backend: str = "torch",
) -> DeviceParameters:
    """Fails unless CPU and device give the same bits for every sample that the device takes."""
    pictures = [make_photo(*size, seed=n) for n, size in enumerate(sizes)]
    keys = Keys(epoch, list(range(len(sizes))))
    stops = stops_of(operations)
    _, parameters, rows = on_device(stops, pictures, keys, seed, backend)
    places = parameters.places.tolist()
    wanted = on_cpu(stops, [pictures[place] for place in places], keys.pick(places), seed)
    for place, row in zip(places, wanted, strict=True):
        np.testing.assert_array_equal(rows[place], row, err_msg=f"sample {place}")
    return parameters
