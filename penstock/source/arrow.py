"""A source whose samples are the rows of an Arrow table in memory, or of a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.parquet import Column, choose_columns, column_spec, is_file, make_column
from penstock.source.source import FileSamples, Source


class ArrowSource(Source):
    """Rows of an Arrow table or of a Hugging Face dataset, as dicts of their columns.

    Values are those of ``ParquetSource``: images and audio of Hugging Face are the bytes of their
    files, which the compiled kernel reads where they lie. The table of a dataset is mapped into
    memory by Hugging Face, so all workers share its pages. ``select`` and ``shuffle`` of a dataset
    count.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self, data: Any, columns: Sequence[str] | None = None, version: str | None = None
    ) -> None:
        self._data, self._version = data, version
        table = _table(data)
        if isinstance(columns, str):
            columns = [columns]
        self._columns = choose_columns(table.schema, columns, f"the {_kind(data)}")
        self._start()
        if not len(self):
            raise SourceError(f"The {_kind(data)} is empty: it has no rows to read.")
        self._fields: dict[str | int, Spec] = {
            name: None if self._has_nulls(name) else column_spec(table.schema.field(name).type)
            for name in self._columns
        }

    def _start(self) -> None:
        table = _table(self._data).select(self._columns)
        self._parts: list[Any] = [part for part in table.to_batches() if part.num_rows]
        rows = [part.num_rows for part in self._parts]
        self._ends: NDArray[np.int64] = np.cumsum(rows, dtype=np.int64)
        self._made: dict[tuple[int, str], Column] = {}
        self._numbers: dict[str, NDArray[Any]] = {}
        self._making = threading.Lock()
        chosen = getattr(self._data, "_indices", None)
        self._chosen: NDArray[np.int64] | None = None
        if chosen is not None:
            self._chosen = chosen.column(0).to_numpy().astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_data", "_version", "_columns", "_fields")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        if self._chosen is not None:
            return len(self._chosen)
        return int(self._ends[-1]) if len(self._ends) else 0

    def _has_nulls(self, name: str) -> bool:
        for part in self._parts:
            values = part.column(name)
            if is_file(values.type):
                # flatten takes the nulls of the struct into account.
                values = values.flatten()[[field.name for field in values.type].index("bytes")]
            if values.null_count:
                return True
        return False

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the table for these samples."""
        bad = (indices < 0) | (indices >= len(self))
        if bad.any():
            raise IndexError(
                f"row {int(indices[bad][0])} is out of range: there are {len(self)} rows"
            )
        return indices if self._chosen is None else self._chosen[indices]

    def _column(self, part: int, name: str) -> Column:
        column = self._made.get((part, name))
        if column is None:
            with self._making:
                column = self._made.setdefault(
                    (part, name), make_column(self._parts[part].column(name))
                )
        return column

    def read(self, indices: Sequence[int]) -> list[Any]:
        rows = self._rows(np.array(indices, dtype=np.int64))
        parts = self._ends.searchsorted(rows, side="right")
        starts = np.concatenate(([0], self._ends))[parts]
        out = []
        for index, part, place in zip(
            indices, parts.tolist(), (rows - starts).tolist(), strict=True
        ):
            try:
                out.append({name: self._column(part, name)[place] for name in self._columns})
            except SourceError as error:
                raise SourceError(f"{self.name(index)} {error}") from None
        return out

    def file_samples(self) -> FileSamples | None:
        """The rows, if one column is files and the others are numbers, without nulls."""
        specs = [(name, self._fields[name]) for name in self._columns]
        files = [name for name, spec in specs if isinstance(spec, BytesSpec)]
        others = [name for name, spec in specs if isinstance(spec, ArraySpec) and spec.shape == ()]
        if len(files) != 1 or len(others) + 1 != len(specs):
            return None
        return FileSamples(
            None,
            files[0],
            {name: partial(self._take_numbers, name) for name in others},
            self._columns,
            partial(self._contents, files[0]),
            partial(self._peek, files[0]),
        )

    def _contents(self, name: str, indices: NDArray[np.int64]) -> list[Any]:
        """The bytes of these samples as views of the table."""
        rows = self._rows(indices)
        parts = self._ends.searchsorted(rows, side="right")
        starts = np.concatenate(([0], self._ends))
        out: list[Any] = [None] * len(rows)
        for part in np.unique(parts).tolist():
            column: Any = self._column(part, name)
            places = np.flatnonzero(parts == part)
            found = column.views(rows[places] - starts[part])
            for place, view in zip(places.tolist(), found, strict=True):
                out[place] = view
        return out

    def _peek(self, name: str) -> bytes:
        """The first bytes of the first sample."""
        first = self._contents(name, np.zeros(1, dtype=np.int64))[0]
        return b"" if first is None else bytes(first[:12])

    def _take_numbers(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a column of numbers, all of which are converted at once and kept."""
        with self._making:
            values = self._numbers.get(name)
            if values is None:
                spec = self._fields[name]
                dtype = spec.dtype if isinstance(spec, ArraySpec) else None
                parts = [part.column(name).to_numpy(zero_copy_only=False) for part in self._parts]
                values = self._numbers[name] = np.concatenate(parts).astype(dtype)
        return values[self._rows(indices)]

    def name(self, index: int) -> str:
        return f"row {index} of the {_kind(self._data)}"

    def identity(self) -> str:
        if self._version is not None:
            return fingerprint(("arrow", "version", self._version, self._columns))
        # Hugging Face datasets have a fingerprint of their data and of all operations on it.
        own = getattr(self._data, "_fingerprint", None)
        if own is None:
            own = _digest(self._parts)
        return fingerprint(("arrow", own, self._columns))

    @property
    def shards(self) -> NDArray[np.int64] | None:
        """The batches of rows that a table consists of, unless a dataset was shuffled."""
        return None if self._chosen is not None else np.diff(self._ends, prepend=0)

    def fields(self) -> dict[str | int, Spec] | Spec:
        return dict(self._fields)


def _table(data: Any) -> Any:
    """The Arrow table of a dataset, or the table itself."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError.of("from_arrow", "pyarrow", "parquet") from error
    if isinstance(data, pa.Table):
        return data
    if type(data).__module__.partition(".")[0] != "datasets":
        raise PipelineError(
            f"from_arrow() got a {type(data).__name__}; give a pyarrow.Table or a Dataset of "
            "Hugging Face. For other datasets there is from_dataset()."
        )
    if not hasattr(data, "data") or isinstance(data, dict):
        splits = f", such as {next(iter(data))!r}" if isinstance(data, dict) and data else ""
        raise PipelineError(
            f"from_arrow() got a {type(data).__name__}, which has no table of its own. Give one "
            f"split of it{splits}, or a stream to from_dataset()."
        )
    if getattr(data, "_format_type", None) == "custom":
        raise PipelineError(
            "from_arrow() got a Dataset with a transform (set_transform), which it would not "
            "apply. Give dataset.with_format(None) and apply the transform with map(), or give "
            "the dataset to from_dataset()."
        )
    return data.data.table


def _kind(data: Any) -> str:
    return "dataset" if type(data).__module__.partition(".")[0] == "datasets" else "table"


def _digest(parts: Sequence[Any]) -> str:
    """A digest of the rows: the same for the same table in another process."""
    import pyarrow as pa

    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.schema.remove_metadata()) as writer:
            writer.write_batch(part)
        digest.update(sink.getvalue())
    return digest.hexdigest()
