"""Decoding files of every kind, and refusing the broken ones."""

from __future__ import annotations

import contextlib
import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.audio import codec, decode, mono, resample
from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.operation import ArraySpec, BytesSpec
from tests.support.wavs import chunk, format_chunk, numbers, packed, riff, sound, wav

soundfile = native.load_soundfile()
KNOWN = soundfile.available_formats()

OTHERS = [
    pair
    for pair in (
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("W64", "PCM_16"),
    )
    if pair[0] in KNOWN
]


def encode(waveform: Any, kind: str, subtype: str, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, waveform.T, rate, format=kind, subtype=subtype)
    return file.getvalue()


def by_libsndfile(data: bytes) -> Any:
    found, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return found.T


DATA = chunk(b"data", packed(numbers(16, 40), 16))


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("extensible", [False, True])
def test_integers_of_every_width_are_scaled_to_one(
    bits: int, channels: int, extensible: bool
) -> None:
    values = numbers(bits, 300 * channels)
    data = riff(
        format_chunk(channels=channels, bits=bits, extensible=extensible),
        chunk(b"data", packed(values, bits)),
    )
    found = decode().apply(data, None)
    expected = (values / 2.0 ** (bits - 1)).reshape(300, channels).T.astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert found.min() == -1.0
    np.testing.assert_array_equal(found, by_libsndfile(data))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("extensible", [False, True])
def test_floats_are_not_scaled(bits: int, extensible: bool) -> None:
    waveform = 1.5 * sound(200, 2)
    data = riff(
        format_chunk(3, 2, bits=bits, extensible=extensible),
        chunk(b"fact", bytes(4)),
        chunk(b"data", waveform.T.astype(f"<f{bits // 8}").tobytes()),
    )
    np.testing.assert_array_equal(decode().apply(data, None), waveform)


@pytest.mark.parametrize("kind", OTHERS, ids="-".join)
@pytest.mark.parametrize("channels", [1, 2])
def test_other_formats_give_what_libsndfile_gives(kind: tuple[str, str], channels: int) -> None:
    data = encode(sound(5_000, channels), *kind)
    found = decode().apply(data, None)
    assert found.shape[0] == channels
    # The last bits of an MP3 may differ between two readings.
    np.testing.assert_allclose(found, by_libsndfile(data), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [("WAV", "PCM_16"), *OTHERS], ids="-".join)
def test_mono_is_the_mean_of_the_channels(kind: tuple[str, str]) -> None:
    data = encode(sound(2_000, 2), *kind)
    found = decode(mono=True).apply(data, None)
    expected = mono().apply(decode().apply(data, None), None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_every_file_is_resampled_to_the_given_rate(rate: int) -> None:
    data = wav(sound(3_000, 2), rate)
    found = decode(rate=16_000).apply(data, None)
    own = decode().apply(data, None)
    assert own.shape == (2, 3_000)
    np.testing.assert_array_equal(found, resample(rate, 16_000).apply(own, None))
    np.testing.assert_array_equal(decode(rate=rate).apply(data, None), own)


def test_files_of_the_wave_module_are_read() -> None:
    levels = np.round(sound(500, 2) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, 16_000, 0, "NONE", ""))
        out.writeframes(levels.T.tobytes())
    found = decode().apply(file.getvalue(), None)
    np.testing.assert_array_equal(found, levels / np.float32(32768))


def test_other_chunks_are_skipped_with_their_padding() -> None:
    plain = decode().apply(riff(format_chunk(), DATA), None)
    for data in (
        riff(chunk(b"LIST", b"INFOISFT\x03\x00\x00\x00abc\x00"), format_chunk(), DATA),
        riff(format_chunk(), chunk(b"LIST", b"odd"), DATA, chunk(b"id3 ", b"tail")),
        riff(chunk(b"JUNK", bytes(29)), format_chunk(), chunk(b"fact", bytes(4)), DATA),
        riff(format_chunk(), DATA) + b"more",
    ):
        np.testing.assert_array_equal(decode().apply(data, None), plain)


def test_the_padding_of_an_odd_number_of_bytes_is_not_read() -> None:
    data = riff(format_chunk(bits=8), chunk(b"data", bytes([128, 255, 0])), chunk(b"x   ", b"yy"))
    np.testing.assert_array_equal(decode().apply(data, None), [[0.0, 127 / 128, -1.0]])


@pytest.mark.parametrize(
    ("whole", "stated"),
    [(0xFFFFFFFF, 0xFFFFFFFF), (0, 0), (0xFFFFFFFF, 0), (0x7FFFF024, 0x7FFFF000)],
)
def test_a_stream_without_a_stated_length_is_read_to_the_end(whole: int, stated: int) -> None:
    values = numbers(16, 40)
    content = packed(values, 16) + b"\x01"  # half a frame, as when a recording is interrupted
    data = riff(format_chunk(), chunk(b"data", content, stated), size=whole)[:-1]
    np.testing.assert_array_equal(decode().apply(data, None)[0], values / np.float32(32768))


def test_sizes_of_64_bits_are_read_and_checked() -> None:
    data = encode(sound(300), "RF64", "PCM_16")
    np.testing.assert_array_equal(decode().apply(data, None), by_libsndfile(data))
    with pytest.raises(SourceError, match="cut short"):
        decode().apply(data[:-2], None)


@pytest.mark.parametrize(
    "kind", [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_24"), *OTHERS], ids="-".join
)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99, 0.999])
def test_a_file_cut_short_is_refused(kind: tuple[str, str], part: float) -> None:
    data = encode(sound(9_000, 2), *kind)
    cut = data[: int(len(data) * part)]
    with pytest.raises(SourceError, match=f"{len(cut):,} bytes that begin") as caught:
        decode().apply(cut, None)
    assert repr(cut[:12]) in str(caught.value)
    assert "or leave it out." in str(caught.value)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (riff(format_chunk(), chunk(b"data", b"")), "no sound"),
        (riff(format_chunk(), chunk(b"data", b"\x00")), "no sound"),
        (riff(format_chunk(), chunk(b"data", b"", 0xFFFFFFFF)), "no sound"),
        (riff(format_chunk()), "no chunk b'data'"),
        (riff(DATA, format_chunk()), "chunk b'data' comes before the chunk b'fmt '"),
        (riff(DATA), "comes before the chunk"),
        (riff(format_chunk(), chunk(b"data", bytes(80), 82)), "82 bytes of sound, but only 80"),
        (riff(format_chunk(), chunk(b"LIST", bytes(4), 2**32 - 1), DATA), "chunk b'LIST' has"),
        (riff(chunk(b"fmt ", bytes(14)), DATA), "format chunk has 14 bytes"),
        (riff(format_chunk(rate=0), DATA), "0 Hz"),
        (riff(format_chunk(rate=2**32 - 1), DATA), "4,294,967,295 Hz"),
        (riff(format_chunk(channels=1000, block=2000), chunk(b"data", bytes(4000))), "channels"),
        (riff(format_chunk(3, bits=32), chunk(b"data", b"\x00\x00\xc0\x7f")), "not finite"),
        (riff(format_chunk(3, bits=64), chunk(b"data", struct.pack("<d", 1e300))), "not finite"),
        (riff(format_chunk(channels=0, block=0), DATA), "libsndfile"),
        (riff(format_chunk(bits=0, block=0), DATA), "libsndfile"),
        (riff(format_chunk(tag=0x1234), DATA), "libsndfile"),
        (b"RIFF\x04\x00\x00\x00WAVE", "no chunk b'data'"),
        (b"RIFF", "libsndfile"),
        (b"RIFF\x10\x00\x00\x00AVI LIST", "libsndfile"),
        (b"OggS", "last page is not marked as the end"),
        (b"fLaC\x00\x00\x00\x22", "libsndfile"),
        (b"FORM\x00\x00\x00\x04AIFF", "libsndfile"),
        (b"<html>404</html>", "libsndfile"),
        (b"\x00", "libsndfile"),
    ],
)
@pytest.mark.parametrize("mix", [False, True])
def test_the_error_says_what_is_wrong_with_a_file(data: bytes, found: str, mix: bool) -> None:
    with pytest.raises(SourceError, match=found) as caught:
        decode(rate=16_000, mono=mix).apply(data, None)
    assert f"{len(data):,} bytes that begin" in str(caught.value)


def test_a_header_that_claims_billions_of_frames_costs_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flac = bytearray(encode(sound(3_000), "FLAC", "PCM_16"))
    flac[8 + 13] |= 0x0F  # the upper bits of the 36-bit frame count
    asked: list[int] = []
    read = soundfile.SoundFile.read

    def watched(self: Any, frames: int, **options: Any) -> Any:
        asked.append(frames)
        return read(self, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", watched)
    with pytest.raises(SourceError, match="cut short"):
        decode().apply(bytes(flac), None)
    assert 0 < max(asked) <= 1 << 20


def test_a_flac_without_a_stated_length_is_refused_with_the_remedy() -> None:
    flac = bytearray(encode(sound(3_000), "FLAC", "PCM_16"))
    flac[8 + 13] &= 0xF0
    flac[8 + 14 : 8 + 18] = bytes(4)
    with pytest.raises(SourceError, match=r"does not state its length.*Write it again"):
        decode().apply(bytes(flac), None)


def test_long_files_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(np.zeros((1, 50_000), np.float32), "FLAC", "PCM_16")
    monkeypatch.setattr(codec, "_FRAMES_AT_ONCE", 3_000)
    monkeypatch.setattr(codec, "_FRAMES_FOR_A_BYTE", 0)
    np.testing.assert_array_equal(decode().apply(data, None), np.zeros((1, 50_000)))


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_damage_anywhere_gives_a_sound_or_a_source_error(data: st.DataObject) -> None:
    kinds = [("WAV", "PCM_24"), ("WAV", "IMA_ADPCM"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")]
    whole = bytearray(encode(sound(400, 2), *data.draw(st.sampled_from(kinds))))
    places = st.one_of(st.integers(0, 60), st.integers(0, len(whole) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        whole[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SourceError):
        found = decode(rate=16_000, mono=True).apply(bytes(whole), None)
        assert found.shape[0] == 1
        assert np.isfinite(found).all()


def test_any_container_of_bytes_is_accepted() -> None:
    for data in (wav(sound(300, 2)), encode(sound(300, 2), "FLAC", "PCM_16")):
        expected = decode().apply(data, None)
        spread = np.zeros(2 * len(data), np.uint8)
        spread[::2] = np.frombuffer(data, np.uint8)
        for given_as in (
            bytearray(data),
            memoryview(data),
            memoryview(spread.tobytes())[::2],
            memoryview(data).cast("b"),
            np.frombuffer(data, np.uint8),
            spread[::2],
        ):
            np.testing.assert_array_equal(decode().apply(given_as, None), expected)


@pytest.mark.parametrize("given_as", [b"", bytearray(), np.zeros(0, np.uint8)])
def test_no_bytes_are_refused(given_as: Any) -> None:
    with pytest.raises(SourceError, match="0 bytes: the file is empty"):
        decode().apply(given_as, None)


@pytest.mark.parametrize(
    ("given_as", "found"),
    [
        ("sound.wav", "got str"),
        (None, "got NoneType"),
        (np.zeros((1, 400), np.float32), r"shape \(1, 400\)"),
        (np.zeros(9, np.int16), "int16"),
    ],
)
def test_values_that_are_not_bytes_are_refused_with_their_type(given_as: Any, found: str) -> None:
    with pytest.raises(SourceError, match=found):
        decode().apply(given_as, None)


def test_the_output_is_known_but_for_the_length() -> None:
    assert decode().output(BytesSpec()) == ArraySpec.of((None, None), np.float32)
    assert decode(mono=True).output(None) == ArraySpec.of((1, None), np.float32)
    assert decode(8_000).output(ArraySpec.of((None,), np.uint8)) == decode().output(None)


def test_decoding_twice_is_refused_when_built() -> None:
    with pytest.raises(PipelineError, match="decoded already, leave it out"):
        decode().output(decode().output(BytesSpec()))


def test_plain_wav_needs_no_library_and_others_name_their_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flac = encode(sound(100), "FLAC", "PCM_16")
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    native.load_soundfile.cache_clear()
    try:
        assert decode().apply(wav(sound(100)), None).shape == (1, 100)
        with pytest.raises(MissingExtraError, match=r'pip install "penstock\[audio\]"'):
            decode().apply(flac, None)
    finally:
        native.load_soundfile.cache_clear()
