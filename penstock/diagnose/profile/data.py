"""Which data a profile reads: the pipeline's own, or something given in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import PipelineError
from penstock.pipeline import Pipeline, from_dataset, from_files, from_folder, from_parquet
from penstock.source import DatasetSource, FilesSource, FolderSource, ParquetSource, StreamSource
from penstock.source.source import Source

_WANTED = (
    "Give a folder, a list of files, a dataset, or a pipeline whose source is to be read; or "
    "nothing, to measure on the pipeline's own data."
)


def with_data(pipeline: Pipeline, data: Any) -> Pipeline:
    """The pipeline on other data. Raises PipelineError where its stops cannot work on that."""
    if data is None:
        return pipeline
    source = _source(pipeline, data)
    if not source.indexed and any(stop.transparent for stop in pipeline.stops):
        raise PipelineError(
            f"profile() got data={_short(data)}, which is a stream, and the pipeline has a "
            "cache(): the samples of a stream have no index to keep them by. Give data with "
            "random access, or a pipeline without cache()."
        )
    made = replace(pipeline, source=source)
    try:
        _ = made.fields
    except PipelineError as error:
        raise PipelineError(
            f"profile() got data={_short(data)}, which does not fit the pipeline: {error}"
        ) from error
    return made


def _source(pipeline: Pipeline, data: Any) -> Source | StreamSource:
    if isinstance(data, Pipeline):
        return data.source
    inner = getattr(data, "pipeline", None)
    if isinstance(inner, Pipeline):  # a loader
        return inner.source
    if isinstance(data, (str, os.PathLike)):
        return _at(pipeline, os.path.expanduser(os.fspath(data)))
    if isinstance(data, (list, tuple)) and all(isinstance(x, (str, os.PathLike)) for x in data):
        return _files(pipeline, data)
    readable = hasattr(data, "__getitem__") or hasattr(data, "__iter__") or callable(data)
    if not readable or isinstance(data, (type, bytes, bytearray, Mapping)):
        raise PipelineError(f"profile() got data={_short(data)}. {_WANTED}")
    own = pipeline.source
    random = own.random if isinstance(own, DatasetSource) else None
    return from_dataset(data, random=random).source


def _at(pipeline: Pipeline, path: str) -> Source | StreamSource:
    own = pipeline.source
    if isinstance(own, ParquetSource):
        fields = own.fields()
        columns = [str(name) for name in fields] if isinstance(fields, dict) else None
        return from_parquet(path, columns=columns).source
    if path.endswith(".parquet"):
        return from_parquet(path).source
    if os.path.isfile(path):
        return _files(pipeline, [path])
    made = from_folder(path).source
    if isinstance(made, FolderSource) and made.classes is None and _labelled(pipeline):
        return _files(pipeline, [made.name(i) for i in range(len(made))])
    return made


def _files(pipeline: Pipeline, paths: Any) -> Source | StreamSource:
    # Where the pipeline's own samples carry a label, one stands in: maps may look for it.
    return from_files(paths, [0] * len(paths) if _labelled(pipeline) else None).source


def _labelled(pipeline: Pipeline) -> bool:
    own = pipeline.source
    return isinstance(own, (FolderSource, FilesSource)) and isinstance(own.fields(), dict)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."
