"""Penstock as a pipeline, in threads; batches are NumPy arrays."""

from __future__ import annotations

from benchmarks.measure import Make
from benchmarks.workloads import MEAN, STD, ArrayDataset, Arrays, Photos


def arrays(work: Arrays) -> Make:
    import penstock as ps
    import penstock.loader

    data = ArrayDataset(work)
    return lambda: (
        ps.from_dataset(data, random=False)
        .batch(work.batch)
        .loader(workers=work.workers, kind="threads")
    )


def photos(work: Photos) -> Make:
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401

    import penstock as ps
    import penstock.loader

    def make() -> penstock.loader.Loader:
        train = (
            ps.from_folder(work.data)
            .map(ps.image.decode())
            .map(ps.image.random_resized_crop(work.side))
            .map(ps.image.random_flip())
        )
        if work.form == "float32":
            train = train.map(ps.image.normalize(MEAN, STD))
        return train.batch(work.batch).loader(workers=work.workers, kind="threads")

    return make
