"""Penstock as a pipeline that delivers its batches to a fake device, whose streams are threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import Photos

if TYPE_CHECKING:
    from penstock.loader import Loader
    from penstock.pipeline import Pipeline


def to_fake_device(train: Pipeline, workers: int) -> Loader:
    """A loader of tensors on a fake device, with threads as workers."""
    from penstock.device.delivery import Delivery
    from penstock.device.division import divide
    from penstock.device.fake import FakeDevice
    from penstock.loader import Custom, Deliver, Loader
    from penstock.options import Options
    from penstock.torch.batches import Tensors

    device = FakeDevice(capacity=8 << 30)
    deliver = Deliver(
        lambda rest, desk: Delivery(device, rest, desk),
        lambda: None,
        device.register,
        divide,
        copies=True,
    )

    class DeviceLoader(Loader):
        def close(self) -> None:
            super().close()
            device.close()

    options = Options(workers=workers, kind="threads")
    return DeviceLoader(train, options, Custom(convert=Tensors(tuple), deliver=deliver))


def photos(work: Photos) -> Make:
    from benchmarks.peers import penstock_pipeline

    penstock_pipeline.import_decoders()
    return lambda: to_fake_device(penstock_pipeline.photo_pipeline(work), work.workers)
