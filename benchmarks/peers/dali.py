"""NVIDIA's DALI on the CPU: the pipeline of its ResNet-50 training example, with every operator on
the CPU, and its own RandAugment.

Measured: decoding only the crop takes a quarter less CPU time than decoding the whole image before
``random_resized_crop``. Batches are arrays that share DALI's memory, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import MEAN, RAND_AUGMENT, STD, Photos


def photos(work: Photos) -> Make:
    return _photos(work, antialias=True)


def photos_no_antialias(work: Photos) -> Make:
    """Without antialiasing, like the loaders that resize with OpenCV."""
    return _photos(work, antialias=False)


def _photos(work: Photos, antialias: bool) -> Make:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.auto_aug import rand_augment

    @pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
    def train() -> Any:
        files, labels = fn.readers.file(
            file_root=str(work.data), random_shuffle=True, initial_fill=1024, name="files"
        )
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
            use_fast_idct=True,
        )
        images = fn.resize(images, size=[work.side, work.side], antialias=antialias)
        mirror = fn.random.coin_flip(probability=0.5)
        if work.augment:
            images = fn.flip(images, horizontal=mirror)
            mirror = 0
            operations, magnitude = RAND_AUGMENT
            images = rand_augment.rand_augment(
                images, n=operations, m=magnitude, shape=(work.side, work.side), fill_value=0
            )
        if work.form == "float32":
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=[255 * value for value in MEAN],
                std=[255 * value for value in STD],
                mirror=mirror,
            )
        elif not work.augment:
            images = fn.flip(images, horizontal=mirror)
        return images, labels

    return built(train, work.batch, work.workers)


def built(define: Any, batch: int, workers: int) -> Make:
    """A function that makes a DALI pipeline on the CPU and yields its batches."""

    def make() -> Any:
        pipeline = define(
            batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=2
        )
        pipeline.build()
        return _Batches(pipeline)

    return make


class _Batches:
    """Batches of a pipeline, as arrays that share its memory. DALI starts new epochs by itself."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            images, labels = self._pipeline.run()
            yield np.asarray(images.as_tensor()), np.asarray(labels.as_tensor())
