"""Penstock's drop-in for PyTorch's DataLoader; batches are tensors."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import ArrayDataset, Arrays, Photos, loader_options
from benchmarks.peers.penstock_pipeline import import_decoders
from benchmarks.peers.torchvision_pil import image_folder


def arrays(work: Arrays) -> Make:
    """With default options, as in a script that only changed its import."""
    return _arrays(work, random=None)


def arrays_not_random(work: Arrays) -> Make:
    """With ``random=False``: the dataset draws nothing, so no generator is seeded per sample."""
    return _arrays(work, random=False)


def restarting(work: Arrays) -> Make:
    """Without persistent workers: they are forked for every epoch, as torch's are."""
    return _arrays(work, random=None, persistent_workers=False)


def spawned(work: Arrays) -> Make:
    """With workers that are not forks of the training process."""
    return _arrays(work, random=None, multiprocessing_context="spawn")


def _arrays(work: Arrays, random: bool | None, **changes: Any) -> Make:
    from penstock.torch import DataLoader

    data = ArrayDataset(work)
    return lambda: DataLoader(data, random=random, **{**loader_options(work), **changes})


def photos(work: Photos) -> Make:
    """An ImageFolder with torchvision's transforms, which Penstock replaces with its own."""
    from penstock.torch import DataLoader

    import_decoders()
    folder = image_folder(work)
    return lambda: DataLoader(folder, **loader_options(work))


def photos_by_torchvision(work: Photos) -> Make:
    """An ImageFolder with torchvision's own transforms, in worker processes."""
    from penstock.torch import DataLoader

    options = {**loader_options(work), "persistent_workers": False}
    folder = image_folder(work)
    return lambda: DataLoader(folder, native=False, **options)
