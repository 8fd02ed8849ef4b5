"""``decode="device"``: a library of the device decodes. The library is a stand-in."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock import native
from penstock.device import delivery
from penstock.device.contract import Device
from penstock.device.fake import FakeDevice
from penstock.device.plain import PlainDevice
from penstock.errors import MissingExtraError, PipelineError, SampleError, StateError
from penstock.image.on_device import whole_jpeg
from penstock.loader import Loader
from tests.support.jpegs import encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the compiled kernel")

SEED, COUNT, BATCH = 4, 14, 4
REFUSED = 77
"""The width of a picture that the library cannot decode, but the CPU can."""


class StandIn:
    """Decodes with PIL, and makes each level one higher, so that its pixels are recognised."""

    package: ClassVar[str] = "PIL"
    decoded: ClassVar[list[int]] = []
    """Pictures of each call."""

    def __init__(self, device: torch.device) -> None:
        pass

    def decode(
        self, files: Sequence[bytes], boxes: Sequence[whole_jpeg.Place]
    ) -> list[torch.Tensor | None]:
        self.decoded.append(len(files))
        return [self._one(file, *box) for file, box in zip(files, boxes, strict=True)]

    def _one(
        self, file: bytes, top: int, left: int, height: int, width: int
    ) -> torch.Tensor | None:
        try:
            with PIL.Image.open(io.BytesIO(file)) as image:
                pixels = np.array(image.convert("RGB"))
        except OSError:
            return None
        if pixels.shape[1] == REFUSED:
            return None
        raised = np.minimum(pixels, 254) + np.uint8(1)
        return torch.from_numpy(raised)[top : top + height, left : left + width].contiguous()


class Broken:
    """A library that is installed, but does not work with this version of CUDA."""

    package: ClassVar[str] = "PIL"

    def __init__(self, device: torch.device) -> None:
        raise OSError("libnvjpeg.so.12 is missing")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline and progressive JPEGs, a PNG, and one that the library refuses."""
    root = tmp_path_factory.mktemp("photos")
    (root / "a").mkdir()
    for number in range(COUNT):
        pixels = picture(50 + number, REFUSED if number == 2 else 60, number)
        file = root / "a" / f"{number:02}.jpg"
        if number == 1:
            PIL.Image.fromarray(pixels).save(file.with_suffix(".png"))
        else:
            file.write_bytes(encode(pixels, "progressive" if number == 3 else "420"))
    return root


@pytest.fixture(params=["fake", "plain"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made: Any = FakeDevice() if request.param == "fake" else PlainDevice(torch.device("cpu"))
    monkeypatch.setattr(delivery, "make_device", lambda wanted, index: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(whole_jpeg, "LIBRARIES", (StandIn,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them would only wait for each other here
    yield made
    torch.set_num_threads(threads)
    if isinstance(made, FakeDevice):
        made.close()
        assert made.faults == []


def train(photos: Path) -> ps.Pipeline:
    read = ps.from_folder(photos).map(ps.image.decode())
    return read.map(ps.image.random_resized_crop(32)).map(ps.image.random_flip()).batch(BATCH)


def decoding(photos: Path, **options: Any) -> Loader:
    options = {"workers": 2, "kind": "threads", "seed": SEED, **options}
    return penstock.torch.loader(train(photos), device="cuda", decode="device", **options)


def values(loader: Loader, epochs: int = 1) -> list[Any]:
    return [images.cpu().numpy().astype(int) for _ in range(epochs) for images, _ in loader]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def test_the_library_decodes_every_sample_within_the_tolerance(
    device: Device, photos: Path
) -> None:
    StandIn.decoded.clear()
    with penstock.torch.loader(train(photos), workers=0, seed=SEED) as exact:
        expected = values(exact)
    with decoding(photos, tiny_batch=2) as loader:
        assert "prepares all samples (decode included; the CPU decodes other" in repr(loader)
        found = values(loader)
        stats = loader.stats().device
    assert stats is not None
    assert (stats.samples, stats.cpu_samples, stats.lost) == (COUNT, 0, "")
    assert sum(StandIn.decoded) >= COUNT - 1
    differences = [np.abs(a - b).mean((1, 2, 3)) for a, b in zip(found, expected, strict=True)]
    rows = np.concatenate(differences)
    assert (rows <= whole_jpeg.TOLERANCE).all()
    # All but the PNG and the refused one were decoded by the library.
    assert (rows > 0.5).sum() == COUNT - 2


def test_batches_depend_neither_on_workers_nor_on_tasks_nor_on_a_resume(
    device: Device, photos: Path
) -> None:
    with decoding(photos, tiny_batch=2) as loader:
        expected = values(loader, 2)
    with decoding(photos, workers=3, tiny_batch=1) as loader:
        assert same(values(loader, 2), expected)
    with decoding(photos, workers=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert state["decode"] == "device"
    with decoding(photos) as again:
        again.load_state_dict(state)
        assert same(values(again, 2), expected[1:])


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_a_checkpoint_resumes_only_with_the_same_decoder(device: Device, photos: Path) -> None:
    with (
        decoding(photos) as there,
        penstock.torch.loader(train(photos), device="cuda", seed=SEED) as exact,
    ):
        with pytest.raises(StateError, match="taken with decode='device', and this loader"):
            exact.load_state_dict(there.state_dict())
        with pytest.raises(StateError, match="taken with decode='exact', and this loader"):
            there.load_state_dict(exact.state_dict())


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_a_damaged_file_is_reported_with_its_name(
    device: Device, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for number in range(8):
        data = encode(picture(60, 70, number), "420")
        name = tmp_path / "a" / f"{number}.jpg"
        # The header is whole: only the library finds the damage.
        name.write_bytes(data[: len(data) // 2] if number == 5 else data)
    with decoding(tmp_path, tiny_batch=2, on_error="skip") as loader:
        assert sum(len(batch) for batch in values(loader)) == 7
        (bad,) = loader.stats().bad_samples
        stats = loader.stats().device
    assert "5.jpg" in bad.name
    assert stats is not None
    assert (stats.samples, stats.lost) == (6, "")
    with decoding(tmp_path) as loader, pytest.raises(SampleError, match=r"5\.jpg"):
        values(loader)


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_a_lost_device_is_a_warning_that_names_the_tolerance(
    device: FakeDevice, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.device"), decoding(photos) as loader:
        epoch = iter(loader)
        next(epoch)
        device.fail("prep", RuntimeError("no answer"))
        device.fail("loop", RuntimeError("no answer"))
        count = 1 + len(list(epoch)) + len(list(loader))
    assert count == 2 * -(-COUNT // BATCH)
    (record,) = caplog.records
    assert "differ by up to 2 grey levels on average" in record.message


def test_a_missing_library_is_an_error_that_names_both(
    monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(whole_jpeg, "_is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"neither torchcodec nor nvidia\.nvimgcodec"):
        decoding(photos)


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_a_library_that_does_not_work_is_an_error_of_the_loop(
    device: Device, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_jpeg, "LIBRARIES", (Broken,))
    with decoding(photos) as loader, pytest.raises(MissingExtraError, match=r"libnvjpeg\.so"):
        values(loader)


@pytest.mark.parametrize("device", ["fake"], indirect=True)
def test_what_cannot_be_decoded_there_is_refused(device: Device, photos: Path) -> None:
    with pytest.raises(PipelineError, match="no accelerator to decode on"):
        penstock.torch.loader(train(photos), decode="device")
    with pytest.raises(PipelineError, match="decode is 'gpu'"):
        penstock.torch.loader(train(photos), device="cuda", decode="gpu")  # type: ignore[arg-type]
    pipeline = ps.from_folder(photos).map(ps.image.decode()).map(np.flipud, random=False).batch(2)
    with pytest.raises(PipelineError, match='decode="device", but'):
        penstock.torch.loader(pipeline, device="cuda", kind="threads", decode="device")
    with pytest.raises(PipelineError, match="the workers are not threads"):
        decoding(photos, kind="processes")
