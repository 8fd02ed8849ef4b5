"""``normalize`` on the device: the tensors of the CPU, from a quarter of the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock.device import delivery
from penstock.device.delivery import fill_normalized, fill_normalized_last
from penstock.device.division import divide
from penstock.device.fake import FakeDevice
from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.torch import DataLoader
from tests.node.conftest import own_node, service_here
from tests.support.jpegs import encode, picture

ROWS, SIDE = 4, 16


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        place = folder / ("cats" if number % 2 else "dogs")
        place.mkdir(exist_ok=True)
        (place / f"{number:02}.jpg").write_bytes(encode(picture(40, 50, number)))
    return folder


@pytest.fixture
def copied(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, bool]]:
    """The type of each tensor that is copied to the device, and whether it is registered."""
    found: list[tuple[torch.dtype, bool]] = []
    copy = fake.copy

    def noted(source: torch.Tensor) -> torch.Tensor:
        found.append((source.dtype, fake.is_registered(source)))
        return copy(source)

    monkeypatch.setattr(fake, "copy", noted)
    return found


def crops(photos: Path) -> Pipeline:
    return (
        ps.from_folder(photos)
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(SIDE))
        .map(ps.image.random_flip())
    )


def seen(loader: Any, epochs: int = 2) -> list[Any]:
    """Type, shape, bits and labels of all batches."""
    with loader:
        return [look(batch) for _ in range(epochs) for batch in loader]


def look(batch: Any) -> Any:
    images, labels = batch
    assert images.is_contiguous()
    return type(batch), images.dtype, images.shape, images.numpy().tobytes(), labels.tolist()


def both(train: Pipeline, **options: Any) -> tuple[list[Any], list[Any]]:
    """All batches on the CPU, and on the device."""
    made = [
        seen(penstock.torch.loader(train, device=device, seed=3, **options))
        for device in ("cpu", "cuda")
    ]
    return made[0], made[1]


POOLS: list[dict[str, Any]] = [
    {"workers": 0},
    {"workers": 2, "kind": "threads"},
    {"workers": 1, "kind": "processes"},
]


@pytest.mark.parametrize("options", POOLS, ids=str)
def test_batches_have_the_bits_of_the_cpu_and_cross_the_bus_as_uint8(
    photos: Path, copied: list[Any], options: dict[str, Any]
) -> None:
    expected, found = both(crops(photos).map(ps.image.normalize()).batch(ROWS), **options)
    assert found == expected
    assert found[0][1:3] == (torch.float32, (ROWS, 3, SIDE, SIDE))
    # The slopes and offsets of normalize are copied once.
    assert [kind for kind, _ in copied].count(torch.float32) == 1
    assert [at for kind, at in copied if kind == torch.uint8] == [True] * 6


@pytest.mark.parametrize(
    "more",
    [
        lambda p: p.map(ps.image.normalize((0.1, 0.2, 0.3), 0.5, layout="hwc")).batch(ROWS),
        lambda p: (
            p.refurbish(reuse=2)
            .map(ps.image.random_flip())
            .map(ps.image.normalize(0.5, 0.25))
            .batch(5)
        ),
        lambda p: p.map(ps.image.normalize()).echo(2).batch(ROWS),
        lambda p: p.map(ps.image.normalize()).batch(ROWS).echo(2),
        lambda p: p.map(ps.image.normalize(), on=0).batch(5, drop_last=True),
    ],
    ids=["hwc", "refurbish", "echo of samples", "echo of batches", "drop_last"],
)
def test_other_stages_change_nothing(photos: Path, copied: list[Any], more: Any) -> None:
    expected, found = both(more(crops(photos)), workers=0)
    assert found == expected
    assert torch.uint8 in {kind for kind, _ in copied}


def test_all_levels_have_the_bits_of_the_cpu() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    rng = np.random.default_rng(0)
    for layout, fill in (("chw", fill_normalized), ("hwc", fill_normalized_last)):
        for _ in range(50):
            mean, std = rng.normal(0.5, 1, 3), rng.uniform(1e-3, 3, 3)
            operation = ps.image.normalize(tuple(mean), tuple(std), layout)
            expected = operation.apply(levels[0], None)
            out = torch.empty((1, *expected.shape))
            fill(out, torch.from_numpy(levels), torch.tensor(np.stack(operation.line(3))))
            assert out[0].numpy().tobytes() == expected.tobytes()
            table = operation.table(3)
            slopes, offsets = operation.line(3)
            line = np.arange(256, dtype=np.float32) * slopes[:, None] + offsets[:, None]
            assert line.tobytes() == table.tobytes()


@pytest.mark.parametrize("more", [{}, {"cache": "1MB"}, {"reuse": 2, "split": 3}], ids=str)
def test_the_drop_in_normalizes_on_the_device(
    photos: Path, copied: list[Any], torchvision: Any, more: dict[str, Any]
) -> None:
    t = torchvision.transforms
    steps = [
        t.RandomResizedCrop(SIDE),
        t.RandomHorizontalFlip(),
        t.ToTensor(),
        t.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    ]
    data = torchvision.datasets.ImageFolder(photos, t.Compose(steps))
    made = [
        DataLoader(data, batch_size=ROWS, shuffle=True, seed=1, device=device, **more)
        for device in ("cpu", "cuda")
    ]
    assert repr(made[1]).endswith(", delivered to cuda (normalize runs there)>")
    assert "delivered" not in repr(made[0])
    expected, found = (seen(loader, 3) for loader in made)
    assert found == expected
    assert found[0][0] is list
    assert torch.uint8 in {kind for kind, _ in copied}


def test_the_drop_in_lets_the_device_prepare_a_share(
    photos: Path, fake: FakeDevice, torchvision: Any
) -> None:
    t = torchvision.transforms
    steps = [t.RandomResizedCrop(SIDE), t.RandomHorizontalFlip(), t.ToTensor()]
    data = torchvision.datasets.ImageFolder(photos, t.Compose([*steps, t.Normalize(0.5, 0.2)]))

    def made(**options: Any) -> Any:
        return DataLoader(data, batch_size=ROWS, shuffle=True, seed=1, num_workers=2, **options)

    loader = made(kind="threads", device="cuda", device_prep=True)
    assert "cuda prepares a share of each batch" in repr(loader)
    assert seen(loader, 3) == seen(made(kind="threads"), 3)
    with pytest.raises(PipelineError, match=r'process \(kind="threads"\)'):
        made(kind="processes", device="cuda", device_prep=True)


def test_it_can_be_switched_off(photos: Path, copied: list[Any]) -> None:
    train = crops(photos).map(ps.image.normalize()).batch(ROWS)
    loader = penstock.torch.loader(train, device="cuda", device_normalize=False, workers=0)
    assert repr(loader).endswith(", delivered to cuda>")
    seen(loader, 1)
    assert torch.uint8 not in {kind for kind, _ in copied}


def test_a_checkpoint_of_one_device_resumes_on_another(photos: Path, fake: FakeDevice) -> None:
    train = crops(photos).map(ps.image.normalize()).batch(ROWS)

    def made(device: str) -> Any:
        return penstock.torch.loader(train, device=device, workers=0, seed=5)

    for first, second in (("cpu", "cuda"), ("cuda", "cpu")):
        with made(first) as loader:
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
            rest = [look(batch) for batch in epoch]
        with made(second) as again:
            again.load_state_dict(state)
            assert [look(batch) for batch in again] == rest


def test_a_batch_without_room_ahead_is_normalized_when_the_loop_asks(
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train = crops(photos).map(ps.image.normalize()).batch(ROWS)
    expected = seen(penstock.torch.loader(train, workers=0, seed=3), 1)
    pixels = ROWS * 3 * SIDE * SIDE
    # One batch as uint8 and as float32, its labels, and little more.
    device = FakeDevice(capacity=2 * 4 * pixels + pixels + 200)
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = []
    with penstock.torch.loader(train, device="cuda", workers=2, kind="threads", seed=3) as loader:
        for batch in loader:
            found.append(look(batch))
            del batch
    device.close()
    assert (found, device.faults) == (expected, [])


# Decisions.


def test_normalize_is_left_for_the_device_only_where_no_value_changes() -> None:
    decoded = ps.from_files(["a.jpg"], [1]).map(ps.image.decode()).map(ps.image.resize((8, 8)))
    ended = decoded.map(ps.image.normalize())
    divided = divide(ended.batch(2))
    assert divided.rest is not None
    assert (divided.rest.channels, divided.rest.on) == (3, None)
    assert divided.pipeline.fields == decoded.fields

    def kept(pipeline: Pipeline) -> str:
        division = divide(pipeline)
        assert division.rest is None
        assert division.pipeline is pipeline
        return division.note

    assert kept(decoded.batch(2)) == ""
    assert kept(ended.map(np.negative, random=False, on=0).batch(2)) == ""
    cpu = "normalize runs on the CPU: "
    assert kept(ended.batch(2, collate=list)) == cpu + "batch() does more than stack samples"
    assert kept(ended.cache("1MB").batch(2)) == cpu + "cache keeps its output"
    assert "uint8" in kept(ps.from_dataset([1]).map(ps.image.normalize()).batch(1))


def test_the_field_that_a_map_names_is_normalized(photos: Path, fake: FakeDevice) -> None:
    gray = ps.from_files(sorted(str(p) for p in photos.rglob("*.jpg"))).map(
        ps.image.decode(mode="gray")
    )
    train = gray.map(ps.image.resize((8, 8))).map(ps.image.normalize(0.5, 0.5)).batch(3)
    loaders = [penstock.torch.loader(train, device=d, workers=0) for d in ("cpu", "cuda")]
    expected, found = ([batch.numpy().tobytes() for batch in loader] for loader in loaders)
    assert found == expected
    for loader in loaders:
        loader.close()


def test_samples_that_are_not_uint8_images_after_all_are_an_error(fake: FakeDevice) -> None:
    rest = divide(
        ps.from_files(["a.jpg"]).map(ps.image.decode()).map(ps.image.normalize()).batch(1)
    ).rest
    sent = delivery.Delivery(fake, rest)
    batch = torch.zeros(2, 4, 4)
    with pytest.raises(PipelineError, match=r"got \(2, 4, 4\) of torch.float32; it needs uint8"):
        sent.convert(batch)
    fake.record().wait()


# A group of jobs.


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        own_node(tmp_path_factory.mktemp("node"), patch) as directory,
    ):
        patch.setattr("penstock.node.load.load_on_trial", lambda *_: None)
        with service_here(directory, workers=1, clock=time.monotonic):
            yield


def test_the_memory_of_a_group_is_registered_and_copied_as_uint8(
    photos: Path, node: None, copied: list[Any]
) -> None:
    train = crops(photos).map(ps.image.normalize()).batch(ROWS)
    expected = seen(penstock.torch.loader(train, workers=0, seed=3))
    with penstock.torch.loader(train, device="cuda", share="normalized", seed=3) as first:
        found = [look(batch) for batch in first]
        with (
            penstock.torch.loader(train, share="normalized", seed=3) as second,
            pytest.raises(PipelineError, match="the stops were"),
        ):
            next(iter(second))  # it normalizes on the CPU: the group has other batches
        found += [look(batch) for batch in first]
    assert found == expected
    assert [at for kind, at in copied if kind == torch.uint8] == [True] * 6
