"""Penstock as a pipeline; batches are NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import MEAN, RAND_AUGMENT, STD, ArrayDataset, Arrays, Photos

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


def arrays(work: Arrays, kind: Literal["none", "threads", "processes"] = "threads") -> Make:
    import penstock as ps
    import penstock.loader

    data = ArrayDataset(work)
    workers = 0 if kind == "none" else work.workers
    how: Literal["auto", "threads", "processes"] = "auto" if kind == "none" else kind
    return lambda: (
        ps.from_dataset(data, random=False).batch(work.batch).loader(workers=workers, kind=how)
    )


def photos(work: Photos, workers: int | None = None) -> Make:
    """``workers`` overrides the number of workers of the workload."""
    import penstock.loader

    import_decoders()

    def make() -> penstock.loader.Loader:
        threads = work.workers if workers is None else workers
        return photo_pipeline(work).loader(workers=threads, kind="threads")

    return make


def photo_pipeline(work: Photos) -> Pipeline:
    import penstock as ps

    train = (
        ps.from_folder(work.data)
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(work.side))
        .map(ps.image.random_flip())
    )
    if work.augment:
        train = train.map(ps.image.rand_augment(*RAND_AUGMENT))
    if work.form == "float32":
        train = train.map(ps.image.normalize(MEAN, STD))
    return train.batch(work.batch)


def import_decoders() -> None:
    """Import the decoders before the measurement. The compiled kernel needs none."""
    from penstock import native

    if not native.kernel_available():
        import cv2  # noqa: F401
        import simplejpeg  # noqa: F401
