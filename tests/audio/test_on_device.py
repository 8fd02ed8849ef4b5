"""Audio operations on a device give the bits of the CPU, or stay within the stated tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import penstock as ps
from penstock.audio.on_device import SoundsProgram, sounds_program
from penstock.image.on_device.program import NotOnDevice
from penstock.keyed import Keyed, Keys
from penstock.operation import Operation

audio = ps.audio


def both(
    operations: Sequence[Operation], lengths: Sequence[int], channels: int = 2
) -> tuple[SoundsProgram, list[NDArray[Any]], NDArray[Any]]:
    """The program, the results of the CPU, and the rows of the device."""
    parts = [(operation, Keyed(3, f"map/{n}")) for n, operation in enumerate(operations)]
    program = sounds_program(parts)
    rng, keys = np.random.default_rng(0), Keys(1, list(range(len(lengths))))
    clips = [rng.normal(0, 0.2, (channels, length)).astype(np.float32) for length in lengths]
    wanted = []
    for key, clip in zip(keys, clips, strict=True):
        value: Any = clip
        for operation, keyed in parts:
            params = operation.draw(keyed.at(key), value.shape) if operation.random else None
            value = operation.apply(value, params)
        wanted.append(value)
    parameters = program.draw(keys, [clip.shape for clip in clips])
    rows = torch.zeros((len(clips), *wanted[0].shape))
    program.run([torch.from_numpy(clip) for clip in clips], parameters, rows)
    return program, wanted, rows.numpy()


@pytest.mark.parametrize(
    "operations",
    [
        [audio.random_crop(700), audio.random_gain()],
        [audio.random_crop(700, padding=90, mode="repeat"), audio.mono()],
        [audio.crop_or_pad(700, place="end"), audio.normalize(mean=0.1, std=0.3)],
        [audio.crop_or_pad(700, mode="repeat"), audio.random_gain(-20, 20), audio.mono()],
    ],
    ids=lambda given: "-".join(one.name for one in given),
)
def test_waveforms_have_the_bits_of_the_cpu(operations: list[Operation]) -> None:
    program, wanted, rows = both(operations, [900, 300, 700, 50, 1400])
    assert program.exact
    np.testing.assert_array_equal(rows, np.stack(wanted))


def test_masks_with_a_given_value_have_the_bits_of_the_cpu() -> None:
    spec = [audio.spec_augment(time=20, freq=9, fill=0.25)]
    program = sounds_program([(spec[0], Keyed(3, "map/0"))])
    keys = Keys(0, list(range(6)))
    clips = np.random.default_rng(0).normal(0, 1, (6, 1, 40, 90)).astype(np.float32)
    rows = torch.zeros(clips.shape)
    parameters = program.draw(keys, [clip.shape for clip in clips])
    program.run(list(torch.from_numpy(clips)), parameters, rows)
    for key, clip, row in zip(keys, clips, rows.numpy(), strict=True):
        params = spec[0].draw(Keyed(3, "map/0").at(key), clip.shape)
        np.testing.assert_array_equal(row, spec[0].apply(clip, params))
    assert program.exact


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({}, 0.002),
        ({"log": "db", "top_db": 60.0}, 0.01),
        ({"log": False, "power": 1.0, "n_fft": 512}, 0.001),
        ({"center": False, "scale": "slaney", "norm": "slaney"}, 0.002),
    ],
)
def test_spectrograms_are_within_the_stated_tolerance(
    options: dict[str, Any], within: float
) -> None:
    mel = audio.mel_spectrogram(16_000, mels=40, **options)
    operations = [audio.random_crop(4_000), mel, audio.spec_augment(), audio.normalize()]
    program, wanted, rows = both(operations[:2], [9_000, 3_000, 5_000])
    assert np.abs(rows - np.stack(wanted)).max() < within
    assert not program.exact
    assert "mel_spectrogram" in program.tolerance
    program, wanted, rows = both(operations, [9_000, 6_000, 5_000])
    assert np.abs(rows - np.stack(wanted)).max() < within
    assert "normalize" in program.tolerance


def test_what_a_device_cannot_do_is_refused_with_the_reason() -> None:
    keyed = Keyed(0, "map/0")
    with pytest.raises(NotOnDevice, match="resample"):
        sounds_program([(audio.resample(44_100, 16_000), keyed)])
    with pytest.raises(NotOnDevice, match="random_crop stands below mono"):
        sounds_program([(audio.mono(), keyed), (audio.random_crop(7), keyed)])


def test_a_clip_that_fails_is_left_to_the_cpu() -> None:
    mel = audio.mel_spectrogram(16_000, center=False)
    program = sounds_program([(mel, Keyed(0, "map/0"))])
    parameters = program.draw(Keys(0, [0, 1]), [(1, 100), (1, 800)])
    assert parameters.places.tolist() == [1]
    assert "100 frames" in parameters.left[0]
