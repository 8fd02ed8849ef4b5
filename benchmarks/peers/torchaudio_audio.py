"""PyTorch's DataLoader with torchaudio's transforms. soundfile reads the files, because torchaudio
has removed ``torchaudio.load``.

There are two variants. ``recordings`` transforms clip by clip in the dataset, as torchaudio's
tutorials do. ``recordings_in_batches`` decodes, resamples and crops in the dataset, and applies
MelSpectrogram and SpecAugment to whole batches in ``collate_fn``, still in the worker: both accept
batches, and ``iid_masks`` masks each clip differently. Workers are persistent, and each has one
thread, DataLoader's default.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.audio.recordings import Recordings, sound_files
from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import loader_options


def import_torchaudio() -> Any:
    """Import torchaudio, even if its compiled part does not match this build of torch.

    A torchaudio built for CUDA cannot load its compiled part with a torch built for the CPU. These
    transforms do not need that part, so a stand-in provides the few names that the import needs.
    """
    import importlib
    import sys
    import types

    try:
        return importlib.import_module("torchaudio")
    except OSError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        compiled: Any = types.ModuleType("torchaudio._extension")
        compiled.fail_if_no_align = lambda function: function
        compiled._IS_TORCHAUDIO_EXT_AVAILABLE = compiled._IS_ALIGN_AVAILABLE = False
        compiled._check_cuda_version = lambda: None
        sys.modules["torchaudio._extension"] = compiled
        return importlib.import_module("torchaudio")


class Features:
    """Turns sounds (..., frames) into masked log-mel spectrograms (..., mels, steps)."""

    def __init__(self, work: Recordings) -> None:
        transforms = import_torchaudio().transforms
        self._floor = work.floor
        self._mel = transforms.MelSpectrogram(
            work.rate,
            n_fft=work.n_fft,
            hop_length=work.hop,
            n_mels=work.mels,
            mel_scale="slaney",
            norm="slaney",
        )
        self._mask = transforms.SpecAugment(
            n_time_masks=work.masks,
            time_mask_param=work.time,
            n_freq_masks=work.masks,
            freq_mask_param=work.freq,
            iid_masks=True,
        )

    def __call__(self, sounds: Any) -> Any:
        return self._mask(self._mel(sounds).clamp_(min=self._floor).log_())


class Sounds:
    """Files as tensors (1, frames) of one length; ``features`` follow where they are given."""

    def __init__(self, work: Recordings, features: Features | None) -> None:
        self._work = work
        self._paths, self._labels = sound_files(work.data)
        self._features = features
        self._resamplers: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import soundfile
        import torch

        data, rate = soundfile.read(self._paths[index], dtype="float32", always_2d=True)
        sound = torch.from_numpy(data.T).mean(0, keepdim=True)
        sound = self._cut(self._resampler(rate)(sound))
        return (sound if self._features is None else self._features(sound)), self._labels[index]

    def _resampler(self, rate: int) -> Any:
        """The resampler of a rate. torchaudio advises to keep it: making its filter costs more than
        using it."""
        if rate not in self._resamplers:
            transforms = import_torchaudio().transforms
            self._resamplers[rate] = transforms.Resample(rate, self._work.rate)
        return self._resamplers[rate]

    def _cut(self, sound: Any) -> Any:
        from torch.nn.functional import pad

        room = self._work.frames - sound.shape[-1]
        if room > 0:
            before = random.randint(0, room)
            return pad(sound, (before, room - before))
        first = random.randint(0, -room)
        return sound[:, first : first + self._work.frames]


class Collate:
    """Turns a batch of sounds into a batch of spectrograms, in the worker."""

    def __init__(self, work: Recordings) -> None:
        self._features = Features(work)

    def __call__(self, samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
        from torch.utils.data import default_collate

        sounds, labels = default_collate(samples)
        return self._features(sounds), labels


def recordings(work: Recordings) -> Make:
    import soundfile  # noqa: F401
    from torch.utils.data import DataLoader

    data = Sounds(work, Features(work))
    return lambda: DataLoader(data, **loader_options(work))


def recordings_in_batches(work: Recordings) -> Make:
    import soundfile  # noqa: F401
    from torch.utils.data import DataLoader

    data = Sounds(work, None)
    return lambda: DataLoader(data, collate_fn=Collate(work), **loader_options(work))
