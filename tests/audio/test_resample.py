"""Resampling, compared with its definition and with torchaudio, and on pure tones."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from penstock.audio import resample
from tests.support.wavs import sound

RATES = [
    (44_100, 16_000),
    (48_000, 16_000),
    (32_000, 16_000),
    (22_050, 16_000),
    (8_000, 16_000),
    (11_025, 16_000),
    (16_000, 44_100),
    (16_000, 15_900),
    (16_000, 15_999),
    (44_100, 1_000),
    (3, 7),
]


def by_definition(waveform: Any, from_rate: int, to_rate: int) -> Any:
    """The definition: each output is a sum over all inputs, weighted by a windowed sinc."""
    frames = len(waveform)
    count = math.ceil(frames * to_rate / from_rate)
    cut = 0.99 * min(from_rate, to_rate)
    out = np.empty(count)
    for place in range(count):
        time = (np.arange(frames) / from_rate - place / to_rate) * cut
        near = np.abs(time) < 6
        weights = np.sinc(time[near]) * np.cos(np.pi * time[near] / 12) ** 2
        out[place] = (weights * waveform[near]).sum() * cut / from_rate
    return out


@pytest.mark.parametrize("rates", RATES, ids=str)
@pytest.mark.parametrize("frames", [1, 2, 100, 1_501])
def test_the_result_matches_the_definition(rates: tuple[int, int], frames: int) -> None:
    waveform = sound(frames, seed=frames)
    found = resample(*rates).apply(waveform, None)
    expected = by_definition(waveform[0].astype(float), *rates)
    assert found.shape == (1, len(expected))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-6)


# For 16,000 to 15,999 Hz torchaudio would build a filter of a gigabyte.
@pytest.mark.parametrize("rates", [pair for pair in RATES if pair[1] != 15_999], ids=str)
def test_the_result_matches_torchaudio(torchaudio: Any, rates: tuple[int, int]) -> None:
    torch = importlib.import_module("torch")
    waveform = sound(5_000, 2)
    expected = torchaudio.transforms.Resample(*rates)(torch.from_numpy(waveform)).numpy()
    found = resample(*rates).apply(waveform, None)
    assert found.shape == expected.shape
    # torchaudio computes a part of its filter in float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_long_sounds_are_resampled_in_blocks_without_a_seam() -> None:
    waveform = sound(400_000)
    found = resample(48_000, 16_000).apply(waveform, None)
    middle = resample(48_000, 16_000).apply(waveform[:, 150_000:160_000], None)
    np.testing.assert_allclose(found[0, 50_100:53_200], middle[0, 100:3_200], rtol=0, atol=1e-6)


def test_channels_do_not_mix() -> None:
    waveform = sound(4_000, 3)
    found = resample(44_100, 16_000).apply(waveform, None)
    for channel in range(3):
        alone = resample(44_100, 16_000).apply(waveform[channel : channel + 1], None)
        np.testing.assert_array_equal(found[channel], alone[0])


def test_a_low_tone_stays_and_one_above_the_nyquist_frequency_goes() -> None:
    time = np.arange(44_100) / 44_100
    keep = np.sin(2 * np.pi * 1_000 * time).astype(np.float32)
    drop = np.sin(2 * np.pi * 12_000 * time).astype(np.float32)
    found = resample(44_100, 16_000).apply((keep + drop)[np.newaxis], None)[0]
    expected = np.sin(2 * np.pi * 1_000 * np.arange(16_000) / 16_000)
    assert np.abs(found - expected)[100:-100].max() < 5e-3


def test_equal_rates_change_nothing() -> None:
    waveform = sound(50)
    assert resample(16_000, 16_000).apply(waveform, None) is waveform
