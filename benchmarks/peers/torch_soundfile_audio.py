"""PyTorch's DataLoader over a hand-written dataset, with soundfile, NumPy and SciPy."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.audio.recordings import Recordings, sound_files
from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import loader_options
from benchmarks.peers.by_hand_audio import Features, resampled


class Sounds:
    """A dataset of spectrograms of sound files."""

    def __init__(self, work: Recordings) -> None:
        self._work = work
        self._paths, self._labels = sound_files(work.data)
        self._features = Features(work)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import soundfile

        sound, rate = soundfile.read(self._paths[index], dtype="float32")
        if sound.ndim > 1:
            sound = sound.mean(axis=1)
        sound = resampled(sound, rate, self._work)
        return self._features(sound, random), self._labels[index]


def recordings(work: Recordings) -> Make:
    import scipy.signal  # noqa: F401
    import soundfile  # noqa: F401
    from torch.utils.data import DataLoader

    data = Sounds(work)
    return lambda: DataLoader(data, **loader_options(work))
