"""PyTorch's DataLoader with librosa as in many scripts: default options, one clip at a time.

librosa resamples with soxr by default, which has a longer filter than the other resamplers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from benchmarks.audio.recordings import Recordings, sound_files
from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import loader_options
from benchmarks.peers.by_hand_audio import cut, masked


class Sounds:
    """A dataset of spectrograms of sound files."""

    def __init__(self, work: Recordings) -> None:
        self._work = work
        self._paths, self._labels = sound_files(work.data)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import librosa

        work = self._work
        sound, _ = librosa.load(self._paths[index], sr=work.rate, mono=True)
        mels = librosa.feature.melspectrogram(
            y=cut(sound, work, random),
            sr=work.rate,
            n_fft=work.n_fft,
            hop_length=work.hop,
            n_mels=work.mels,
            pad_mode="reflect",
        )
        mels = np.log(np.maximum(mels, np.float32(work.floor)))
        return masked(mels, work, random), self._labels[index]


def recordings(work: Recordings) -> Make:
    import librosa
    from torch.utils.data import DataLoader

    # librosa loads its modules on first use: load them here, before the workers fork.
    librosa.feature.melspectrogram(y=np.zeros(work.frames, np.float32), sr=work.rate)
    data = Sounds(work)
    return lambda: DataLoader(data, **loader_options(work))
