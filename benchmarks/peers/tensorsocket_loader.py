"""TensorSocket: a process of its own loads, and sends every batch to all jobs.

It loads by PyTorch's DataLoader with simplejpeg and OpenCV, as jobs do that load for themselves.
TensorSocket's own ``pack_fn`` is meant for tensors on a GPU. On the CPU it sends them whole, and
with each batch all that were loaded together: 55 images/s for one job, where this recipe had 413
in the next run. So batches are packed as PyTorch itself sends tensors to other processes, as names
of shared memory, which is what TensorSocket does on a GPU.

Epochs are long, longer than a run: between two TensorSocket waits for heartbeats, which come twice
a second. It begins when all jobs are there, because those that come later would miss an epoch.
Batches are whole: there is no room for a smaller last one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.jobs.work import SharedPhotos
from benchmarks.peers.torch_simplejpeg import FastPhotos

EPOCH = 512
"""Batches."""

TOGETHER = 4
"""Batches that are sent at once. One fails, two are slower, and 8, its default, are not faster and
take more memory."""

HEARTBEAT = 500
"""Milliseconds between two; a job is known after its first."""


def photos(work: SharedPhotos) -> Make:
    import torch.multiprocessing
    from tensorsocket import TensorConsumer  # type: ignore[import-not-found,unused-ignore]

    torch.multiprocessing.set_sharing_strategy("file_system")
    port, acknowledged, *heart = work.ports
    return lambda: TensorConsumer(
        port, acknowledged, tuple(heart), unpack_fn=pickle.loads, batch_size=work.batch
    )


def serve(work: SharedPhotos, gave: Callable[[int], None]) -> None:
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
        _Counted(loader, gave),
        port,
        acknowledged,
        tuple(heart),
        pack_fn=_packed,
        producer_batch_size=TOGETHER,
    )
    gave(0)
    # Its socket gets to know of jobs only when it is used. That would be when their first
    # acknowledgements are under way, which are lost then, and it would wait for them for ever.
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
    """A loader that says how many samples each batch has."""

    def __init__(self, loader: Any, gave: Callable[[int], None]) -> None:
        self._loader = loader
        self._gave = gave

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._gave(len(batch[0]))
            yield batch
