"""The workload of the benchmark ``audio``, and the code that all contestants share.

The spectrogram is that of Whisper's front end except for the logarithm: power in 80 mels on
Slaney's scale, each filter divided by its width, then ``ln(max(mel, floor))``. A floor of 1e-6 is
about 60 dB below a loud voice. It hides most of the differences between resamplers above the
highest frequency of a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".wav", ".flac")

COLUMNS = ("audio", "label")
"""Columns of a Parquet file: the bytes of a recording, and the number of its class."""


@dataclass(frozen=True)
class Recordings:
    """Folders of WAV or FLAC files: one channel at ``rate``, a random crop of ``seconds`` (short
    recordings are padded with silence on both sides), log-mel spectrogram, SpecAugment; shuffled.

    SpecAugment masks ``masks`` bands of up to ``time`` steps, and as many of up to ``freq`` mels,
    with the mean of the clip. Samples are float32, (1, mels, steps).
    """

    data: Path
    batch: int
    workers: int
    rate: int = 16_000
    seconds: float = 1.0
    n_fft: int = 400
    hop: int = 160
    mels: int = 80
    floor: float = 1e-6
    masks: int = 2
    time: int = 20
    freq: int = 27

    @property
    def frames(self) -> int:
        return round(self.rate * self.seconds)

    @property
    def steps(self) -> int:
        return 1 + self.frames // self.hop


def sound_files(folder: Path) -> tuple[list[str], list[int]]:
    """Paths of the recordings in class folders, and the class number of each."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    paths, labels = [], []
    for label, place in enumerate(classes):
        for path in sorted(place.iterdir()):
            if path.suffix.lower() in SUFFIXES:
                paths.append(str(path))
                labels.append(label)
    return paths, labels


@contextmanager
def as_folder(data: Path) -> Iterator[Path]:
    """The folder of recordings. A Parquet file is unpacked into a temporary folder, so that all
    contestants read the same files."""
    if data.is_dir():
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="bench-sounds-") as place:
        unpack(data, Path(place))
        yield Path(place)


def unpack(parquet: Path, folder: Path) -> None:
    """Write the recordings of a Parquet file as files in class folders."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(parquet) as file:
        lacking = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if lacking:
            raise ValueError(f"{parquet} has no column {' and no column '.join(lacking)}")
        number = 0
        for part in file.iter_batches(columns=list(COLUMNS)):
            for row in part.to_pylist():
                place = folder / f"{row['label']:05d}"
                place.mkdir(exist_ok=True)
                sound = _sound(row["audio"])
                suffix = _suffix(sound, f"row {number} of {parquet}")
                (place / f"{number:07d}{suffix}").write_bytes(sound)
                number += 1


def _sound(value: Any) -> bytes:
    """The bytes of a recording. Hugging Face stores them in a struct together with a path."""
    sound: bytes = value["bytes"] if isinstance(value, dict) else value
    return sound


def _suffix(sound: bytes, where: str) -> str:
    for start, suffix in ((b"RIFF", ".wav"), (b"fLaC", ".flac")):
        if sound.startswith(start):
            return suffix
    raise ValueError(f"{where} is neither WAV nor FLAC: it begins {sound[:12]!r}")


def mel_filters(work: Recordings) -> NDArray[np.float32]:
    """Mel filters of shape (mels, frequencies), for loaders without such filters. The same as those
    of librosa and ``torchaudio.functional.melscale_fbanks`` with Slaney's scale and norm."""
    linear, edge, step = 200 / 3, 1000.0, np.log(6.4) / 27
    highest = edge / linear + np.log(work.rate / 2 / edge) / step
    pitches = np.linspace(0, highest, work.mels + 2)
    tops = np.where(
        pitches < edge / linear, pitches * linear, edge * np.exp(step * (pitches - edge / linear))
    )
    slopes = np.linspace(0, work.rate / 2, work.n_fft // 2 + 1) - tops[:, np.newaxis]
    widths = np.diff(tops)[:, np.newaxis]
    filters = np.maximum(0, np.minimum(slopes[:-2] / widths[:-1], -slopes[2:] / widths[1:]))
    filters *= 2 / (tops[2:] - tops[:-2])[:, np.newaxis]
    return filters.astype(np.float32)
