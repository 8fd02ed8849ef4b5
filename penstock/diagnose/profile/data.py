"""The data that a profile reads: the pipeline's own source, or data given in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import PipelineError
from penstock.pipeline import Pipeline, from_dataset, from_files, from_folder, from_parquet
from penstock.source import DatasetSource, FilesSource, FolderSource, StreamSource
from penstock.source.parquet import ParquetSource
from penstock.source.source import Source

_ACCEPTED = (
    "Give a folder, a list of files, a dataset, or another pipeline, whose source is then read. "
    "Without data, profile() reads the pipeline's own source."
)


def with_data(pipeline: Pipeline, data: Any) -> Pipeline:
    """The pipeline with another source.

    Raises PipelineError if its stops cannot work on that source.
    """
    if data is None:
        return pipeline
    source = _source(pipeline, data)
    if not source.indexed and any(stop.transparent for stop in pipeline.stops):
        raise PipelineError(
            f"profile() got data={_short(data)}, which is a stream, and the pipeline has a "
            "cache(): a cache finds samples by index, and the samples of a stream have none. "
            "Give data with random access, or use a pipeline without cache()."
        )
    replaced = replace(pipeline, source=source)
    try:
        _ = replaced.fields
    except PipelineError as error:
        raise PipelineError(
            f"profile() got data={_short(data)}, which does not fit the pipeline: {error}"
        ) from error
    return replaced


def _source(pipeline: Pipeline, data: Any) -> Source | StreamSource:
    if isinstance(data, Pipeline):
        return data.source
    inner = getattr(data, "pipeline", None)
    if isinstance(inner, Pipeline):  # a loader
        return inner.source
    if isinstance(data, (str, os.PathLike)):
        return _source_at(pipeline, os.path.expanduser(os.fspath(data)))
    if isinstance(data, (list, tuple)) and all(isinstance(x, (str, os.PathLike)) for x in data):
        return _files(pipeline, data)
    readable = hasattr(data, "__getitem__") or hasattr(data, "__iter__") or callable(data)
    if not readable or isinstance(data, (type, bytes, bytearray, Mapping)):
        raise PipelineError(f"profile() got data={_short(data)}. {_ACCEPTED}")
    own = pipeline.source
    random = own.random if isinstance(own, DatasetSource) else None
    return from_dataset(data, random=random).source


def _source_at(pipeline: Pipeline, path: str) -> Source | StreamSource:
    own = pipeline.source
    if isinstance(own, ParquetSource):
        fields = own.fields()
        columns = [str(name) for name in fields] if isinstance(fields, dict) else None
        return from_parquet(path, columns=columns).source
    if path.endswith(".parquet"):
        return from_parquet(path).source
    if os.path.isfile(path):
        return _files(pipeline, [path])
    source = from_folder(path).source
    if isinstance(source, FolderSource) and source.classes is None and _labelled(pipeline):
        return _files(pipeline, [source.name(i) for i in range(len(source))])
    return source


def _files(pipeline: Pipeline, paths: Any) -> Source | StreamSource:
    # If the pipeline's own samples have labels, add one: maps may expect (sample, label) pairs.
    return from_files(paths, [0] * len(paths) if _labelled(pipeline) else None).source


def _labelled(pipeline: Pipeline) -> bool:
    own = pipeline.source
    return isinstance(own, (FolderSource, FilesSource)) and isinstance(own.fields(), dict)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."
