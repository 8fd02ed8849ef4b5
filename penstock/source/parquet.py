"""Samples that are rows of Parquet files."""

from __future__ import annotations

import glob
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from penstock.config import size
from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import Spec
from penstock.source import columns as arrow
from penstock.source.files import stat_files
from penstock.source.source import Source

_Decode = Callable[[int], tuple[dict[str, arrow.Column], int]]
_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ParquetSource(Source):
    """Rows of Parquet files: a sample is a dict of the columns' values.

    ``paths`` is a file, a folder, a pattern, or a list of these. Bytes, text and numbers come as
    Python's own, lists of numbers as arrays, and structs of ``bytes`` and ``path`` (images and
    audio as Hugging Face stores them) as their bytes.

    A row can be had only with its whole row group. Each process therefore keeps the row groups it
    used last, up to ``keep`` bytes: shuffled reading is quick as long as the data fits, and
    decodes whole groups for single rows where it does not.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self, paths: _Paths, columns: Sequence[str] | None = None, *, keep: int | str = "256MB"
    ) -> None:
        pq = _parquet()
        if isinstance(columns, str):
            columns = [columns]
        self._paths = _resolve(paths)
        self._keep = size(keep, "keep")
        self._place: list[tuple[int, int]] = []
        self._ends: list[int] = []
        nulls: set[str] = set()
        end = 0
        for number, path in enumerate(self._paths):
            metadata = _footer(pq, path)
            schema = metadata.schema.to_arrow_schema().remove_metadata()
            if number == 0:
                self._columns = _choose(schema, columns, path)
                self._types = {name: schema.field(name).type for name in self._columns}
            self._check(path, schema)
            nulls |= _with_nulls(metadata, self._types)
            for group in range(metadata.num_row_groups):
                end += metadata.row_group(group).num_rows
                self._place.append((number, group))
                self._ends.append(end)
        if not end:
            raise SourceError(f"{self._shown()} has no rows.")
        self._fields: dict[str | int, Spec] = {
            name: None if name in nulls else arrow.spec(kind) for name, kind in self._types.items()
        }
        self._start()

    def _start(self) -> None:
        self._groups = RecentGroups(self._keep)
        self._footers: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_groups"], state["_footers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _shown(self) -> str:
        more = f" (and {len(self._paths) - 1} more files)" if len(self._paths) > 1 else ""
        return self._paths[0] + more

    def _check(self, path: str, schema: Any) -> None:
        for name, kind in self._types.items():
            place = schema.get_field_index(name)
            found = schema.field(place).type if place >= 0 else "not there"
            if found != kind:
                raise SourceError(
                    f"Column {name!r} is {found} in {path} and {kind} in {self._paths[0]}. Give "
                    "files of one schema, or choose columns that all of them have with columns=."
                )

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[int, int]:
        """The row group of a sample, and its row there."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"there is no row {index}: there are {self._ends[-1]}")
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def read(self, indices: Sequence[int]) -> list[Any]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            group, row = self._find(index)
            wanted.setdefault(group, []).append((place, row))
        out: list[Any] = [None] * len(indices)
        # What is held already comes first, before new groups push it out.
        for group in sorted(wanted, key=lambda group: group not in self._groups):
            columns = self._groups.get(group, self._decode)
            for place, row in wanted[group]:
                try:
                    out[place] = {name: values[row] for name, values in columns.items()}
                except SourceError as error:
                    raise SourceError(f"{self.name(indices[place])} {error}") from None
        return out

    def _decode(self, group: int) -> tuple[dict[str, arrow.Column], int]:
        pq = _parquet()
        number, place = self._place[group]
        path = self._paths[number]
        footer = self._footers.get(number)
        if footer is None:
            footer = self._footers[number] = _footer(pq, path)
        try:
            # A file object serves one thread at a time; opening one anew costs little next to
            # decoding, and the workers are threads enough.
            with pq.ParquetFile(path, metadata=footer) as file:
                table = file.read_row_group(place, columns=self._columns, use_threads=False)
            found = {name: arrow.column(table.column(name)) for name in self._columns}
        except (OSError, ValueError) as error:
            raise SourceError(
                f"Row group {place} of {path} cannot be read: {error}. If the file was replaced "
                "after the source was made, make the source again."
            ) from error
        return found, table.get_total_buffer_size()

    def name(self, index: int) -> str:
        group, row = self._find(index)
        number, place = self._place[group]
        before = group - place
        start = self._ends[before - 1] if before else 0
        first = self._ends[group - 1] if group else 0
        return f"row {first + row - start} of {self._paths[number]}"

    def identity(self) -> str:
        stats = stat_files(len(self._paths), self._paths.__getitem__)
        top = os.path.commonpath([os.path.dirname(path) for path in self._paths])
        paths = [os.path.relpath(path, top) for path in self._paths]
        types = [(name, str(kind)) for name, kind in self._types.items()]
        return fingerprint(("parquet", paths, stats, types))

    def fields(self) -> dict[str | int, Spec] | Spec:
        return dict(self._fields)


class RecentGroups:
    """The row groups used last, up to a number of bytes; each is decoded by one thread only."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[dict[str, arrow.Column]]] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total = 0

    def __contains__(self, group: int) -> bool:
        return group in self._held

    def get(self, group: int, decode: _Decode) -> dict[str, arrow.Column]:
        with self._lock:
            found = self._held.get(group)
            if found is not None:
                self._held.move_to_end(group)
            else:
                mine: Future[dict[str, arrow.Column]] = Future()
                self._held[group] = mine
        if found is not None:
            return found.result()
        try:
            columns, nbytes = decode(group)
        except BaseException as error:
            with self._lock:
                del self._held[group]
            mine.set_exception(error)
            raise
        mine.set_result(columns)
        with self._lock:
            self._sizes[group] = nbytes
            self._total += nbytes
            self._shrink(group)
        return columns

    def _shrink(self, newest: int) -> None:
        for group in list(self._held):
            if self._total <= self._budget:
                return
            if group != newest and group in self._sizes:
                self._total -= self._sizes.pop(group)
                del self._held[group]


def _parquet() -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError.of("from_parquet", "pyarrow", "parquet") from error
    return pq


def _resolve(paths: _Paths) -> list[str]:
    found: list[str] = []
    for given in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        text = os.path.abspath(os.path.expanduser(os.fspath(given)))
        if os.path.isdir(text):
            pattern = os.path.join(glob.escape(text), "**", "*.parquet")
            # Engines leave half-written and bookkeeping files under names with these marks.
            names = [n for n in glob.glob(pattern, recursive=True) if _visible(n, text)]
        elif os.path.exists(text):
            names = [text]
        else:
            names = [name for name in glob.glob(text, recursive=True) if os.path.isfile(name)]
        if not names:
            raise SourceError(
                f"{text} is no Parquet file, no folder that holds any, and no pattern that matches "
                "any. Check the path."
            )
        found.extend(sorted(names))
    if not found:
        raise SourceError("The list of Parquet files is empty; give at least one path.")
    return found


def _visible(path: str, top: str) -> bool:
    return not any(part[0] in "._" for part in os.path.relpath(path, top).split(os.sep))


def _footer(pq: Any, path: str) -> Any:
    try:
        return pq.read_metadata(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def _choose(schema: Any, columns: Sequence[str] | None, path: str) -> list[str]:
    if columns is None:
        return list(schema.names)
    unknown = [name for name in columns if name not in schema.names]
    if unknown or not columns:
        what = (
            f"no column {', '.join(map(repr, unknown))}" if unknown else "columns, and none named"
        )
        raise PipelineError(f"{path} has {what}. Its columns are: {', '.join(schema.names)}.")
    return list(columns)


def _with_nulls(metadata: Any, types: dict[str, Any]) -> set[str]:
    """The columns that have nulls, or of which nobody counted them."""
    found: set[str] = set()
    for place in range(metadata.num_columns):
        leaf = metadata.schema.column(place)
        # Column names may hold dots, so that a leaf's path alone does not tell its column.
        name = next((n for n in types if leaf.path == n or leaf.path.startswith(f"{n}.")), None)
        if name is None or name in found or leaf.max_definition_level == 0:
            continue
        if arrow.is_file(types[name]) and leaf.name != "bytes":
            continue
        for group in range(metadata.num_row_groups):
            counts = metadata.row_group(group).column(place).statistics
            if counts is None or not counts.has_null_count or counts.null_count:
                found.add(name)
                break
    return found
