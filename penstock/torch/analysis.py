"""What an analysis needs to know of torch: which loader is analysed how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.opened import Opened
from penstock.loader import Loader
from penstock.torch.dataloader import DataLoader as OwnLoader
from penstock.torch.device import TorchDevice
from penstock.torch.subject import TorchSubject


def subject_of(
    loader: Any,
    cache: int | None,
    place: Path,
    iterate: Callable[[Any], Iterator[Any]] | None = None,
) -> tuple[Any, TorchDevice] | None:
    """The subject and the device; ``None`` where it is no loader that is known here.

    ``iterate`` begins an epoch where something stands in the place of the loader's own.
    """
    if isinstance(loader, OwnLoader):
        loader = loader._loader
    if isinstance(loader, Loader):
        return LoaderSubject(loader, cache, iterate or iter), TorchDevice()
    if isinstance(loader, DataLoader):
        iterate = iterate or DataLoader.__iter__
        return TorchSubject(loader, iterate, Opened(place), cache), TorchDevice()
    return None
