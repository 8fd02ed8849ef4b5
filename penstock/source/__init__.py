"""Sources of samples: folders, lists of files, Parquet, datasets and streams."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.source.dataset import DatasetSource
    from penstock.source.files import FilesSource
    from penstock.source.folder import IMAGE_EXTENSIONS, FolderSource
    from penstock.source.source import Source
    from penstock.source.stream import StreamSource, is_stream

__all__ = [
    "IMAGE_EXTENSIONS",
    "DatasetSource",
    "FilesSource",
    "FolderSource",
    "Source",
    "StreamSource",
    "is_stream",
]

# Imported on first use: the fetcher, whose process is below this package, needs none of them, and
# without NumPy it starts in 0.2 s of processor time instead of 0.6.
_MODULES = {
    "IMAGE_EXTENSIONS": "folder",
    "DatasetSource": "dataset",
    "FilesSource": "files",
    "FolderSource": "folder",
    "Source": "source",
    "StreamSource": "stream",
    "is_stream": "stream",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
