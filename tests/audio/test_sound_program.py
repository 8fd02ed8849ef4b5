"""The compiled kernel gives the bits of NumPy and SciPy, for single operations and whole roads."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

import penstock as ps
from penstock import native
from penstock.audio import (
    arithmetic,
    crop_or_pad,
    decode,
    mel_spectrogram,
    mono,
    normalize,
    pad,
    random_crop,
    random_gain,
    resample,
    spec_augment,
)
from penstock.audio.codec import Unreadable, read_by_libsndfile
from penstock.audio.mel import natural_log
from penstock.audio.program import SoundWork
from penstock.engine.pools.native_road import can_be_native
from penstock.errors import SampleError, SourceError
from penstock.keyed import Key, Keyed
from penstock.operation import Operation
from penstock.pipeline import Pipeline
from penstock.source.parquet import ParquetSource
from tests.support.contract import epochs
from tests.support.jpegs import encode, picture
from tests.support.wavs import chunk, format_chunk, numbers, packed, riff, sound, wav

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

WithoutKernel = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> WithoutKernel:
    """Runs a function as on a machine without the compiled kernel."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_NO_KERNEL", "1")
            assert native.kernel() is None
            return function()

    return run


RATES = [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (16_000, 44_100), (3, 7), (441, 1)]


@pytest.mark.parametrize("rates", [*RATES, (16_000, 15_999)], ids=str)
@pytest.mark.parametrize("frames", [1, 2, 31, 500, 9_001])
def test_resampling_has_the_bits_of_the_sparse_matrix(
    rates: tuple[int, int], frames: int, without_kernel: WithoutKernel
) -> None:
    clip = sound(frames, 2, seed=frames)
    operation = resample(*rates)
    expected = without_kernel(lambda: operation.apply(clip, None))
    np.testing.assert_array_equal(operation.apply(clip, None), expected)


LENGTHS = [2, 3, 4, 5, 6, 10, 12, 15, 18, 20, 25, 27, 32, 60, 128, 150, 256, 400, 480, 512, 1200]
"""Every factor first, last and in between."""


@pytest.mark.filterwarnings("ignore:mel_spectrogram")
@pytest.mark.parametrize("n_fft", LENGTHS)
def test_transforms_of_every_smooth_length_have_the_bits_of_scipy(
    n_fft: int, without_kernel: WithoutKernel
) -> None:
    clip = sound(2_500, 2, seed=n_fft)
    operation = mel_spectrogram(16_000, n_fft, hop=77, mels=9, log=False)
    assert operation.kernel_work(bytes(16)) is not None
    expected = without_kernel(lambda: operation.apply(clip, None))
    np.testing.assert_array_equal(operation.apply(clip, None), expected)


SPECTROGRAMS: dict[str, Any] = {
    "default": {},
    "slaney": {"scale": "slaney", "norm": "slaney", "floor": 1e-6},
    "decibels": {"log": "db", "top_db": 40.0},
    "magnitude": {"power": 1.0, "log": "db"},
    "not centred": {"center": False},
    "narrow window": {"n_fft": 512, "win": 300, "hop": 100, "mels": 40},
}


@pytest.mark.parametrize("case", SPECTROGRAMS)
@pytest.mark.parametrize("frames", [512, 1_600, 16_000])
def test_spectrograms_have_the_bits_of_numpy(
    case: str, frames: int, without_kernel: WithoutKernel
) -> None:
    clip = sound(frames, 2, seed=frames)
    clip[:, frames // 2 :] = 0
    operation = mel_spectrogram(16_000, **SPECTROGRAMS[case])
    expected = without_kernel(lambda: operation.apply(clip, None))
    np.testing.assert_array_equal(operation.apply(clip, None), expected)


@pytest.mark.parametrize(
    "operation",
    [
        mel_spectrogram(16_000, n_fft=401, mels=20),
        mel_spectrogram(16_000, power=3.0),
        mel_spectrogram(16_000, floor=1e-42),
        resample(16_000, 15_999),
    ],
    ids=repr,
)
def test_what_the_kernel_cannot_compute_is_left_to_python(operation: Operation) -> None:
    assert operation.kernel_work(bytes(16)) is None


def test_logarithms_are_within_one_unit_in_the_last_place() -> None:
    least, most = np.log(np.finfo(np.float32).tiny), np.log(np.finfo(np.float32).max)
    exponents = np.random.default_rng(0).uniform(least, most, 100_000)
    values = np.concatenate([np.exp(exponents), np.linspace(0.4, 2.5, 100_000)]).astype(np.float32)
    exact = np.log(values.astype(np.float64))
    units = np.abs(natural_log(values) - exact) / np.spacing(np.abs(exact.astype(np.float32)))
    assert units.max() < 1.0
    odd = np.array([1.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(natural_log(odd), np.array([0.0, np.inf, np.nan], np.float32))


CHAINS: dict[str, list[Operation]] = {
    "mel": [random_crop(4_000), mel_spectrogram(16_000, mels=20), spec_augment(2, 9, 2, 5)],
    "normalized": [crop_or_pad(3_000, place="end"), random_gain(), normalize()],
    "by given numbers": [random_crop(3_000, padding=50), normalize(mean=0.1, std=0.3)],
    "repeated": [random_crop(9_001, mode="repeat"), mono()],
    "in the middle": [random_crop(9_000, place="middle"), crop_or_pad(8_001, mode="repeat")],
    "padded": [pad(7_000, place="end"), pad(7_003, mode="repeat"), crop_or_pad(7_000)],
    "resampled": [resample(16_000, 22_050), crop_or_pad(2_000), resample(22_050, 8_000)],
    "zeros in masks": [
        crop_or_pad(2_000),
        mel_spectrogram(16_000, mels=12, n_fft=128),
        normalize(),
        spec_augment(3, 4, 1, 5, share=1.0, fill=0.0),
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_a_program_has_the_bits_of_its_operations(
    chain: str, channels: int, without_kernel: WithoutKernel
) -> None:
    operations = [decode(rate=16_000), *CHAINS[chain]]
    works = [o.kernel_work(Keyed(7, str(n)).key) for n, o in enumerate(operations)]
    work = works[0]
    for below in works[1:]:
        work = work.joined(below)
    program = work.program()
    for frames in (900, 4_000, 6_500):
        data = wav(sound(frames, channels, seed=frames))
        for key in (Key(0), Key(5, 3), Key(77, 1, 2)):

            def by_python(data: Any = data, key: Key = key) -> Any:
                value: Any = data
                for number, operation in enumerate(operations):
                    rng = Keyed(7, str(number)).at(key)
                    params = operation.draw(rng, value.shape) if operation.random else None
                    value = operation.apply(value, params)
                return value

            expected = without_kernel(by_python)
            out = np.full(expected.shape, np.nan, np.float32)
            assert program.run(data, out, *key)
            np.testing.assert_array_equal(out, expected)


def _floats(bits: int, count: int) -> bytes:
    return np.random.default_rng(1).uniform(-1, 1, count).astype(f"<f{bits // 8}").tobytes()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int16", "int24", "int32", "float32", "float64"])
def test_wav_files_of_every_width_have_the_bits_of_numpy(
    kind: str, extensible: bool, channels: int, mixed: bool
) -> None:
    tag, bits = (3, int(kind[5:])) if kind.startswith("float") else (1, int(kind[3:]))
    count = 700 * channels
    content = _floats(bits, count) if tag == 3 else packed(numbers(bits, count), bits)
    header = format_chunk(tag, channels, bits=bits, extensible=extensible)
    data = riff(chunk(b"LIST", b"odd"), header, chunk(b"data", content))
    operation = decode(mono=mixed)
    expected = operation.apply(data, None)
    out = np.empty(expected.shape, np.float32)
    assert operation.kernel_work(bytes(16)).program().run(data, out, 0, 0, 0)
    np.testing.assert_array_equal(out, expected)


def encoded(waveform: Any, kind: str, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, waveform.T, rate, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
def test_flac_files_have_the_bits_of_libsndfile(channels: int, mixed: bool) -> None:
    data = encoded(sound(5_000, channels), "FLAC")
    operation = decode(mono=mixed)
    expected = operation.apply(data, None)
    out = np.empty(expected.shape, np.float32)
    program = operation.kernel_work(bytes(16)).program()
    assert program.run(data, out, 0, 0, 0)
    np.testing.assert_array_equal(out, expected)
    assert not program.run(data[: len(data) // 2], out, 0, 0, 0)


def broken_files() -> dict[str, bytes]:
    whole = wav(sound(4_000))
    content = np.zeros(900, "<i2").tobytes()
    infinite = np.array([0.5, np.inf, 0.1] * 400, "<f4").tobytes()
    return {
        "cut.wav": whole[:-700],
        "header.wav": whole[:30],
        "empty.wav": b"",
        "silent.wav": riff(format_chunk(), chunk(b"data", b"")),
        "slow.wav": riff(format_chunk(rate=20), chunk(b"data", content)),
        "channels.wav": riff(format_chunk(channels=90), chunk(b"data", content)),
        "infinite.wav": riff(format_chunk(3, bits=32), chunk(b"data", infinite)),
        "order.wav": riff(chunk(b"data", content), format_chunk()),
        "text.wav": b"this is not a sound at all, but text",
        "cut.flac": encoded(sound(9_000), "FLAC")[:2_000],
    }


def others() -> dict[str, bytes]:
    """Files that the kernel leaves to Python, which reads them."""
    content = np.arange(900, dtype="<i2").tobytes()
    ds64 = chunk(b"ds64", np.array([0, len(content), 900], "<u8").tobytes() + bytes(4))
    rf64 = ds64 + format_chunk() + chunk(b"data", content, 0xFFFFFFFF)
    return {
        "vorbis.wav": encoded(sound(4_000), "OGG"),
        "aiff.wav": encoded(sound(4_000), "AIFF"),
        "rf64.wav": b"RF64\xff\xff\xff\xffWAVE" + rf64,
        "pipe.wav": riff(format_chunk(), chunk(b"data", content, 0xFFFFFFFF), size=0xFFFFFFFF),
    }


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Clips of many lengths and rates in two classes, WAV and FLAC, and of one or two channels."""
    for number in range(31):
        folder = tmp_path / ("no", "yes")[number % 2]
        folder.mkdir(exist_ok=True)
        rate = (8_000, 16_000, 44_100)[number % 3]
        clip = sound(500 + 333 * number, 1 + number % 2, seed=number)
        if number % 5 == 4:
            (folder / f"{number:02}.flac").write_bytes(encoded(clip, "FLAC", rate))
        else:
            (folder / f"{number:02}.wav").write_bytes(wav(clip, rate))
    return tmp_path


def roads(folder: Path) -> dict[str, Pipeline]:
    """Every kind of road that the kernel runs by itself."""
    files = ps.from_folder(folder, extensions=(".wav", ".flac"))
    whole = decode(rate=16_000, mono=True)
    decoded = files.map(whole)
    crop, gain, mels = random_crop(4_000), random_gain(), mel_spectrogram(16_000, mels=20)
    masks = spec_augment(time=5, freq=4)
    paths = [str(path) for path in sorted(folder.rglob("*.*"))]
    return {
        "mel": decoded.map(crop).map(gain).map(mels).map(masks).batch(8),
        "no labels": ps.from_files(paths).map(whole).map(crop).map(normalize()).batch(8),
        "cached files": files.cache("200kB").map(whole).map(crop).map(mels).batch(8),
        "cached sounds": decoded.cache("400kB").map(crop).map(mels).map(masks).batch(8),
        "cached mels": decoded.map(crop_or_pad(4_000)).map(mels).cache("1MB").map(masks).batch(8),
        "refurbished": decoded.map(crop).refurbish(2).map(gain).map(mels).batch(8),
        "echoed": decoded.map(crop).map(mels).echo(2).map(masks).batch(8),
        "cached twice": files.cache("1MB").map(whole).cache("1MB").map(crop).map(mono()).batch(8),
    }


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows of clips of two formats and many lengths, in two files of several row groups."""
    for file, count in (("a", 37), ("b", 12)):
        rows = []
        for number in range(count):
            clip = sound(500 + 333 * (number % 20), 1 + number % 2, seed=number)
            rate = (8_000, 16_000)[number % 2]
            data = encoded(clip, "FLAC", rate) if number % 5 == 4 else wav(clip, rate)
            rows.append(
                {"weight": number / 7, "audio": {"bytes": data, "path": "x"}, "label": number}
            )
        path = tmp_path / f"{file}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=10)
    return tmp_path


def of_table(table: Path) -> dict[str, Pipeline]:
    rows = ps.from_parquet(table)
    whole = decode(rate=16_000, mono=True)
    crop, mels, masks = random_crop(4_000), mel_spectrogram(16_000, mels=20), spec_augment()
    small = Pipeline(ParquetSource(table, ["audio", "label"], keep="60kB"))
    alone = ps.from_parquet(table, columns=["audio"])
    return {
        "mel": rows.map(whole).map(crop).map(mels).map(masks).batch(8),
        "few groups in memory": small.map(whole).map(crop).map(mels).batch(8),
        "one column": alone.map(whole, on="audio").map(crop).batch(8),
        "cached files": rows.cache("200kB").map(whole).map(crop).map(mels).batch(8),
        "cached sounds": rows.map(whole).cache("400kB").map(crop).map(mels).batch(8),
        "refurbished": rows.map(whole).map(crop).refurbish(2).map(mels).map(masks).batch(8),
    }


TABLE_ROADS = [
    "mel",
    "few groups in memory",
    "one column",
    "cached files",
    "cached sounds",
    "refurbished",
]


@pytest.mark.parametrize("name", TABLE_ROADS)
def test_rows_of_a_table_have_the_bits_of_numpy(
    table: Path, name: str, without_kernel: WithoutKernel
) -> None:
    assert sorted(TABLE_ROADS) == sorted(of_table(table))
    pipeline = of_table(table)[name]
    assert is_native(pipeline)
    by_numpy = without_kernel(lambda: epochs(pipeline, 3, workers=0, seed=3))
    for workers in (1, 3):
        assert epochs(pipeline, 3, workers=workers, kind="threads", seed=3) == by_numpy
    assert epochs(pipeline, 3, workers=2, kind="processes", seed=3) == by_numpy


def test_photographs_of_a_table_have_the_bits_of_python(tmp_path: Path) -> None:
    rows = [
        {"image": encode(picture(40 + number, 60, number)), "label": number % 3}
        for number in range(21)
    ]
    path = tmp_path / "photos.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=6)
    pipeline = (
        ps.from_parquet(path)
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(24))
        .map(ps.image.random_flip())
        .map(ps.image.normalize())
        .batch(8)
    )
    assert is_native(pipeline)
    by_python = epochs(pipeline, 2, workers=0, seed=3)
    assert epochs(pipeline, 2, workers=3, kind="threads", seed=3) == by_python


@pytest.mark.parametrize("policy", ["skip", "substitute"])
@pytest.mark.parametrize("name", ["mel", "cached files", "cached sounds"])
def test_broken_rows_are_left_to_python(table: Path, name: str, policy: str) -> None:
    files = {**broken_files(), **others()}
    rows = [
        {"weight": 1.0, "audio": {"bytes": data, "path": file}, "label": 0}
        for file, data in files.items()
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table / "odd.parquet")
    pipeline = of_table(table)[name]
    by_python = epochs(pipeline, 3, workers=0, seed=1, on_error=policy)
    assert epochs(pipeline, 3, workers=3, kind="threads", seed=1, on_error=policy) == by_python


@pytest.mark.parametrize("name", ["mel", "cached files", "cached sounds"])
def test_counts_of_rows_are_those_of_python(table: Path, name: str) -> None:
    pipeline = of_table(table)[name]
    assert counts(pipeline, 3) == counts(pipeline, 0)


def test_rows_with_other_columns_or_formats_stay_with_processes(tmp_path: Path) -> None:
    clip = wav(sound(4_000))
    cases: dict[str, list[dict[str, Any]]] = {
        "text": [{"audio": clip, "name": "a"}],
        "nulls": [{"audio": clip, "label": 1}, {"audio": clip, "label": None}],
        "two files": [{"audio": clip, "more": clip}],
        "vorbis": [{"audio": encoded(sound(4_000), "OGG"), "label": 1}],
    }
    for name, rows in cases.items():
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        pipeline = ps.from_parquet(path).map(decode()).map(crop_or_pad(4_000)).batch(1)
        assert not is_native(pipeline), name


def test_a_row_group_that_vanishes_is_reported_by_python(table: Path) -> None:
    pipeline = of_table(table)["mel"]
    (table / "b.parquet").write_bytes(b"")
    with pytest.raises((SampleError, SourceError), match=r"b\.parquet cannot be read"):
        epochs(pipeline, 1, workers=2, kind="threads", seed=1)


def is_native(pipeline: Pipeline) -> bool:
    return can_be_native(pipeline.road(0), stacked=True)


NAMES = [
    "mel",
    "no labels",
    "cached files",
    "cached sounds",
    "cached mels",
    "refurbished",
    "echoed",
    "cached twice",
]


@pytest.mark.parametrize("name", NAMES)
def test_roads_in_the_kernel_have_the_bits_of_numpy(
    clips: Path, name: str, without_kernel: WithoutKernel
) -> None:
    assert sorted(NAMES) == sorted(roads(clips))
    pipeline = roads(clips)[name]
    assert is_native(pipeline)
    by_numpy = without_kernel(lambda: epochs(pipeline, 4, workers=0, seed=3))
    for workers in (1, 3):
        assert epochs(pipeline, 4, workers=workers, kind="threads", seed=3) == by_numpy
    assert epochs(pipeline, 4, workers=2, kind="processes", seed=3) == by_numpy


@pytest.mark.parametrize("policy", ["skip", "substitute"])
@pytest.mark.parametrize("name", ["mel", "cached files", "cached sounds", "refurbished"])
def test_odd_and_broken_files_are_left_to_python(clips: Path, name: str, policy: str) -> None:
    for file, data in {**broken_files(), **others()}.items():
        (clips / "no" / file).write_bytes(data)
    pipeline = roads(clips)[name]
    by_python = epochs(pipeline, 3, workers=0, seed=1, on_error=policy)
    assert epochs(pipeline, 3, workers=3, kind="threads", seed=1, on_error=policy) == by_python


@pytest.mark.parametrize("file", broken_files())
def test_a_broken_file_has_the_error_of_python(clips: Path, file: str) -> None:
    (clips / "no" / file).write_bytes(broken_files()[file])
    pipeline = roads(clips)["mel"]

    def message(workers: int) -> str:
        with pytest.raises(SampleError) as caught:
            epochs(pipeline, 1, workers=workers, kind="threads", seed=1)
        # libsndfile's messages name the address of an object.
        return re.sub("at 0x[0-9a-f]+", "", str(caught.value))

    assert message(2) == message(0)
    assert file in message(2)


def test_a_reason_that_another_thread_has_reset_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_file = soundfile.SoundFile
    opened: list[Any] = []

    def reset_once(file: Any) -> Any:
        opened.append(file)
        if len(opened) == 1:
            raise soundfile.LibsndfileError(0, prefix="Error opening: ")
        return open_file(file)

    monkeypatch.setattr(soundfile, "SoundFile", reset_once)
    with pytest.raises(Unreadable, match="Format not recognised"):
        read_by_libsndfile(memoryview(b"this is text, and no sound at all"))
    assert len(opened) == 2


def counts(pipeline: Pipeline, workers: int) -> Any:
    """All counters of three epochs, and the stages that took time."""
    with pipeline.loader(workers=workers, kind="threads") as loader:
        for _ in range(3):
            for _ in loader:
                pass
        stats = loader.stats()
    stages = [(stage.name, stage.samples) for stage in stats.stages]
    caches = [(cache.hits, cache.misses, cache.admitted) for cache in stats.caches]
    timed = [stage.name for stage in stats.stages if stage.seconds > 0]
    return stats.samples, stages, stats.bytes_read, caches, set(timed) - {"cache"}


@pytest.mark.parametrize("name", ["mel", "cached files", "cached sounds"])
def test_counts_are_those_of_python(clips: Path, name: str) -> None:
    pipeline = roads(clips)[name]
    assert counts(pipeline, 3) == counts(pipeline, 0)


def test_folders_of_other_formats_stay_with_processes(clips: Path) -> None:
    for path in clips.rglob("*.wav"):
        path.rename(path.with_suffix(".mp3"))
    files = ps.from_folder(clips, extensions=(".mp3",)).map(decode(mono=True))
    pipeline = files.map(crop_or_pad(4_000)).batch(8)
    assert not is_native(pipeline)
    with pipeline.loader(workers=2) as loader:
        assert loader.choice.kind == "processes"


def test_clips_of_different_lengths_are_not_for_the_kernel(clips: Path) -> None:
    files = ps.from_folder(clips, extensions=(".wav", ".flac")).map(decode(mono=True))
    assert not is_native(files.map(pad(400)).batch(8))


def test_a_program_has_at_most_sixteen_steps() -> None:
    work: SoundWork | None = decode().kernel_work(bytes(16))
    for _ in range(15):
        assert work is not None
        work = work.joined(random_gain().kernel_work(bytes(16)))
    assert work is not None
    assert work.joined(mono().kernel_work(bytes(16))) is None


def test_the_digest_is_that_of_the_kernel(without_kernel: WithoutKernel) -> None:
    assert arithmetic.digest() == arithmetic.KERNEL_DIGEST
    assert without_kernel(arithmetic.digest) == arithmetic.KERNEL_DIGEST


def test_another_arithmetic_is_part_of_fingerprints(
    without_kernel: WithoutKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprints() -> list[str | None]:
        operations = [decode(rate=8_000), resample(8, 9), mel_spectrogram(16_000), decode(), mono()]
        return [make_map(one).fingerprint() for one in operations]

    def make_map(operation: Operation) -> Any:
        return (
            ps.from_dataset([b""]).map(operation).stops[0]
            if operation.name == "decode"
            else (ps.from_dataset([sound(900)]).map(operation).stops[0])
        )

    by_kernel = fingerprints()
    assert without_kernel(fingerprints) == by_kernel
    monkeypatch.setattr(arithmetic, "_digest_by_scipy", lambda: "other bits")
    assert fingerprints() == by_kernel
    differs = [a != b for a, b in zip(without_kernel(fingerprints), by_kernel, strict=True)]
    assert differs == [True, True, True, False, False]
