"""Image pipelines that CPU workers and a device prepare together, with real decoding on both."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import penstock as ps
import penstock.torch
from penstock import native
from penstock.device import delivery, shared_schedule
from penstock.device.contract import Device
from penstock.device.fake import FakeDevice
from penstock.device.image_work import ImageOnDevice, image_work
from penstock.device.plain import PlainDevice
from penstock.keyed import Keys
from penstock.pipeline import Pipeline
from tests.support.jpegs import encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the compiled kernel")

SEED, COUNT, BATCH = 3, 18, 6
KINDS = ["420", "444", "422", "progressive", "gray"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of many sizes and kinds, in two classes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(1)
    for number in range(COUNT):
        height, width = rng.integers(40, 100, 2).tolist()
        kind = KINDS[number] if number < len(KINDS) else KINDS[number % 3]
        folder = root / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(encode(picture(height, width, number), kind))
    return root


def pipelines(photos: Path) -> dict[str, Pipeline]:
    image = ps.image
    decoded = ps.from_folder(photos).map(image.decode())
    crop, flip = image.random_resized_crop(32), image.random_flip()
    return {
        "crop and normalize": decoded.map(crop).map(flip).map(image.normalize()),
        "rand_augment": decoded.map(crop).map(image.rand_augment(2, 9)),
        "cache": ps.from_folder(photos)
        .cache("1MB")
        .map(image.decode())
        .map(image.resize(40))
        .map(image.center_crop(32)),
        "refurbish": decoded.map(image.rand_augment(2, 9)).refurbish(2).map(crop).map(flip),
    }


NAMES = ["crop and normalize", "rand_augment", "cache", "refurbish"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads of torch would only wait for each other here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["fake", "plain"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> Iterator[Device]:
    made: Any = FakeDevice() if request.param == "fake" else PlainDevice(torch.device("cpu"))
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: made)
    monkeypatch.setattr(shared_schedule, "FORESEES", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield made
    if isinstance(made, FakeDevice):
        made.close()
        assert made.faults == []


def plain(batch: Any) -> Any:
    images, labels = batch
    return images.numpy().tobytes(), labels.tolist()


@pytest.mark.parametrize("t", [0, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_the_device_makes_the_bits_of_the_compiled_kernel(
    device: Device, photos: Path, name: str, t: int
) -> None:
    pipeline = pipelines(photos)[name].batch(BATCH)
    with penstock.torch.loader(pipeline, workers=0, seed=SEED) as alone:
        expected = [plain(batch) for _ in range(2) for batch in alone]
    loader = penstock.torch.loader(
        pipeline,
        workers=2,
        kind="threads",
        seed=SEED,
        tiny_batch=2,
        device="cuda",
        device_prep=True,
    )
    learnt = {"t": t, "frozen": True, "mode": "spatial", "decided": True, "ahead": 2}
    loader.load_state_dict({**loader.state_dict(), "device": learnt})
    with loader:
        found = [plain(batch) for _ in range(2) for batch in loader]
        stats = loader.stats().device
    assert found == expected
    assert stats is not None
    assert stats.lost == ""
    if t:  # pictures that the CPU has to decode are the CPU's
        assert stats.samples > COUNT // 2
        assert stats.copied > 0


class CountedMemory(TorchFunctionMode):  # type: ignore[misc]
    """Counts the bytes of tensors that calls of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use = self.peak = 0
        self._living: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._living:
            self._living.add(key)
            weakref.finalize(storage, self._free, key, nbytes)
            self.in_use += nbytes
            self.peak = max(self.peak, self.in_use)

    def _free(self, key: int, nbytes: int) -> None:
        self._living.discard(key)
        self.in_use -= nbytes


@pytest.mark.parametrize("name", NAMES[:2])
def test_temporary_memory_of_a_tiny_batch_is_bounded_by_its_pixels(
    photos: Path, one_thread: None, name: str
) -> None:
    pipeline = pipelines(photos)[name]
    work, source = image_work(pipeline.road(SEED)), pipeline.source
    assert isinstance(work, ImageOnDevice)
    files = source.file_samples()
    assert files is not None

    def pack(indices: list[int]) -> Any:
        contents = [files.content(sample) for sample in source.read(indices)]
        return work.pack(Keys(0, indices), contents, lambda nbytes: np.empty(nbytes, np.uint8))

    indices = [index for index in range(COUNT) if pack([index]) is not None]
    packed = pack(indices)
    rows = torch.empty((len(indices), *work.program.shape))
    rows = rows.to(torch.from_numpy(np.empty(0, work.program.dtype)).dtype)
    buffer = torch.from_numpy(packed.buffer)
    regions = packed.about.regions
    pixels = 3 * int((regions[:, 2] * regions[:, 3]).sum()) + rows.numel()
    with CountedMemory() as memory:
        work.run(buffer, packed.about, rows)
    # docs/device.md says so.
    assert pixels < memory.peak <= 50 * pixels


def test_files_are_sorted_by_their_bytes(photos: Path) -> None:
    pipeline = pipelines(photos)["rand_augment"]
    work = image_work(pipeline.road(SEED))
    assert isinstance(work, ImageOnDevice)
    files = sorted(photos.rglob("*.jpg"))
    assert list(work.sizes(range(4))) == [file.stat().st_size for file in files[:4]]
    assert "entropy-coded bits" in work.name


def test_a_picture_that_the_device_cannot_decode_is_left_to_the_cpu(photos: Path) -> None:
    work = image_work(pipelines(photos)["rand_augment"].road(SEED))
    assert isinstance(work, ImageOnDevice)

    def allocate(nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    files = [encode(picture(60, 70, 1), kind) for kind in ("420", "progressive")]
    assert work.pack(Keys(0, [0]), files[:1], allocate) is not None
    assert work.pack(Keys(0, [0, 1]), files, allocate) is None
    assert work.pack(Keys(0, [0]), [b"no JPEG"], allocate) is None


@pytest.mark.parametrize(
    ("below", "why"),
    [
        ((), "no operation stands below"),
        ((np.flipud,), "flipud is no operation of penstock.image"),
        ((ps.image.random_resized_crop(32), ps.image.color_jitter(hue=0.1)), "other bits"),
    ],
)
def test_why_a_device_cannot_run_a_road(photos: Path, below: Any, why: str) -> None:
    pipeline = ps.from_folder(photos).cache("1MB")
    if below:
        pipeline = pipeline.map(ps.image.decode())
    for operation in below:
        pipeline = pipeline.map(operation)
    found = image_work(pipeline.road(SEED))
    assert isinstance(found, str)
    assert why in found
