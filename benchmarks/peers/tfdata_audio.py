"""TensorFlow's tf.data, as its guide "Better performance with the tf.data API" advises: parallel
maps, prefetching, ``AUTOTUNE`` for both, non-deterministic order, and vectorised maps over batches.

``tf.audio.decode_wav`` reads only 16-bit WAV. TensorFlow has no resampler, so a strided convolution
with torchaudio's filter resamples, from the rate of the first file, which all files must have. The
private thread pool has as many threads as the other loaders have workers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.audio.recordings import Recordings, mel_filters, sound_files
from benchmarks.harness.measure import Make
from benchmarks.peers.tfdata import Arrays, options_for

CROSSINGS, ROLLOFF = 6, 0.99


def recordings(work: Recordings) -> Make:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    paths, labels = sound_files(work.data)
    _, found = tf.audio.decode_wav(Path(paths[0]).read_bytes())
    read, features = _reader(tf, work, int(found)), _features(tf, work)

    def make() -> Any:
        return Arrays(
            tf.data.Dataset.from_tensor_slices((paths, labels))
            .shuffle(len(paths))
            .repeat()
            .map(read, num_parallel_calls=tf.data.AUTOTUNE)
            .batch(work.batch, drop_remainder=True)
            .map(features, num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
            .with_options(options_for(tf, work.workers))
        )

    return make


def sinc_filter(from_rate: int, to_rate: int) -> tuple[NDArray[np.float32], int, int]:
    """Weights (taps, 1, phases) of a convolution, its stride, and the padding before the first
    frame."""
    common = math.gcd(from_rate, to_rate)
    step, phases = from_rate // common, to_rate // common
    cutoff = ROLLOFF * min(step, phases)
    before = math.ceil(CROSSINGS * step / cutoff)
    taps = np.arange(-before, before + step)[:, np.newaxis] / step
    times = np.clip((taps - np.arange(phases) / phases) * cutoff, -CROSSINGS, CROSSINGS)
    weights = np.sinc(times) * np.cos(times * (np.pi / 2 / CROSSINGS)) ** 2 * (cutoff / step)
    return weights[:, np.newaxis].astype(np.float32), step, before


def _reader(tf: Any, work: Recordings, rate: int) -> Any:
    """A function from a path to a sound (frames,) of the workload's rate and length."""
    kernel, step, before = sinc_filter(rate, work.rate)
    phases = kernel.shape[2]

    def read(path: Any, label: Any) -> tuple[Any, Any]:
        sound, found = tf.audio.decode_wav(tf.io.read_file(path))
        with tf.control_dependencies([tf.debugging.assert_equal(found, rate)]):
            sound = tf.reduce_mean(sound, 1)
        if rate != work.rate:
            length = -(-tf.shape(sound)[0] * phases // step)
            sound = tf.pad(sound, [[before, before + step]])[tf.newaxis, :, tf.newaxis]
            sound = tf.nn.conv1d(sound, kernel, step, "VALID")
            sound = tf.reshape(sound, [-1])[:length]
        room = work.frames - tf.shape(sound)[0]
        first = tf.random.uniform([], 0, tf.maximum(-room, 0) + 1, tf.int32)
        sound = sound[first : first + work.frames]
        room = tf.maximum(room, 0)
        at = tf.random.uniform([], 0, room + 1, tf.int32)
        sound = tf.pad(sound, [[at, room - at]])
        return tf.ensure_shape(sound, [work.frames]), label

    return read


def _features(tf: Any, work: Recordings) -> Any:
    """A function from sounds (batch, frames) to masked log-mel spectrograms (batch, 1, mels,
    steps)."""
    filters = mel_filters(work)
    half = work.n_fft // 2

    def outside(size: int, widest: int) -> Any:
        """Positions along an axis that are not masked, for each clip of a batch."""
        wide = tf.random.uniform([work.batch, work.masks, 1], 0, widest + 1, tf.int32)
        most = tf.cast(size - wide + 1, tf.float32)
        first = tf.cast(tf.random.uniform([work.batch, work.masks, 1]) * most, tf.int32)
        places = tf.range(size)
        return tf.reduce_all((places < first) | (places >= first + wide), 1)

    def features(sounds: Any, labels: Any) -> tuple[Any, Any]:
        sounds = tf.pad(sounds, [[0, 0], [half, half]], "REFLECT")
        spectrum = tf.signal.stft(sounds, work.n_fft, work.hop, work.n_fft)
        power = tf.square(tf.math.real(spectrum)) + tf.square(tf.math.imag(spectrum))
        mels = tf.einsum("mf,btf->bmt", filters, power)
        mels = tf.math.log(tf.maximum(mels, work.floor))
        fill = tf.reduce_mean(mels, [1, 2], keepdims=True)
        seen = outside(work.mels, work.freq)[:, :, tf.newaxis]
        seen &= outside(work.steps, work.time)[:, tf.newaxis]
        return tf.where(seen, mels, fill)[:, tf.newaxis], labels

    return features
