"""Sources of samples: folders, lists of files, Parquet, datasets and streams."""

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
