"""NVIDIA's DALI on the CPU: the operators of its audio examples, in one pipeline.

``QUALITY`` sets the resampler to six lobes, as torchaudio's filter has; DALI's default of sixteen
would be more work. One ``erase`` applies all masks, because each call copies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.audio.recordings import Recordings
from benchmarks.harness.measure import Make
from benchmarks.peers.dali import built

QUALITY = 28.0


def recordings(work: Recordings) -> Make:
    from nvidia.dali import fn, pipeline_def, types

    def bands(widest: int, size: int) -> tuple[Any, Any]:
        """First index and width of the masks along one axis."""
        wide = fn.random.uniform(range=[0.0, widest + 1.0], shape=[work.masks])
        wide = fn.cast(fn.cast(wide, dtype=types.INT32), dtype=types.FLOAT)
        return fn.random.uniform(range=[0.0, 1.0], shape=[work.masks]) * (size - wide), wide

    def pairs(first: Any, second: Any) -> Any:
        return fn.reshape(fn.stack(first, second, axis=1), shape=[-1])

    @pipeline_def  # type: ignore[untyped-decorator]
    def train() -> Any:
        files, labels = fn.readers.file(
            file_root=str(work.data), random_shuffle=True, initial_fill=1024, name="files"
        )
        sounds, _ = fn.decoders.audio(
            files, sample_rate=float(work.rate), quality=QUALITY, downmix=True, dtype=types.FLOAT
        )
        # Reads outside of the sound give silence, so one formula both crops and pads.
        room = fn.cast(sounds.shape()[0], dtype=types.FLOAT) - work.frames
        first = fn.cast(fn.random.uniform(range=[0.0, 1.0]) * room, dtype=types.INT32)
        sounds = fn.slice(
            sounds, first, [work.frames], axes=[0], out_of_bounds_policy="pad", fill_values=0.0
        )
        mels = fn.mel_filter_bank(
            fn.spectrogram(sounds, nfft=work.n_fft, window_length=work.n_fft, window_step=work.hop),
            sample_rate=float(work.rate),
            nfilter=work.mels,
        )
        # This multiplier turns decibels into natural logarithms.
        mels = fn.to_decibels(
            mels, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(work.floor)
        )
        times, long = bands(work.time, work.steps)
        pitches, high = bands(work.freq, work.mels)
        none = np.zeros(work.masks, np.float32)
        mels = fn.erase(
            mels,
            anchor=fn.cat(pairs(none, times), pairs(pitches, none)),
            shape=fn.cat(pairs(none + work.mels, long), pairs(high, none + work.steps)),
            axes=[0, 1],
            fill_value=fn.reductions.mean(mels),
        )
        return fn.expand_dims(mels, axes=[0]), labels

    return built(train, work.batch, work.workers)
