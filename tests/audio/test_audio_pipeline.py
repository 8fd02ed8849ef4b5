"""Audio pipelines from files to batches: the same bits in every pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import native
from penstock.errors import SampleError
from penstock.operation import ArraySpec
from tests.support.contract import POOLS, Workers, epochs, plain
from tests.support.wavs import sound, wav

RATES = [16_000, 8_000, 44_100]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of three rates, of one and two channels, shorter and longer than half a second."""
    root = tmp_path_factory.mktemp("clips")
    for number in range(23):
        folder = root / ("yes", "no")[number % 2]
        folder.mkdir(exist_ok=True)
        rate = RATES[number % 3]
        clip = sound(rate * (3 + number % 5) // 10, 1 + number % 2, seed=number)
        (folder / f"{number:02}.wav").write_bytes(wav(clip, rate))
    return root


def road(clips: Path) -> Any:
    return (
        ps.from_folder(clips, extensions=(".wav",))
        .map(ps.audio.decode(rate=16_000, mono=True))
        .map(ps.audio.random_crop(seconds=0.5, rate=16_000))
        .map(ps.audio.random_gain())
        .map(ps.audio.mel_spectrogram(16_000, mels=40))
        .map(ps.audio.spec_augment(time=10, freq=8))
        .map(ps.audio.normalize(mean=-4.0, std=4.0))
    )


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_an_audio_road_is_bit_equal_in_every_pool(pool: Workers, clips: Path) -> None:
    pipeline = road(clips).batch(8)
    expected = epochs(pipeline, 2, workers=0, seed=3)
    assert epochs(pipeline, 2, **pool._asdict(), seed=3) == expected
    assert expected[0] != expected[1]


def test_a_cache_above_the_random_operations_changes_no_bit(clips: Path) -> None:
    folder = ps.from_folder(clips, extensions=(".wav",))
    decoded = folder.map(ps.audio.decode(rate=16_000, mono=True))
    below = [
        ps.audio.random_crop(8_000, mode="repeat"),
        ps.audio.normalize(),
        ps.audio.mel_spectrogram(16_000, mels=40),
        ps.audio.spec_augment(),
    ]
    cached = decoded.cache("8MB")
    for operation in below:
        decoded, cached = decoded.map(operation), cached.map(operation)
    assert epochs(decoded.batch(8), 2, workers=2) == epochs(cached.batch(8), 2, workers=2)


@pytest.mark.parametrize("kernel", [True, False])
def test_workers_are_chosen_and_batches_are_stacked_in_place(
    clips: Path, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setenv("PENSTOCK_NO_KERNEL", "1")
    elif not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    chosen = (
        "2 threads (the compiled kernel runs every stage, without the GIL)"
        if kernel
        else "2 processes (decode may hold the GIL)"
    )
    pipeline = road(clips).batch(8)
    assert pipeline.fields[0] == ArraySpec.of((1, 40, 51), np.float32)
    with pipeline.loader(workers=2) as loader:
        assert chosen in repr(loader)
        spectrograms, labels = next(iter(loader))
    assert spectrograms.shape == (8, 1, 40, 51)
    assert spectrograms.dtype == np.float32
    assert labels.shape == (8,)


def test_operations_find_the_field_audio_of_dicts() -> None:
    rows = [{"audio": wav(sound(4_000, seed=i)), "label": i} for i in range(6)]
    pipeline = (
        ps.from_dataset(rows)
        .map(ps.audio.decode(rate=16_000))
        .map(ps.audio.crop_or_pad(4_000))
        .map(ps.audio.mel_spectrogram(16_000, mels=40))
        .batch(6)
    )
    with pipeline.loader(workers=0, shuffle=False) as loader:
        batch = plain(next(iter(loader)))
    assert batch["audio"][:2] == ("float32", (6, 1, 40, 26))
    assert batch["label"][1] == (6,)


def test_a_damaged_clip_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.wav" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(wav(sound(400, seed=number)))
    paths[2].write_bytes(wav(sound(400))[:300])
    pipeline = ps.from_files(paths).map(ps.audio.decode()).batch(2)
    with (
        pipeline.loader(workers=0) as loader,
        pytest.raises(SampleError, match=r"2\.wav") as caught,
    ):
        list(loader)
    assert "cut short" in str(caught.value)
    with pipeline.loader(workers=0, on_error="skip") as loader:
        assert sum(len(batch) for batch in loader) == 3


def test_operations_in_the_wrong_order_are_refused_when_built(clips: Path) -> None:
    folder = ps.from_folder(clips, extensions=(".wav",))
    with pytest.raises(ps.PenstockError, match=r"random_crop got encoded bytes.*decode\(\)"):
        folder.map(ps.audio.random_crop(400))
    decoded = folder.map(ps.audio.decode())
    with pytest.raises(ps.PenstockError, match=r"spec_augment got.*mel_spectrogram\(\) above it"):
        decoded.map(ps.audio.spec_augment())
    mels = decoded.map(ps.audio.mel_spectrogram(16_000))
    with pytest.raises(ps.PenstockError, match=r"random_gain got.*between decode\(\) and"):
        mels.map(ps.audio.random_gain())
