"""The contract of every audio operation: stated output, unmodified input, same result per key."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.audio as ps_audio
from penstock.audio import (
    crop_or_pad,
    mel_spectrogram,
    mono,
    normalize,
    pad,
    random_crop,
    random_gain,
    resample,
    spec_augment,
)
from penstock.errors import PipelineError
from penstock.keyed import Key, Keyed
from penstock.operation import ArraySpec, BytesSpec, Operation
from tests.support.wavs import sound

ON_WAVEFORMS: list[Operation] = [
    resample(16_000, 8_000),
    resample(8_000, 16_000),
    resample(44_100, 16_000),
    resample(16_000, 16_000),
    resample(7, 3),
    random_crop(300),
    random_crop(300, padding=40),
    random_crop(300, mode="repeat"),
    random_crop(seconds=0.02, rate=16_000, place="middle"),
    crop_or_pad(300),
    crop_or_pad(301, place="end", mode="repeat"),
    pad(250),
    pad(250, place="middle", mode="repeat"),
    mono(),
    random_gain(),
    random_gain(-3, 0),
    normalize(),
    normalize(mean=-0.1, std=2),
    mel_spectrogram(16_000, mels=20),
    mel_spectrogram(8_000, n_fft=64, hop=24, win=50, mels=8, log="db", top_db=60, power=1),
    mel_spectrogram(16_000, n_fft=63, hop=16, mels=6, log=False, scale="slaney", norm="slaney"),
]
ON_SPECTROGRAMS: list[Operation] = [
    spec_augment(),
    spec_augment(3, 10, 1, 5, share=1.0, fill=0.0),
    spec_augment(time_masks=0),
    normalize(),
    normalize(-4.0, 4.5),
]
OPERATIONS = [*ON_WAVEFORMS, *ON_SPECTROGRAMS[:3]]
CASES = [(operation, 2) for operation in ON_WAVEFORMS] + [(o, 3) for o in ON_SPECTROGRAMS]

bad: Any = ps_audio
"""The same operations, untyped, for arguments that a type checker would reject."""

cases = st.sampled_from(CASES)
frames_of = st.one_of(st.integers(1, 5), st.sampled_from([249, 250, 300, 380]), st.integers(1, 900))


def clip(ndim: int, channels: int, frames: int, seed: int = 0) -> Any:
    """A waveform, or a spectrogram of 12 mels."""
    made = sound(frames, channels, seed)
    if ndim == 2:
        return made
    return (made[:, np.newaxis] * 10 - 4 + np.arange(12)[:, np.newaxis]).astype(np.float32)


def run(operation: Operation, value: Any, key: Key) -> Any:
    params = None
    if operation.random:
        params = operation.draw(Keyed(5, operation.name).at(key), value.shape)
    return operation.apply(value, params)


@given(cases, st.integers(1, 3), frames_of, st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_the_output_matches_its_spec_and_the_input_is_not_modified(
    case: tuple[Operation, int], channels: int, frames: int, index: int
) -> None:
    operation, ndim = case
    value = clip(ndim, channels, frames, index)
    before = value.copy()
    value.flags.writeable = False
    found = run(operation, value, Key(index))
    assert ArraySpec.of(found.shape, found.dtype) == operation.output(
        ArraySpec.of(value.shape, value.dtype)
    )
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(value, before)


@given(cases, st.integers(1, 3), frames_of)
@settings(max_examples=100, deadline=None)
def test_an_output_of_unknown_size_agrees_with_the_real_one(
    case: tuple[Operation, int], channels: int, frames: int
) -> None:
    operation, ndim = case
    shape = (None, None) if ndim == 2 else (None, 12, None)
    stated = operation.output(ArraySpec.of(shape, np.float32))
    found = run(operation, clip(ndim, channels, frames), Key(0))
    assert isinstance(stated, ArraySpec)
    assert stated.dtype == found.dtype
    assert len(stated.shape) == found.ndim
    assert all(
        size is None or size == real for size, real in zip(stated.shape, found.shape, strict=True)
    )


@given(cases, st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_the_same_key_gives_the_same_bits(
    case: tuple[Operation, int], index: int, epoch: int, replica: int
) -> None:
    operation, ndim = case
    key = Key(index, epoch, replica)
    value = clip(ndim, 2, 500)
    first = run(operation, value, key)
    run(operation, value, Key(index + 1, epoch, replica))
    np.testing.assert_array_equal(first, run(operation, value.copy(), key))


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op.random], ids=repr)
def test_different_keys_give_different_parameters(operation: Operation) -> None:
    choices = Keyed(5, operation.name)
    shape = (1, 80, 400) if operation.name == "spec_augment" else (1, 900)
    drawn = [repr(operation.draw(choices.at(Key(i)), shape)) for i in range(50)]
    assert len(set(drawn)) > 20


@given(cases, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_views_of_any_layout_work_like_copies(case: tuple[Operation, int], index: int) -> None:
    operation, ndim = case
    whole = clip(ndim, 6, 700, index)
    views = {
        "cropped": whole[..., 3:410],
        "strided": whole[::2, ..., ::3],
        "reversed": whole[..., ::-1],
        "one channel": whole[1:2],
        "channels last in memory": np.ascontiguousarray(np.moveaxis(whole, 0, -1)),
    }
    views["channels last in memory"] = np.moveaxis(views["channels last in memory"], -1, 0)
    for name, view in views.items():
        found = run(operation, view, Key(index))
        expected = run(operation, np.ascontiguousarray(view), Key(index))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_operations_and_parameters_travel_by_pickle(case: tuple[Operation, int]) -> None:
    operation, ndim = case
    copy = pickle.loads(pickle.dumps(operation))
    assert copy == operation
    assert hash(copy) == hash(operation)
    value = clip(ndim, 2, 600)
    params = None
    if operation.random:
        params = operation.draw(Keyed(1, "x").at(Key(4)), value.shape)
    again = pickle.loads(pickle.dumps(params))
    np.testing.assert_array_equal(operation.apply(value, params), copy.apply(value, again))


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if dataclasses.fields(o)], ids=repr)  # type: ignore[arg-type]
def test_operations_are_frozen(operation: Any) -> None:
    field = dataclasses.fields(operation)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(operation, field, 0)


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_wrong_inputs_are_refused_when_built_and_when_applied(operation: Operation) -> None:
    name = operation.name
    good = (1, 12, 90) if name == "spec_augment" else (1, 900)
    chosen = operation.draw(np.random.default_rng(0), good) if operation.random else None
    with pytest.raises(PipelineError, match=rf"{name} got encoded bytes.*decode\(\)"):
        operation.output(BytesSpec())
    with pytest.raises(PipelineError, match=rf"{name} got encoded bytes.*decode\(\)"):
        operation.apply(b"RIFF", chosen)
    with pytest.raises(PipelineError, match=f"{name} got list"):
        operation.apply([[1.0]], chosen)
    wrong: list[tuple[tuple[int, ...], Any]] = [
        ((900,), np.float32),
        ((1, 1, 1, 9), np.float32),
        (good, np.float64),
        (good, np.int16),
        ((900, *good[1:]), np.float32),
        ((0, *good[1:]), np.float32),
        ((*good[:-1], 0), np.float32),
    ]
    if name != "normalize":
        wrong.append(((1, 900) if name == "spec_augment" else (1, 12, 90), np.float32))
    for shape, dtype in wrong:
        with pytest.raises(PipelineError, match=f"^{name} got"):
            operation.output(ArraySpec.of(shape, dtype))
        with pytest.raises(PipelineError, match=f"^{name} got"):
            operation.apply(np.zeros(shape, dtype), chosen)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: bad.decode(rate=0), "rate is 0"),
        (lambda: bad.decode(rate=16e3), "rate is 16000.0"),
        (lambda: bad.decode(rate=10**7), "rate is 10000000"),
        (lambda: bad.decode(mono=1), "mono is 1"),
        (lambda: bad.resample(0, 16_000), "from_rate is 0"),
        (lambda: bad.resample(16_000, 2.5), "to_rate is 2.5"),
        (lambda: bad.random_crop(), "neither frames nor seconds"),
        (lambda: bad.random_crop(100, seconds=1.0), "both frames and seconds"),
        (lambda: bad.random_crop(100, rate=16_000), "together with frames"),
        (lambda: bad.random_crop(seconds=1.0), "rate is missing"),
        (lambda: bad.random_crop(seconds=-1.0, rate=16_000), "seconds is -1.0"),
        (lambda: bad.random_crop(seconds=1e-9, rate=16_000), "less than one frame"),
        (lambda: bad.random_crop(0), "frames is 0"),
        (lambda: bad.random_crop(9, padding=-1), "padding is -1"),
        (lambda: bad.random_crop(9, mode="reflect"), "mode is 'reflect'"),
        (lambda: bad.random_crop(9, place="left"), "place is 'left'"),
        (lambda: bad.crop_or_pad(9, place="random"), "place is 'random'"),
        (lambda: bad.pad(True), "frames is True"),
        (lambda: bad.random_gain(6, -6), "smaller number first"),
        (lambda: bad.random_gain("loud"), "is 'loud'"),
        (lambda: bad.normalize(mean=1.0), "std is missing"),
        (lambda: bad.normalize(std=1.0), "mean is missing"),
        (lambda: bad.normalize(0.0, 0.0), "std is 0.0"),
        (lambda: bad.mel_spectrogram(None), "rate is None"),
        (lambda: bad.mel_spectrogram(16_000, hop=0), "hop is 0"),
        (lambda: bad.mel_spectrogram(16_000, mels=-2), "mels is -2"),
        (lambda: bad.mel_spectrogram(16_000, win=401), "win is 401"),
        (lambda: bad.mel_spectrogram(16_000, f_max=9000), "f_max is 9000"),
        (lambda: bad.mel_spectrogram(16_000, f_min=500, f_max=400), "f_max is 400"),
        (lambda: bad.mel_spectrogram(16_000, power=0), "power is 0"),
        (lambda: bad.mel_spectrogram(16_000, floor=0), "floor is 0"),
        (lambda: bad.mel_spectrogram(16_000, log=1), "log is 1"),
        (lambda: bad.mel_spectrogram(16_000, log="dB"), "log is 'dB'"),
        (lambda: bad.mel_spectrogram(16_000, top_db=80), "top_db is 80"),
        (lambda: bad.mel_spectrogram(16_000, scale="bark"), "scale is 'bark'"),
        (lambda: bad.mel_spectrogram(16_000, norm="l2"), "norm is 'l2'"),
        (lambda: bad.spec_augment(time_masks=-1), "time_masks is -1"),
        (lambda: bad.spec_augment(freq=2.5), "freq is 2.5"),
        (lambda: bad.spec_augment(share=1.5), "share is 1.5"),
        (lambda: bad.spec_augment(fill="median"), "fill is 'median'"),
        (lambda: bad.spec_augment(fill=float("nan")), "fill is nan"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(make: Any, found: str) -> None:
    with pytest.raises(PipelineError, match=found) as caught:
        make()
    assert "give " in str(caught.value).lower()


def test_operations_have_the_names_users_write() -> None:
    for name in ps_audio.__all__:
        made = getattr(ps_audio, name)
        assert issubclass(made, Operation)
        assert made.__new__(made).name == name
        assert made.field == "audio"
    assert len(ps_audio.__all__) == 10


def test_lengths_given_in_two_ways_are_one_operation() -> None:
    assert random_crop(8_000) == random_crop(seconds=0.5, rate=16_000)
    assert hash(pad(8_000)) == hash(pad(seconds=0.5, rate=16_000))
    assert mel_spectrogram(16_000) == mel_spectrogram(16_000, win=400, f_max=8_000)
