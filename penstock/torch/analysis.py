"""Adapts torch loaders for an analysis: the subject and the device of each kind of loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.sample_files import OpenedFiles
from penstock.diagnose.analyze.subject import StartEpoch
from penstock.loader import Loader
from penstock.torch.dataloader import DataLoader as OwnLoader
from penstock.torch.device import TorchDevice
from penstock.torch.subject import TorchSubject


def subject_of(
    loader: Any,
    cache: int | None,
    place: Path,
    iterate: StartEpoch | None = None,
) -> tuple[Any, TorchDevice] | None:
    """The subject and the device of a loader; ``None`` if its class is not known here.

    ``iterate`` is the original ``__iter__`` of the class, if an analysis has replaced it.
    """
    if isinstance(loader, OwnLoader):
        loader = loader._loader
    if isinstance(loader, Loader):
        loader.find_ranks()
        return LoaderSubject(loader, cache, iterate or iter), TorchDevice()
    if isinstance(loader, DataLoader):
        iterate = iterate or DataLoader.__iter__
        return TorchSubject(loader, iterate, OpenedFiles(place), cache), TorchDevice()
    return None
