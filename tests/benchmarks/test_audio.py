"""The benchmark ``audio``: its files, equal work of the contestants, and a short run."""

from __future__ import annotations

import io
import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main, parse
from benchmarks.audio import audio
from benchmarks.audio.recordings import (
    Recordings,
    as_folder,
    mel_filters,
    sound_files,
    unpack,
)
from benchmarks.peers.by_hand_audio import Features, cut, masked, resampled
from benchmarks.peers.tfdata_audio import sinc_filter

WORK = Recordings(Path("nowhere"), batch=4, workers=1)


def wav(frames: int, rate: int = 8_000, seed: int = 0) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(-9_000, 9_000, frames)
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(noise.astype("<i2").tobytes())
    return file.getvalue()


def parquet(path: Path, **columns: list[Any]) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def folder_of(place: Path, count: int) -> Path:
    for number in range(count):
        (place / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        sound = wav(2_000 + 100 * number, seed=number)
        (place / "ab"[number % 2] / f"{number:03}.wav").write_bytes(sound)
    return place


# Files.


def test_a_parquet_file_becomes_files_in_class_folders(tmp_path: Path) -> None:
    sounds = [wav(10, seed=seed) for seed in range(3)]
    source = parquet(tmp_path / "s.parquet", audio=sounds, label=[10, 2, 10])
    with as_folder(source) as folder:
        paths, labels = sound_files(folder)
        assert [Path(path).read_bytes() for path in paths] == [sounds[1], sounds[0], sounds[2]]
        assert labels == [0, 1, 1]
    assert not folder.exists()


def test_bytes_in_a_struct_are_read(tmp_path: Path) -> None:
    rows = [{"bytes": b"fLaC and more", "path": "a.flac"}]
    unpack(parquet(tmp_path / "s.parquet", audio=rows, label=[0]), tmp_path)
    assert (tmp_path / "00000" / "0000000.flac").read_bytes() == b"fLaC and more"


def test_a_folder_is_read_where_it_is(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    (tmp_path / "a" / "notes.txt").write_text("x")
    with as_folder(tmp_path) as folder:
        assert folder == tmp_path
    assert [Path(path).name for path in sound_files(tmp_path)[0]] == [
        "000.wav",
        "002.wav",
        "001.wav",
    ]


def test_a_row_that_is_no_recording_is_named(tmp_path: Path) -> None:
    source = parquet(tmp_path / "s.parquet", audio=[wav(10), b"ID3 song"], label=[0, 0])
    with pytest.raises(ValueError, match=r"row 1 of .* neither WAV nor FLAC: .*b'ID3 song'"):
        unpack(source, tmp_path)


def test_a_parquet_file_without_labels_is_an_error_that_says_so(tmp_path: Path) -> None:
    source = parquet(tmp_path / "s.parquet", audio=[wav(10)])
    with pytest.raises(ValueError, match="no column label"):
        unpack(source, tmp_path)


def test_data_is_a_folder_or_a_parquet_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parquet(tmp_path / "s.parquet", audio=[wav(10)], label=[0])
    for path in (tmp_path, source):
        assert parse(["audio", "--data", str(path)])[1].data == path
    other = tmp_path / "s.csv"
    other.touch()
    for name, wrong in (("audio", other), ("audio", tmp_path / "x.parquet"), ("load", source)):
        with pytest.raises(SystemExit):
            parse([name, "--data", str(wrong)])
        assert f"{str(wrong)!r} is not a folder" in capsys.readouterr().err


def test_too_few_recordings_are_an_error_before_any_run(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    with pytest.raises(SystemExit, match=r"has 3 WAV or FLAC files .* needs 64"):
        main(["audio", "--data", str(tmp_path)])


# The same work.


def test_filters_are_those_of_penstock() -> None:
    from penstock.audio.mel import triangles

    ours = triangles(WORK.rate, WORK.n_fft, WORK.mels, 0.0, WORK.rate / 2, "slaney", "slaney")
    np.testing.assert_allclose(mel_filters(WORK), ours, rtol=1e-5, atol=1e-9)


def test_the_spectrogram_by_hand_is_that_of_penstock() -> None:
    pytest.importorskip("scipy")
    from penstock import audio as ours

    sound = np.random.default_rng(0).normal(0, 0.1, WORK.frames).astype(np.float32)
    mel = ours.mel_spectrogram(WORK.rate, floor=WORK.floor, scale="slaney", norm="slaney")
    none = Recordings(WORK.data, 4, 1, masks=0)
    found = Features(none)(sound, random)
    assert (found.shape, found.dtype) == ((1, WORK.mels, WORK.steps), np.float32)
    np.testing.assert_allclose(found, mel.apply(sound[np.newaxis], None), atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
def test_the_filter_that_tensorflow_is_given_resamples_as_penstock_does(rate: int) -> None:
    pytest.importorskip("scipy")
    from penstock import audio as ours

    sound = np.random.default_rng(0).normal(0, 0.1, 4_000).astype(np.float32)
    kernel, step, before = sinc_filter(rate, WORK.rate)
    padded = np.pad(sound, (before, before + step))
    parts = np.lib.stride_tricks.sliding_window_view(padded, len(kernel))[::step]
    wanted = ours.resample(rate, WORK.rate).apply(sound[np.newaxis], None)[0]
    np.testing.assert_allclose((parts @ kernel[:, 0]).ravel()[: len(wanted)], wanted, atol=1e-6)


def test_resampling_by_hand_is_scipys_own() -> None:
    signal = pytest.importorskip("scipy.signal")
    sound = np.random.default_rng(0).normal(0, 0.1, 1_000).astype(np.float32)
    assert resampled(sound, WORK.rate, WORK) is sound
    for rate, up, down in ((8_000, 2, 1), (48_000, 1, 3), (44_100, 160, 441)):
        np.testing.assert_array_equal(
            resampled(sound, rate, WORK), signal.resample_poly(sound, up, down)
        )


def test_short_sounds_are_padded_at_random_and_long_ones_cut() -> None:
    draws = random.Random(0)
    short = np.arange(1, 15_001, dtype=np.float32)
    places = set()
    for _ in range(20):
        found = cut(short, WORK, draws)
        first = int(np.flatnonzero(found)[0])
        places.add(first)
        assert len(found) == WORK.frames
        np.testing.assert_array_equal(found[first : first + len(short)], short)
        assert np.count_nonzero(found) == len(short)
    assert len(places) > 10
    long = np.arange(20_000, dtype=np.float32)
    firsts = {float(cut(long, WORK, draws)[0]) for _ in range(20)}
    assert len(firsts) > 10
    assert all(np.array_equal(np.diff(cut(long, WORK, draws)), np.ones(15_999)) for _ in range(5))


def test_masks_are_bands_of_the_mean_and_no_wider_than_allowed() -> None:
    plain = np.arange(WORK.mels * WORK.steps, dtype=np.float32).reshape(WORK.mels, WORK.steps)
    for seed in range(30):
        found = masked(plain.copy(), WORK, random.Random(seed))[0]
        hidden = found != plain
        assert set(found[hidden].tolist()) <= {float(plain.mean())}
        times, pitches = hidden.all(axis=0), hidden.all(axis=1)
        np.testing.assert_array_equal(hidden, times | pitches[:, np.newaxis])
        assert times.sum() <= WORK.masks * WORK.time
        assert pitches.sum() <= WORK.masks * WORK.freq


# The race.


def test_the_benchmark_runs_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("soundfile")
    data, kept = folder_of(tmp_path / "data", 16), tmp_path / "audio.json"
    arguments = ["--peers", "none", "--rounds", "1", "--samples", "16", "--warm-up", "0.01"]
    ended = main(["audio", "--data", str(data), "--batch", "8", "--json", str(kept), *arguments])
    said = capsys.readouterr().out
    assert ended == 0
    assert "16 recordings to 1 s at 16 kHz" in said
    lane = json.loads(kept.read_text())["data"]["audio"][audio.PIPELINE.title]
    assert lane["rounds"]["0"]["look"]["shape"] == [1, WORK.mels, WORK.steps]
    assert lane["rounds"]["0"]["look"]["dtype"] == "float32"


def test_tf_data_is_left_out_of_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[str] = []

    def no_race(_: str, contestants: Any, *__: Any, **___: Any) -> list[Any]:
        raced[:] = [contestant.title for contestant in contestants]
        return []

    monkeypatch.setattr(audio, "race", no_race)
    folder_of(tmp_path, 8)
    options = parse(["audio", "--data", str(tmp_path), "--batch", "4"])[1]
    notes = audio.run(options).notes
    assert (audio.TF_DATA.title in raced, len(notes)) == (True, 0)
    (tmp_path / "a" / "z.flac").write_bytes(b"fLaC")
    notes = audio.run(options).notes
    assert audio.TF_DATA.title not in raced
    assert audio.DALI.title in raced
    assert notes == ("audio: tf.data is left out: it reads only WAV files",)
