"""Columns of an Arrow table as Python values: taken apart once, then indexed row by row."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.operation import ArraySpec, BytesSpec, Spec


class Column(Protocol):
    """Values by row. A value belongs to whoever asked: changing it changes nothing here."""

    def __getitem__(self, row: int) -> Any: ...


class Blobs:
    """Bytes, or text, cut out of one buffer: nothing is made for rows that nobody asks for."""

    def __init__(self, values: Any, *, text: bool = False) -> None:
        _, offsets, data = values.buffers()
        count = len(values) + 1
        self._ends = np.frombuffer(offsets, dtype=np.int64, count=count, offset=8 * values.offset)
        self._data = memoryview(data if data is not None else b"")
        self._valid = _valid(values)
        self._text = text

    def __getitem__(self, row: int) -> bytes | str | None:
        if self._valid is not None and not self._valid[row]:
            return None
        data = self._data[self._ends.item(row) : self._ends.item(row + 1)]
        return str(data, "utf-8") if self._text else data.tobytes()


class Numbers:
    def __init__(self, values: Any) -> None:
        self._valid = _valid(values)
        if self._valid is not None:
            # With nulls in place Arrow would give floats, and lose the last digits of an int64.
            values = values.fill_null(False if values.type.bit_width == 1 else 0)
        self._values: NDArray[Any] = values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> int | float | bool | None:
        if self._valid is not None and not self._valid[row]:
            return None
        value: int | float | bool = self._values.item(row)
        return value


class Lists:
    """Lists of numbers, each a NumPy array."""

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


class Files:
    """Structs of bytes and path, as Hugging Face stores images and audio: the bytes."""

    def __init__(self, values: Any) -> None:
        # flatten, unlike field, takes the nulls of the struct into account.
        parts = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
        self._bytes = column(parts["bytes"])
        self._paths = column(parts["path"]) if "path" in parts else None

    def __getitem__(self, row: int) -> Any:
        value = self._bytes[row]
        path = self._paths[row] if value is None and self._paths is not None else None
        if path is not None:
            raise SourceError(
                f"holds the path {path!r} and no bytes. Store the bytes in the Parquet file, or "
                "read the files themselves with from_files."
            )
        return value


class Objects:
    """Anything else, as Arrow shows it to Python."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __getitem__(self, row: int) -> Any:
        return self._values[row].as_py()


def column(values: Any) -> Column:
    """The column that suits the type of these values (an array or a chunked array)."""
    import pyarrow as pa
    import pyarrow.types as of

    kind = values.type
    if of.is_dictionary(kind):
        kind = kind.value_type
        values = values.cast(kind)
    text = of.is_string(kind) or of.is_large_string(kind)
    if text or _is_bytes(kind):
        # Large types count in 64 bits: the chunks of a big row group fit into one.
        values = values.cast(pa.large_string() if text else pa.large_binary())
    values = _one(values)
    if text or _is_bytes(kind):
        return Blobs(values, text=text)
    if _is_number(kind):
        return Numbers(values)
    if _is_list(kind) and _is_number(kind.value_type) and not values.values.null_count:
        return Lists(values, kind.list_size if of.is_fixed_size_list(kind) else None)
    if is_file(kind):
        return Files(values)
    return Objects(values)


def spec(kind: Any) -> Spec:
    """What is known of a column from its type, if it has no nulls."""
    import pyarrow as pa
    import pyarrow.types as of

    if of.is_dictionary(kind):
        kind = kind.value_type
    if _is_bytes(kind) or is_file(kind):
        return BytesSpec()
    # A Python number becomes the widest type of its kind; uint64 does not fit into one of them.
    if of.is_integer(kind) and not of.is_uint64(kind):
        return ArraySpec.of((), np.int64)
    if of.is_floating(kind):
        return ArraySpec.of((), np.float64)
    if of.is_boolean(kind):
        return ArraySpec.of((), np.bool_)
    if _is_list(kind) and _is_number(kind.value_type):
        width = kind.list_size if of.is_fixed_size_list(kind) else None
        # Some versions of Arrow import pandas to name a dtype; an empty array has it for nothing.
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


def _one(values: Any) -> Any:
    """One array of a chunked one. Arrow returns chunks still if they are too many for one."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        return values.chunk(0) if values.num_chunks == 1 else pa.concat_arrays(values.chunks)
    return values


def _valid(values: Any) -> NDArray[np.bool_] | None:
    if not values.null_count:
        return None
    found: NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return found
