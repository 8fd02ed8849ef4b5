"""Penstock as a pipeline over recordings; batches are NumPy arrays."""

from __future__ import annotations

from typing import Literal

from benchmarks.audio.recordings import SUFFIXES, Recordings
from benchmarks.harness.measure import Make


def recordings(work: Recordings) -> Make:
    """With the workers that the loader chooses: threads in the compiled kernel, if it is there."""
    return _recordings(work, "auto")


def recordings_in_processes(work: Recordings) -> Make:
    """With worker processes."""
    return _recordings(work, "processes")


def _recordings(work: Recordings, kind: Literal["auto", "processes"]) -> Make:
    import scipy.fft
    import scipy.sparse  # noqa: F401

    import penstock as ps
    import penstock.audio
    import penstock.loader

    def make() -> penstock.loader.Loader:
        return (
            ps.from_folder(work.data, extensions=SUFFIXES)
            .map(ps.audio.decode(rate=work.rate, mono=True))
            .map(ps.audio.random_crop(work.frames))
            .map(
                ps.audio.mel_spectrogram(
                    work.rate,
                    work.n_fft,
                    work.hop,
                    work.mels,
                    floor=work.floor,
                    scale="slaney",
                    norm="slaney",
                )
            )
            .map(
                ps.audio.spec_augment(
                    time_masks=work.masks, time=work.time, freq_masks=work.masks, freq=work.freq
                )
            )
            .batch(work.batch)
            .loader(workers=work.workers, kind=kind)
        )

    return make
