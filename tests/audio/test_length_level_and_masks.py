"""Cropping, padding, loudness and masks, compared with results worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.audio import crop_or_pad, mono, normalize, pad, random_crop, random_gain, spec_augment
from penstock.audio.masking import Masks
from penstock.keyed import Key, Keyed
from tests.support.wavs import sound

COUNT = np.arange(1, 6, dtype=np.float32)[np.newaxis]


def placed(operation: Any, length: int, keys: int = 400) -> list[int]:
    """The drawn positions of the clip, one for each key."""
    at = Keyed(3, "crop").at
    return [operation.draw(at(Key(index)), (1, length)) for index in range(keys)]


@pytest.mark.parametrize(
    ("at", "mode", "expected"),
    [
        (0, "constant", [1, 2, 3, 4, 5, 0, 0, 0]),
        (3, "constant", [0, 0, 0, 1, 2, 3, 4, 5]),
        (5, "constant", [0, 0, 0, 0, 0, 1, 2, 3]),
        (-2, "constant", [3, 4, 5, 0, 0, 0, 0, 0]),
        (9, "constant", [0] * 8),
        (-9, "constant", [0] * 8),
        (0, "repeat", [1, 2, 3, 4, 5, 1, 2, 3]),
        (2, "repeat", [4, 5, 1, 2, 3, 4, 5, 1]),
        (-1, "repeat", [2, 3, 4, 5, 1, 2, 3, 4]),
    ],
)
def test_a_short_clip_is_padded(at: int, mode: str, expected: list[int]) -> None:
    found = random_crop(8, mode=mode).apply(COUNT, at)
    np.testing.assert_array_equal(found, [expected])


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 20), st.integers(0, 10**6))
def test_a_random_crop_is_a_part_of_the_padded_clip(
    frames: int, length: int, padding: int, index: int
) -> None:
    clip = np.arange(1, length + 1, dtype=np.float32)[np.newaxis]
    operation = random_crop(frames, padding=padding)
    at = operation.draw(Keyed(0, "x").at(Key(index)), clip.shape)
    found = operation.apply(clip, at)
    room = max(padding, frames - length)
    whole = np.pad(clip[0], room)
    np.testing.assert_array_equal(found[0], whole[room - at : room - at + frames])
    assert frames - length - padding <= at <= padding or 0 <= at <= frames - length


@pytest.mark.parametrize(
    ("operation", "length", "places"),
    [
        (random_crop(5), 8, range(-3, 1)),
        (random_crop(8), 5, range(4)),
        (random_crop(5), 5, range(1)),
        (random_crop(5, padding=2), 5, range(-2, 3)),
        (random_crop(8, padding=1), 5, range(4)),
        (random_crop(8, padding=2), 5, range(1, 3)),
        (random_crop(8, place="start"), 5, [0]),
        (random_crop(8, place="middle"), 5, [1]),
        (random_crop(8, place="end"), 5, [3]),
        (random_crop(5, place="end"), 8, range(-3, 1)),
    ],
)
def test_every_place_is_drawn_and_no_other(operation: Any, length: int, places: Any) -> None:
    drawn = placed(operation, length)
    assert set(drawn) == set(places)
    if len(places) > 1:
        assert min(np.unique(drawn, return_counts=True)[1]) > 400 / len(places) / 2


@pytest.mark.parametrize(
    ("frames", "place", "expected"),
    [
        (3, "start", [1, 2, 3]),
        (3, "middle", [2, 3, 4]),
        (3, "end", [3, 4, 5]),
        (5, "middle", [1, 2, 3, 4, 5]),
        (8, "start", [1, 2, 3, 4, 5, 0, 0, 0]),
        (8, "middle", [0, 1, 2, 3, 4, 5, 0, 0]),
        (8, "end", [0, 0, 0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_place_applies_to_cropping_and_to_padding(
    frames: int, place: str, expected: list[int]
) -> None:
    np.testing.assert_array_equal(crop_or_pad(frames, place=place).apply(COUNT, None), [expected])
    filled = pad(frames, place=place).apply(COUNT, None)
    if frames > 5:
        np.testing.assert_array_equal(filled, [expected])
    else:
        assert filled is COUNT


def test_repeating_keeps_every_channel_in_step() -> None:
    clip = np.stack([COUNT[0], -COUNT[0]])
    found = crop_or_pad(12, mode="repeat", place="start").apply(clip, None)
    np.testing.assert_array_equal(found, [np.resize(COUNT, 12), -np.resize(COUNT, 12)])


def test_mono_is_the_mean() -> None:
    waveform = sound(400, 3)
    found = mono().apply(waveform, None)
    np.testing.assert_allclose(found, waveform.mean(axis=0, keepdims=True), rtol=0, atol=1e-7)
    assert mono().apply(waveform[:1], None) is not None


def test_gain_is_drawn_evenly_in_decibels() -> None:
    at = Keyed(1, "gain").at
    drawn = [random_gain(-12, 6).draw(at(Key(i)), (1, 9)) for i in range(2_000)]
    decibels = 20 * np.log10(drawn)
    assert -12 <= decibels.min() < -11.8
    assert 5.8 < decibels.max() <= 6
    assert abs(decibels.mean() + 3) < 0.5
    waveform = sound(50)
    np.testing.assert_array_equal(random_gain().apply(waveform, 0.5), waveform / 2)


def test_normalizing_by_given_numbers_and_by_the_clip_itself() -> None:
    waveform = 3 * sound(5_000, 2) + 1
    found = normalize(mean=1.0, std=0.5).apply(waveform, None)
    np.testing.assert_allclose(found, (waveform - 1) / 0.5, rtol=1e-6, atol=1e-6)
    alone = normalize().apply(waveform, None)
    assert abs(alone.mean(dtype=np.float64)) < 1e-5
    assert abs(alone.std(dtype=np.float64) - 1) < 1e-5
    assert normalize().apply(np.full((1, 90), 0.25, np.float32), None).tolist() == [[0.0] * 90]


def test_masks_cover_what_was_drawn_and_nothing_else() -> None:
    clip = np.random.default_rng(0).normal(-5, 2, (2, 6, 9)).astype(np.float32)
    masks = Masks(time=((1, 3), (7, 7)), freq=((4, 6),))
    covered = np.zeros(clip.shape, bool)
    covered[:, :, 1:3] = covered[:, 4:6] = True
    for fill, value in ((0.0, 0.0), (-3.5, -3.5), ("mean", clip.mean())):
        found = spec_augment(fill=fill).apply(clip, masks)
        np.testing.assert_array_equal(found[~covered], clip[~covered])
        assert set(found[covered].tolist()) == {float(np.float32(value))}


def test_masks_keep_to_their_widths_and_reach_every_place() -> None:
    operation = spec_augment(time_masks=2, time=30, freq_masks=1, freq=7, share=0.1)
    at = Keyed(2, "masks").at
    drawn = [operation.draw(at(Key(i)), (1, 20, 100)) for i in range(1_000)]
    steps = np.array([span for masks in drawn for span in masks.time])
    mels = np.array([span for masks in drawn for span in masks.freq])
    assert set(steps[:, 1] - steps[:, 0]) == set(range(11))  # a tenth of 100 steps, not 30
    assert set(mels[:, 1] - mels[:, 0]) == set(range(8))
    for spans, size in ((steps, 100), (mels, 20)):
        wide = spans[spans[:, 0] < spans[:, 1]]
        assert wide[:, 0].min() == 0
        assert wide[:, 1].max() == size


def test_a_mask_is_never_wider_than_the_spectrogram() -> None:
    operation = spec_augment(time=500, freq=500, share=1.0)
    clip = np.ones((1, 3, 4), np.float32)
    for index in range(50):
        masks = operation.draw(Keyed(0, "x").at(Key(index)), clip.shape)
        assert all(0 <= a <= b <= 4 for a, b in masks.time)
        assert all(0 <= a <= b <= 3 for a, b in masks.freq)
        operation.apply(clip, masks)
