"""TensorSocket: a separate process loads, and sends every batch to all jobs.

It loads with PyTorch's DataLoader, simplejpeg and OpenCV, the same as jobs that load for
themselves. TensorSocket's own ``pack_fn`` is meant for tensors on a GPU. On the CPU it sends whole
tensors, and with each batch all batches that were loaded together: 55 images/s for one job, where
this recipe had 413 in the next run. So batches are packed the way PyTorch sends tensors to other
processes, as names of shared memory, which is what TensorSocket does on a GPU.

An epoch is longer than a run, because between two epochs TensorSocket waits for heartbeats, which
come twice a second. It begins when all jobs have connected, because late ones would miss an epoch.
All batches are full: TensorSocket cannot send a smaller last one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.jobs.work import SharedPhotos
from benchmarks.peers.torch_simplejpeg import FastPhotos

EPOCH = 512
"""Batches per epoch."""

TOGETHER = 4
"""Batches sent at once. 1 fails, 2 is slower, and the default of 8 is not faster but takes more
memory."""

HEARTBEAT = 500
"""Milliseconds between two heartbeats. The first one registers a job."""


def photos(work: SharedPhotos) -> Make:
    import torch.multiprocessing
    from tensorsocket import TensorConsumer  # type: ignore[import-not-found,unused-ignore]

    torch.multiprocessing.set_sharing_strategy("file_system")
    port, acknowledged, *heart = work.ports
    return lambda: TensorConsumer(
        port, acknowledged, tuple(heart), unpack_fn=pickle.loads, batch_size=work.batch
    )


def serve(work: SharedPhotos, on_batch: Callable[[int], None]) -> None:
    import torch.multiprocessing
    from tensorsocket import TensorProducer  # type: ignore[import-not-found,unused-ignore]
    from torch.utils.data import DataLoader, RandomSampler

    torch.multiprocessing.set_sharing_strategy("file_system")
    data: Any = FastPhotos(work)
    loader = DataLoader(
        data,
        batch_size=work.batch,
        sampler=RandomSampler(data, num_samples=EPOCH * work.batch),
        num_workers=work.workers,
        persistent_workers=True,
    )
    port, acknowledged, *heart = work.ports
    producer = TensorProducer(
        _Counted(loader, on_batch),
        port,
        acknowledged,
        tuple(heart),
        pack_fn=_packed,
        producer_batch_size=TOGETHER,
    )
    on_batch(0)
    # The socket accepts connections only while it is used. Without this loop that would be after
    # the jobs have sent their first acknowledgements: these would be lost, and the producer would
    # wait for them forever.
    waiting = True
    while waiting:
        waiting = len(producer.hb.consumers) < work.jobs
        producer.ack_socket.poll(HEARTBEAT)
    while True:
        for _ in producer:
            pass


def _packed(batch: tuple[Any, ...]) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(tuple(batch)))


class _Counted:
    """Wraps a loader to call ``on_batch`` with the number of samples of each batch."""

    def __init__(self, loader: Any, on_batch: Callable[[int], None]) -> None:
        self._loader = loader
        self._on_batch = on_batch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._on_batch(len(batch[0]))
            yield batch
