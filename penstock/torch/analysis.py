"""What ``penstock.analyze`` needs to know of torch: which loader is analysed how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from penstock.analysis.loader_subject import LoaderSubject
from penstock.analysis.opened import Opened
from penstock.torch.dataloader import DataLoader as OwnLoader
from penstock.torch.device import TorchDevice
from penstock.torch.subject import TorchSubject


def subject_of(loader: Any, cache: int | None, place: Path) -> tuple[Any, TorchDevice] | None:
    """The subject and the device; ``None`` where it is no loader that is known here."""
    if isinstance(loader, OwnLoader):
        return LoaderSubject(loader._loader, cache), TorchDevice()
    if isinstance(loader, DataLoader):
        return TorchSubject(loader, DataLoader.__iter__, Opened(place), cache), TorchDevice()
    return None
