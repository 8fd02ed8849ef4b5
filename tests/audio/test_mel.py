"""Mel spectrograms, compared with their definition and with torchaudio."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from penstock.audio import mel_spectrogram
from penstock.errors import PipelineError
from penstock.operation import ArraySpec
from tests.support.wavs import sound

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "slaney": {"scale": "slaney", "norm": "slaney"},
    "magnitude": {"power": 1.0},
    "cube": {"power": 3.0},
    "not centred": {"center": False},
    "music": {"n_fft": 1024, "hop": 256, "win": 800, "f_min": 30.0, "f_max": 7600.0, "mels": 64},
    "odd": {"n_fft": 401, "hop": 123, "mels": 40},
    "narrow": {"f_min": 300.0, "f_max": 3400.0, "mels": 12, "norm": "slaney"},
}


def hz_to_mel(hz: Any, scale: str) -> Any:
    hz = np.asarray(hz, float)
    if scale == "htk":
        return 2595 * np.log10(1 + hz / 700)
    above = 15 + 27 * np.log(np.maximum(hz, 1000) / 1000) / np.log(6.4)
    return np.where(hz < 1000, hz * 3 / 200, above)


def by_definition(waveform: Any, rate: int, options: dict[str, Any]) -> Any:
    """The definition: a Fourier sum and a filter bank, in float64."""
    n_fft, hop = options.get("n_fft", 400), options.get("hop", 160)
    win, mels = options.get("win", n_fft), options.get("mels", 80)
    scale, low = options.get("scale", "htk"), options.get("f_min", 0.0)
    high = options.get("f_max", rate / 2)
    window = np.zeros(n_fft)
    at = (n_fft - win) // 2
    window[at : at + win] = np.sin(np.pi * np.arange(win) / win) ** 2
    if options.get("center", True):
        waveform = np.pad(waveform, n_fft // 2, mode="reflect")
    steps = 1 + (len(waveform) - n_fft) // hop
    bins = np.arange(n_fft // 2 + 1)
    turn = np.exp(-2j * np.pi * np.outer(bins, np.arange(n_fft)) / n_fft)
    cut = np.stack([waveform[t * hop : t * hop + n_fft] * window for t in range(steps)], axis=1)
    strength = np.abs(turn @ cut) ** options.get("power", 2.0)
    hz = np.linspace(0, rate // 2, len(bins))
    # Mel to Hz by interpolation, to be independent of the inverse under test.
    grid = np.linspace(0, rate / 2, 2_000_001)
    ends = np.linspace(hz_to_mel(low, scale), hz_to_mel(high, scale), mels + 2)
    tops = np.interp(ends, hz_to_mel(grid, scale), grid)
    bank = np.stack(
        [
            np.interp(hz, tops[m : m + 3], [0.0, 1.0, 0.0], left=0.0, right=0.0)
            * (2 / (tops[m + 2] - tops[m]) if options.get("norm") else 1.0)
            for m in range(mels)
        ]
    )
    return bank @ strength


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frames", [1_024, 3_001, 30_000])
def test_the_result_matches_the_definition(case: str, frames: int) -> None:
    waveform = sound(frames, seed=frames)
    found = mel_spectrogram(16_000, log=False, **CASES[case]).apply(waveform, None)
    expected = by_definition(waveform[0].astype(float), 16_000, CASES[case])
    assert found.shape == (1, *expected.shape)
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=2e-6 * expected.max())


def torch_names(options: dict[str, Any]) -> dict[str, Any]:
    names = {"hop": "hop_length", "mels": "n_mels", "win": "win_length", "scale": "mel_scale"}
    given = {"n_fft": 400, "hop": 160, "mels": 80, **options}
    return {names.get(name, name): value for name, value in given.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_result_matches_torchaudio(torchaudio: Any, case: str) -> None:
    torch = importlib.import_module("torch")
    options = CASES[case]
    waveform = sound(16_000, 2)
    transform = torchaudio.transforms.MelSpectrogram(16_000, **torch_names(options))
    expected = transform(torch.from_numpy(waveform)).numpy()
    found = mel_spectrogram(16_000, log=False, **options).apply(waveform, None)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * expected.max())


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("top_db", [None, 40.0])
def test_decibels_are_torchaudios(torchaudio: Any, power: float, top_db: float | None) -> None:
    torch = importlib.import_module("torch")
    waveform = sound(16_000, 2)
    waveform[:, 5_000:9_000] = 0
    transforms = torchaudio.transforms
    mels = transforms.MelSpectrogram(16_000, power=power, **torch_names({}))
    loud = transforms.AmplitudeToDB("power" if power == 2.0 else "magnitude", top_db)
    expected = loud(mels(torch.from_numpy(waveform))).numpy()
    found = mel_spectrogram(16_000, power=power, log="db", top_db=top_db).apply(waveform, None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3)


def test_logarithms_are_of_values_of_at_least_the_floor() -> None:
    waveform = sound(16_000)
    waveform[:, 4_000:12_000] = 0
    plain = mel_spectrogram(16_000, log=False).apply(waveform, None)
    for floor in (1e-10, 1e-3):
        found = mel_spectrogram(16_000, floor=floor).apply(waveform, None)
        np.testing.assert_allclose(found, np.log(np.maximum(plain, floor)), rtol=0, atol=1e-5)
        assert found.min() == pytest.approx(np.log(floor))
        loud = mel_spectrogram(16_000, log="db", floor=floor).apply(waveform, None)
        np.testing.assert_allclose(loud, found * 10 / np.log(10), rtol=0, atol=1e-4)
    near = mel_spectrogram(16_000, log="db", top_db=30).apply(waveform, None)
    assert near.min() == pytest.approx(near.max() - 30)


def test_a_tone_is_strongest_in_its_own_filter() -> None:
    time = np.arange(16_000) / 16_000
    tops = np.linspace(hz_to_mel(0, "htk"), hz_to_mel(8_000, "htk"), 82)[1:-1]
    for hertz in (1_000, 2_500, 4_000):
        tone = np.sin(2 * np.pi * hertz * time, dtype=np.float64).astype(np.float32)
        found = mel_spectrogram(16_000).apply(tone[np.newaxis], None)[0, :, 50]
        assert np.argmax(found) == np.argmin(np.abs(tops - hz_to_mel(hertz, "htk")))


def test_clips_too_short_for_one_step_are_refused() -> None:
    operation = mel_spectrogram(16_000, center=False)
    assert operation.output(ArraySpec.of((1, 400), np.float32)) == ArraySpec.of(
        (1, 80, 1), np.float32
    )
    with pytest.raises(PipelineError, match=r"got 399 frames.*pad\(\)"):
        operation.output(ArraySpec.of((1, 399), np.float32))
    with pytest.raises(PipelineError, match=r"got 399 frames.*pad\(\)"):
        operation.apply(sound(399), None)


def test_filters_that_are_always_zero_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="filters 0, 3, 6, 13 lie between two frequencies"):
        mel_spectrogram(16_000, mels=128)
