"""``device=`` and ``device_prep`` with mixtures, budgets, URLs, streams and audio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
import penstock.torch
from penstock import native
from penstock.device.fake import FakeDevice
from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from tests.image.conftest import make_photo
from tests.support.jpegs import encode

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the compiled kernel")


class Numbers(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        return iter([np.full(3, number, np.float32) for number in range(10)])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(8):
        folder = tmp_path / f"{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(make_photo(40 + number, 60)))
    return tmp_path


def crops(source: Pipeline) -> Pipeline:
    return source.map(ps.image.decode()).map(ps.image.random_resized_crop(16))


def documents() -> Pipeline:
    return ps.from_dataset([np.arange(number % 7 + 1) for number in range(20)], random=False)


PIPELINES: dict[str, Any] = {
    "a mixture of files": lambda at: crops(
        ps.mix({str(n): (ps.from_folder(at / str(n)), n + 1.0) for n in range(2)})
    ).batch(3),
    "files by URL": lambda at: crops(ps.from_folder(f"file://{at}")).batch(3),
    "a budget": lambda at: crops(ps.from_folder(at)).batch(tokens=3, by=[1] * 8),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "a mixture of pipelines": (
        lambda at: ps.mix({"a": (crops(ps.from_folder(at)), 1.0)}).batch(3),
        r"maps of the sources of mix\(\) to the mixture",
    ),
    "padded batches": (
        lambda at: documents().batch(tokens=16, by=[n % 7 + 1 for n in range(20)], pad=0),
        "batches are padded",
    ),
    "rows of tokens": (
        lambda at: ps.pack_sequences(documents(), 8).batch(3),
        "no operation stands below",
    ),
    "an echoed stream": (
        lambda at: ps.from_dataset(Numbers()).echo(2).batch(4),
        "not threads of this process",
    ),
}


def seen(pipeline: Pipeline, **options: Any) -> list[Any]:
    def bits(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.dtype, batch.shape, batch.numpy().tobytes()
        parts = batch.values() if isinstance(batch, dict) else batch
        return [bits(part) for part in parts]

    with penstock.torch.loader(pipeline, seed=2, **options) as loader:
        return [bits(batch) for batch in loader]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_device_prepares_a_share_of_them(photos: Path, fake: FakeDevice, name: str) -> None:
    pipeline, options = PIPELINES[name](photos), {"workers": 1, "kind": "threads"}
    assert seen(pipeline, device="cuda", device_prep=True, **options) == seen(pipeline, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_delivered_and_device_prep_says_why_not(
    photos: Path, fake: FakeDevice, name: str
) -> None:
    make, why = REFUSED[name]
    expected = seen(make(photos), workers=0)
    assert seen(make(photos), workers=0, device="cuda", device_prep="auto") == expected
    kind = {} if "stream" in name else {"workers": 1, "kind": "threads"}
    with pytest.raises(PipelineError, match=why):
        seen(make(photos), device="cuda", device_prep=True, **{"workers": 0, **kind})


def test_audio_is_refused_with_what_to_do(fake: FakeDevice) -> None:
    clips = ps.from_files(["a.wav"]).map(ps.audio.decode()).map(ps.audio.crop_or_pad(100))
    with pytest.raises(PipelineError, match=r"samples are audio.* run them on the batches"):
        penstock.torch.loader(
            clips.batch(2), device="cuda", device_prep=True, workers=1, kind="threads"
        )
