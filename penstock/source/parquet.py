"""A source whose samples are the rows of Parquet files."""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import size
from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.objects.protocol import StorageOptions
from penstock.source.ranges import FilePart, RangeReader
from penstock.source.shard_paths import ShardNames
from penstock.source.shards import ShardParts, ShardSource, open_shards
from penstock.source.source import FileSamples


class ParquetSource(ShardSource):
    """Rows of Parquet files. A sample is a dict of the values of its columns.

    ``paths`` is a file, a folder, a pattern, or a list of these. Bytes, text and numbers become
    Python objects, lists of numbers become arrays, and structs of ``bytes`` and ``path`` (images
    and audio as Hugging Face stores them) become their bytes.

    A row can be read only together with its whole row group. Each process therefore keeps the row
    groups it used last, up to ``keep`` bytes. Random access is fast as long as the data fits;
    beyond that, whole row groups are decoded for single rows.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self,
        paths: ShardNames,
        columns: Sequence[str] | None = None,
        storage: StorageOptions | None = None,
        version: str | None = None,
        *,
        keep: int | str = "256MB",
    ) -> None:
        pq = _parquet()
        if isinstance(columns, str):
            columns = [columns]
        # Query engines name their temporary and bookkeeping files with these prefixes.
        files = self._files = open_shards(
            paths, (".parquet",), "Parquet", storage, version, hidden="._"
        )
        self._keep = size(keep, "keep")
        # For each row group its file and its number there, and the index after its last row.
        self._place: list[tuple[int, int]] = []
        self._ends: list[int] = []
        nulls: set[str] = set()
        end = 0
        # The parts of each row group that hold the columns: by URL they are fetched ahead.
        self._chunks: list[list[FilePart]] = []
        with ThreadPoolExecutor(min(files.threads, len(files.paths))) as pool:
            footers = pool.map(partial(self._footer, pq), range(len(files.paths)))
        for number, (path, metadata) in enumerate(zip(files.paths, footers, strict=True)):
            schema = metadata.schema.to_arrow_schema().remove_metadata()
            if number == 0:
                self._columns = choose_columns(schema, columns, path)
                self._types = {name: schema.field(name).type for name in self._columns}
            self._check(path, schema)
            nulls |= _with_nulls(metadata, self._types)
            for group in range(metadata.num_row_groups):
                end += metadata.row_group(group).num_rows
                self._chunks.append(_chunks(metadata.row_group(group), self._types))
                self._place.append((number, group))
                self._ends.append(end)
        if not end:
            raise SourceError(f"{self._shown()} has no rows.")
        self._fields: dict[str | int, Spec] = {
            name: None if name in nulls else column_spec(kind) for name, kind in self._types.items()
        }
        self._start()

    def _start(self) -> None:
        self._groups = RecentGroups(self._keep)
        self._footers: dict[int, Any] = {}
        self._numbers: dict[str, NDArray[Any]] = {}
        self._reading_numbers = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_groups"], state["_footers"], state["_numbers"], state["_reading_numbers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _check(self, path: str, schema: Any) -> None:
        for name, kind in self._types.items():
            place = schema.get_field_index(name)
            found = schema.field(place).type if place >= 0 else "missing"
            if found != kind:
                raise SourceError(
                    f"Column {name!r} is {found} in {path} and {kind} in {self._files.paths[0]}. "
                    "Give files of one schema, or choose columns that all of them have with "
                    "columns=."
                )

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[int, int]:
        """The row group of a sample, and its row in that group."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"row {index} is out of range: there are {self._ends[-1]} rows")
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def read(self, indices: Sequence[int]) -> list[Any]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            group, row = self._find(index)
            wanted.setdefault(group, []).append((place, row))
        out: list[Any] = [None] * len(indices)
        # Groups that are held come first, before new groups push them out.
        for group in sorted(wanted, key=self._groups.readiness):
            columns = self._groups.get(group, self._decode)
            for place, row in wanted[group]:
                try:
                    out[place] = {name: values[row] for name, values in columns.items()}
                except SourceError as error:
                    raise SourceError(f"{self.name(indices[place])} {error}") from None
        return out

    def _decode(self, group: int) -> tuple[dict[str, Column], int]:
        pq = _parquet()
        number, place = self._place[group]
        path = self._files.paths[number]
        footer = self._footers.get(number)
        if footer is None:
            footer = self._footers[number] = self._footer(pq, number)
        try:
            # A file object serves one thread at a time. Opening one costs little compared with
            # decoding, and the workers already use all cores.
            with pq.ParquetFile(self._open(number, [group]), metadata=footer) as file:
                table = file.read_row_group(place, columns=self._columns, use_threads=False)
            columns = {name: make_column(table.column(name)) for name in self._columns}
        except (OSError, ValueError) as error:
            raise SourceError(
                f"Row group {place} of {path} cannot be read: {error}. If the file was replaced "
                "after the source was made, make the source again."
            ) from error
        return columns, table.get_total_buffer_size()

    def file_samples(self) -> FileSamples | None:
        """The rows, if one column is files and the others are numbers, without nulls."""
        specs = [(name, self._fields[name]) for name in self._columns]
        files = [name for name, spec in specs if isinstance(spec, BytesSpec)]
        others = [name for name, spec in specs if isinstance(spec, ArraySpec) and spec.shape == ()]
        if len(files) != 1 or len(others) + 1 != len(specs):
            return None
        column = files[0]
        return FileSamples(
            None,
            column,
            {name: partial(self._take_numbers, name) for name in others},
            self._columns,
            partial(self._contents, column),
            partial(self._peek, column),
        )

    def _contents(self, column: str, indices: NDArray[np.int64]) -> list[Any]:
        """The bytes of these rows as views of their row groups; ``None`` if they cannot be read."""
        out: list[Any] = [None] * len(indices)
        ends = np.array(self._ends)
        groups = ends.searchsorted(indices, side="right")
        starts = np.concatenate(([0], ends))
        wanted = np.unique(groups).tolist()
        # Groups that are held come first, and those that another thread decodes last.
        for group in sorted(wanted, key=self._groups.readiness):
            try:
                values: Any = self._groups.get(group, self._decode)[column]
            except SourceError:
                continue
            places = np.flatnonzero(groups == group)
            found = values.views(indices[places] - starts[group])
            for place, view in zip(places.tolist(), found, strict=True):
                out[place] = view
        return out

    def _take_numbers(self, column: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a column of numbers, all of which are read at once and kept."""
        with self._reading_numbers:
            values = self._numbers.get(column)
            if values is None:
                spec = self._fields[column]
                dtype = spec.dtype if isinstance(spec, ArraySpec) else None
                parts = self._read_column(column)
                values = self._numbers[column] = np.concatenate(parts).astype(dtype)
        return values[indices]

    def _read_column(self, column: str) -> list[NDArray[Any]]:
        pq = _parquet()
        values = []
        for number, source in enumerate(self._open_for(pq, column)):
            path = self._files.paths[number]
            try:
                with pq.ParquetFile(source) as file:
                    table = file.read(columns=[column], use_threads=False)
            except (OSError, ValueError) as error:
                raise SourceError(f"{path} cannot be read as Parquet: {error}") from error
            values.append(table.column(column).to_numpy())
        return values

    def _open_for(self, pq: Any, column: str) -> Iterator[Any]:
        """The files, with the pages of one column, which are fetched in one request."""
        if self._files.listing is not None:
            yield from self._files.paths
            return
        parts: list[tuple[int, int, int]] = []
        for number in range(len(self._files.paths)):
            footer, types = self._footer(pq, number), {column: self._types[column]}
            for group in range(footer.num_row_groups):
                parts += [(number, *part) for part in _chunks(footer.row_group(group), types)]
        contents = self._files.read(parts)
        for number in range(len(self._files.paths)):
            yield FetchedFile(
                self._files.reader(number),
                {
                    part[1:]: content
                    for part, content in zip(parts, contents, strict=True)
                    if part[0] == number
                },
            )

    def _footer(self, pq: Any, number: int) -> Any:
        try:
            return pq.read_metadata(self._open(number, []))
        except (OSError, ValueError) as error:
            path = self._files.paths[number]
            raise SourceError(f"{path} cannot be read as Parquet: {error}") from error

    def _open(self, number: int, groups: Sequence[int]) -> Any:
        """A file for Arrow: its path, or one that fetches parts, with these row groups at hand."""
        if self._files.listing is not None:
            return self._files.paths[number]
        ranges = [part for group in groups for part in self._chunks[group]]
        contents = self._files.read([(number, *part) for part in ranges])
        return FetchedFile(self._files.reader(number), dict(zip(ranges, contents, strict=True)))

    def units(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Row groups, which are read as a whole; workers keep some of them."""
        return np.array(self._ends, dtype=np.int64).searchsorted(indices, side="right"), self._keep

    def shard_parts(self, indices: NDArray[np.int64]) -> ShardParts:
        ends = np.array(self._ends, dtype=np.int64)
        groups = dict.fromkeys(ends.searchsorted(indices, side="right").tolist())
        rows = [(self._place[group][0], *part) for group in groups for part in self._chunks[group]]
        return ShardParts(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def _peek(self, column: str) -> bytes:
        """The first bytes of the first row; nothing if it cannot be read."""
        pq = _parquet()
        number, place = self._place[0]
        try:
            with pq.ParquetFile(self._open(number, [])) as file:
                rows = next(file.iter_batches(1, row_groups=[place], columns=[column]))
            value: Any = make_column(rows.column(0))[0]
        except (OSError, ValueError, SourceError, StopIteration):
            return b""
        return value[:12] if isinstance(value, bytes) else b""

    def name(self, index: int) -> str:
        group, row = self._find(index)
        number, place = self._place[group]
        before = group - place
        start = self._ends[before - 1] if before else 0
        first = self._ends[group - 1] if group else 0
        return f"row {first + row - start} of {self._files.paths[number]}"

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        paths = self._relative_paths()
        types = [(name, str(kind)) for name, kind in self._types.items()]
        return fingerprint(("parquet", paths, stats, types))

    @property
    def shards(self) -> NDArray[np.int64]:
        """Row groups: a row can be read only together with the others of its group."""
        ends = np.array([0, *self._ends], dtype=np.int64)
        return ends[1:] - ends[:-1]

    def fields(self) -> dict[str | int, Spec] | Spec:
        return dict(self._fields)


class Column(Protocol):
    """The values of a column by row. A returned value belongs to the caller, who may change it."""

    def __getitem__(self, row: int) -> Any: ...


DecodeGroup = Callable[[int], tuple[dict[str, Column], int]]
"""Decodes a row group: its columns by name, and the bytes they occupy."""


class RecentGroups:
    """The row groups used last, up to a number of bytes. Each is decoded by one thread only."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[dict[str, Column]]] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total = 0

    def readiness(self, group: int) -> int:
        """0 if it is held, 1 if nobody has it, 2 if another thread decodes it."""
        held = self._held.get(group)
        if held is None:
            return 1
        return 0 if held.done() else 2

    def get(self, group: int, decode: DecodeGroup) -> dict[str, Column]:
        """The columns of a row group; decoded by this thread, unless another one did or does."""
        with self._lock:
            held = self._held.get(group)
            if held is not None:
                self._held.move_to_end(group)
            else:
                own: Future[dict[str, Column]] = Future()
                self._held[group] = own
        if held is not None:
            return held.result()
        try:
            columns, nbytes = decode(group)
        except BaseException as error:
            with self._lock:
                del self._held[group]
            own.set_exception(error)
            raise
        own.set_result(columns)
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


def _chunks(group: Any, types: dict[str, Any]) -> list[FilePart]:
    """Where the columns of a row group are: their pages, with those of dictionaries."""
    parts = []
    for place in range(group.num_columns):
        column = group.column(place)
        path = column.path_in_schema
        if not any(path == name or path.startswith(f"{name}.") for name in types):
            continue
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        parts.append((start, column.total_compressed_size))
    return parts


class FetchedFile(io.RawIOBase):
    """A file of an object store for Arrow. What is at hand is not asked for again.

    The end of the file, which Arrow reads first, is asked for in one request.
    """

    _END = 64 << 10

    def __init__(self, reader: RangeReader, parts: dict[FilePart, bytes]) -> None:
        self._reader, self._size, self._at = reader, reader.size(), 0
        self._parts = [(offset, content) for (offset, _), content in parts.items()]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        content = self._take(self._at, end)
        self._at = end
        return content

    def _take(self, start: int, end: int) -> bytes:
        for offset, content in self._parts:
            if offset <= start and end <= offset + len(content):
                return content[start - offset : end - offset]
        if start >= end:
            return b""
        first = start if end < self._size else min(start, max(0, self._size - self._END))
        (content,) = self._reader.read([(first, end - first)])
        self._parts.append((first, content))
        return content[start - first :]


def choose_columns(schema: Any, columns: Sequence[str] | None, path: str) -> list[str]:
    if columns is None:
        return list(schema.names)
    known = f"The columns of {path} are: {', '.join(schema.names)}."
    if not columns:
        raise PipelineError(f"columns is empty; name at least one column. {known}")
    unknown = [name for name in columns if name not in schema.names]
    if unknown:
        raise PipelineError(f"{path} has no column {', '.join(map(repr, unknown))}. {known}")
    return list(columns)


def _with_nulls(metadata: Any, types: dict[str, Any]) -> set[str]:
    """The columns that contain nulls, or whose statistics do not say whether they do."""
    columns: set[str] = set()
    for place in range(metadata.num_columns):
        leaf = metadata.schema.column(place)
        # Column names may contain dots, so the path of a leaf alone does not name its column.
        name = next((n for n in types if leaf.path == n or leaf.path.startswith(f"{n}.")), None)
        if name is None or name in columns or leaf.max_definition_level == 0:
            continue
        if is_file(types[name]) and leaf.name != "bytes":
            continue
        for group in range(metadata.num_row_groups):
            counts = metadata.row_group(group).column(place).statistics
            if counts is None or not counts.has_null_count or counts.null_count:
                columns.add(name)
                break
    return columns


class BlobColumn:
    """Bytes or text, as slices of one buffer. No objects are made before a row is read."""

    def __init__(self, values: Any, *, text: bool = False) -> None:
        _, offsets, data = values.buffers()
        count = len(values) + 1
        self._ends = np.frombuffer(offsets, dtype=np.int64, count=count, offset=8 * values.offset)
        self._data = memoryview(data if data is not None else b"")
        self._valid = _valid(values)
        self._text = text

    def views(self, rows: NDArray[np.int64]) -> list[memoryview | None]:
        """The bytes of these rows without a copy."""
        data = self._data
        firsts, lasts = self._ends[rows].tolist(), self._ends[rows + 1].tolist()
        found: list[Any] = [data[i:j] for i, j in zip(firsts, lasts, strict=True)]
        if self._valid is not None:
            valid = self._valid[rows].tolist()
            found = [view if fine else None for view, fine in zip(found, valid, strict=True)]
        return found

    def __getitem__(self, row: int) -> bytes | str | None:
        if self._valid is not None and not self._valid[row]:
            return None
        data = self._data[self._ends.item(row) : self._ends.item(row + 1)]
        return str(data, "utf-8") if self._text else data.tobytes()


class NumberColumn:
    """Integers, floats or booleans, as Python objects."""

    def __init__(self, values: Any) -> None:
        self._valid = _valid(values)
        if self._valid is not None:
            # Arrow would convert a column with nulls to floats, and lose digits of an int64.
            values = values.fill_null(False if values.type.bit_width == 1 else 0)
        self._values: NDArray[Any] = values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> int | float | bool | None:
        if self._valid is not None and not self._valid[row]:
            return None
        value: int | float | bool = self._values.item(row)
        return value


class ListColumn:
    """Lists of numbers, each as a NumPy array."""

    def __init__(self, values: Any, width: int | None) -> None:
        self._valid = _valid(values)
        self._values: NDArray[Any] = values.values.to_numpy(zero_copy_only=False)
        if width is None:
            self._ends: NDArray[np.int64] = values.offsets.to_numpy().astype(np.int64)
        else:
            self._ends = width * np.arange(values.offset, values.offset + len(values) + 1)

    def __getitem__(self, row: int) -> NDArray[Any] | None:
        if self._valid is not None and not self._valid[row]:
            return None
        return np.array(self._values[self._ends.item(row) : self._ends.item(row + 1)])


class FileColumn:
    """Structs of bytes and path, as Hugging Face stores images and audio. A value is the bytes."""

    def __init__(self, values: Any) -> None:
        # flatten, unlike field, takes the nulls of the struct into account.
        parts = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
        self._bytes: Any = make_column(parts["bytes"])
        self._paths = make_column(parts["path"]) if "path" in parts else None

    def views(self, rows: NDArray[np.int64]) -> list[memoryview | None]:
        """See ``BlobColumn.views``."""
        found: list[memoryview | None] = self._bytes.views(rows)
        return found

    def __getitem__(self, row: int) -> Any:
        value = self._bytes[row]
        path = self._paths[row] if value is None and self._paths is not None else None
        if path is not None:
            raise SourceError(
                f"has the path {path!r} and no bytes. Store the bytes in the Parquet file, or "
                "read the files themselves with from_files."
            )
        return value


class ObjectColumn:
    """Values of any other type, as Arrow converts them to Python."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getitem__(self, row: int) -> Any:
        return self._values[row].as_py()


def make_column(values: Any) -> Column:
    """The column for an Arrow array or chunked array, chosen by its type."""
    import pyarrow as pa
    import pyarrow.types as of

    kind = values.type
    if of.is_dictionary(kind):
        kind = kind.value_type
        values = values.cast(kind)
    text = of.is_string(kind) or of.is_large_string(kind)
    if text or _is_bytes(kind):
        # Large types have 64-bit offsets: the chunks of a big row group fit into one array.
        values = values.cast(pa.large_string() if text else pa.large_binary())
    values = _one_array(values)
    if text or _is_bytes(kind):
        return BlobColumn(values, text=text)
    if _is_number(kind):
        return NumberColumn(values)
    if _is_list(kind) and _is_number(kind.value_type) and not values.values.null_count:
        return ListColumn(values, kind.list_size if of.is_fixed_size_list(kind) else None)
    if is_file(kind):
        return FileColumn(values)
    return ObjectColumn(values)


def column_spec(kind: Any) -> Spec:
    """The spec of a column without nulls, as far as its type tells; ``None`` if it does not."""
    import pyarrow as pa
    import pyarrow.types as of

    if of.is_dictionary(kind):
        kind = kind.value_type
    if _is_bytes(kind) or is_file(kind):
        return BytesSpec()
    # A Python number becomes the widest NumPy type of its kind. A uint64 may not fit into int64.
    if of.is_integer(kind) and not of.is_uint64(kind):
        return ArraySpec.of((), np.int64)
    if of.is_floating(kind):
        return ArraySpec.of((), np.float64)
    if of.is_boolean(kind):
        return ArraySpec.of((), np.bool_)
    if _is_list(kind) and _is_number(kind.value_type):
        width = kind.list_size if of.is_fixed_size_list(kind) else None
        # Some versions of Arrow import pandas to name a dtype; an empty array has it at no cost.
        empty = pa.array([], kind.value_type).to_numpy(zero_copy_only=False)
        return ArraySpec.of((width,), empty.dtype)
    return None


def is_file(kind: Any) -> bool:
    import pyarrow.types as of

    if not of.is_struct(kind):
        return False
    parts = {field.name: field.type for field in kind}
    return "bytes" in parts and parts.keys() <= {"bytes", "path"} and _is_bytes(parts["bytes"])


def _is_bytes(kind: Any) -> bool:
    import pyarrow.types as of

    return bool(
        of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind)
    ) and not of.is_decimal(kind)


def _is_number(kind: Any) -> bool:
    import pyarrow.types as of

    return bool(of.is_integer(kind) or of.is_floating(kind) or of.is_boolean(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as of

    return bool(of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind))


def _one_array(values: Any) -> Any:
    """An Arrow array of the values. Arrow returns a chunked array if they do not fit into one."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        return values.chunk(0) if values.num_chunks == 1 else pa.concat_arrays(values.chunks)
    return values


def _valid(values: Any) -> NDArray[np.bool_] | None:
    if not values.null_count:
        return None
    valid: NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return valid
