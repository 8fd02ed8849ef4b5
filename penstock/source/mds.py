"""A source whose samples are those of MosaicML Streaming's shards (MDS)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.compressed import is_compressed
from penstock.source.objects.protocol import StorageOptions
from penstock.source.packed_folder import PackedFolder, folder_at
from penstock.source.shards import ShardParts, ShardSource, open_shards
from penstock.source.source import FileSamples

_INDEX = "index.json"
_SIZE = 4
"""Bytes of the numbers with which a shard begins, and of the sizes in a sample."""

_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""The codes of array types in the encoding ``ndarray``."""

_NUMBERS = {name: np.dtype(name) for name in _DTYPES.values()} | {"int": np.dtype("int64")}
_CONTENTS = ("bytes", "jpeg", "png")
"""Encodings whose values stay bytes: images are decoded by ``ps.image.decode``."""

_MODES = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}


def _array(content: bytes, config: str) -> NDArray[Any]:
    """An array: its type and shape are in the encoding, or else before its values."""
    dtype, _, shape = config.partition(":")
    at = 0
    if not dtype:
        dtype, at = _DTYPES[content[0]], 1
    if shape:
        sides = [int(side) for side in shape.split(",")]
    else:
        count, width = content[at] >> 2, 1 << (content[at] & 3)
        at += 1
        numbers = np.frombuffer(content, f"<u{width}", count, at)
        sides, at = [int(side) for side in numbers], at + count * width
    array: NDArray[Any] = np.frombuffer(content, dtype, offset=at).reshape(sides).copy()
    return array


def _raw_picture(content: bytes) -> NDArray[np.uint8]:
    """A picture as PIL holds it: width, height, the name of the mode, pixels."""
    width, height, length = np.frombuffer(content, "<u4", 3).tolist()
    mode = content[12 : 12 + length].decode()
    channels = _MODES.get(mode)
    if channels is None:
        raise ValueError(f"a picture of mode {mode}; {', '.join(_MODES)} can be read")
    pixels = np.frombuffer(content, np.uint8, offset=12 + length).copy()
    shape = (height, width, channels) if channels > 1 else (height, width)
    picture: NDArray[np.uint8] = pixels.reshape(shape)
    return picture


def _number(kind: str, content: bytes) -> Any:
    """A number. Its type in a batch is that of the column, so only ``int`` becomes Python's."""
    number = np.frombuffer(content, _NUMBERS[kind])[0]
    return int(number) if kind == "int" else number


def _text(content: bytes) -> str:
    return content.decode("utf-8")


_TEXT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "str_int": int,
    "str_float": float,
    "str_decimal": Decimal,
    "json": json.loads,
}


@dataclass(frozen=True)
class MdsColumn:
    """A column: its name, its encoding, and the size of its values if all have the same."""

    name: str
    encoding: str
    size: int | None

    @property
    def kind(self) -> str:
        return self.encoding.partition(":")[0]

    @property
    def spec(self) -> Spec:
        if self.kind in _NUMBERS:
            return ArraySpec.of((), _NUMBERS[self.kind])
        return BytesSpec() if self.kind in _CONTENTS else None

    def check(self, place: str) -> None:
        if self.kind == "pkl":
            raise SourceError(
                f"Column {self.name!r} of {place} is a pickle, which runs code when it is read. "
                "Choose other columns with columns=, or write it with another encoding."
            )
        if self.spec is None and self.kind not in ("ndarray", "pil", *_TEXT):
            raise SourceError(
                f"Column {self.name!r} of {place} has the encoding {self.encoding!r}, which cannot "
                "be read. Choose other columns with columns=."
            )

    def decode(self, content: bytes) -> Any:
        kind = self.kind
        if kind in _CONTENTS:
            return content
        if kind in _NUMBERS:
            return _number(kind, content)
        if kind == "ndarray":
            return _array(content, self.encoding.partition(":")[2])
        if kind == "pil":
            return _raw_picture(content)
        return _TEXT[kind](_text(content))


class MdsSource(ShardSource):
    """Samples of MDS shards. A sample is a dict of its columns.

    ``folder`` holds ``index.json``. Text, numbers, arrays and JSON become Python objects; JPEG and
    PNG stay bytes, for ``ps.image.decode``. Compressed shards are decompressed once.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Sequence[str] | str | None = None,
        storage: StorageOptions | None = None,
        version: str | None = None,
    ) -> None:
        place = folder_at(folder, storage)
        self.folder = place.shown
        shards = self._index(place)
        self._all = _columns(shards[0])
        for number, shard in enumerate(shards):
            if _columns(shard) != self._all:
                raise SourceError(
                    f"Shard {number} of {self.folder} has other columns than the first one. Write "
                    "all shards with the same columns and encodings."
                )
        self._columns = self._choose([columns] if isinstance(columns, str) else columns)
        names = place.names() if any(shard.get("zip_data") for shard in shards) else ()
        paths = [self._file(shard, names) for shard in shards]
        # By URL each shard is an object with this name. Local names are taken as they are.
        suffixes = tuple({os.path.splitext(path)[1] for path in paths})
        files = self._files = open_shards(paths, suffixes, "MDS", storage, version)
        counts = [int(shard["samples"]) for shard in shards]
        with ThreadPoolExecutor(min(files.threads, len(paths))) as pool:
            places = list(pool.map(self._places, range(len(paths)), counts))
        self._begins = np.concatenate([place[:-1] for place in places])
        self._stops = np.concatenate([place[1:] for place in places])
        self._ends = np.cumsum([len(place) - 1 for place in places], dtype=np.int64)
        if not len(self._begins):
            raise SourceError(f"{self.folder} has no samples. Check the path.")

    def _index(self, folder: PackedFolder) -> list[dict[str, Any]]:
        path = f"{self.folder}/{_INDEX}"
        content = folder.read(_INDEX)
        if content is None:
            raise SourceError(
                f"{self.folder} has no {_INDEX}, so it is not a folder of MDS shards. If the data "
                "has splits, give the folder of one."
            )
        try:
            shards: list[dict[str, Any]] = json.loads(content)["shards"]
            if not shards:
                raise SourceError(f"{path} lists no shards. Check the path.")
            for shard in shards:
                if (shard["format"], shard["version"]) != ("mds", 2):
                    raise SourceError(
                        f"{path} lists a shard of format {shard['format']!r}, version "
                        f"{shard['version']!r}; only MDS of version 2 can be read."
                    )
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{path} cannot be read as the index of MDS shards: {error}"
            ) from error
        return shards

    def _choose(self, names: Sequence[str] | None) -> list[MdsColumn]:
        by_name = {column.name: column for column in self._all}
        known = f"The columns of {self.folder} are: {', '.join(by_name)}."
        if names is not None and not names:
            raise PipelineError(f"columns is empty; name at least one column. {known}")
        chosen = []
        for name in by_name if names is None else names:
            if name not in by_name:
                raise PipelineError(f"{self.folder} has no column {name!r}. {known}")
            by_name[name].check(self.folder)
            chosen.append(by_name[name])
        return chosen

    def _file(self, shard: dict[str, Any], names: Container[str]) -> str:
        """The file of a shard in the folder: uncompressed if there is such a file."""
        raw, packed = shard["raw_data"]["basename"], shard.get("zip_data")
        for name in (raw, *([packed["basename"]] if packed else [])):
            if ".." in name.split("/"):
                raise SourceError(
                    f"{self.folder}/{_INDEX} names the shard {name!r}, which is outside of the "
                    "folder. Take the data from a trustworthy origin, or correct the name."
                )
        if raw in names or not packed:
            return f"{self.folder}/{raw}"
        path = f"{self.folder}/{packed['basename']}"
        if not is_compressed(path):
            raise SourceError(
                f"{path} is compressed with {shard.get('compression')!r}, which cannot be read; "
                "zstd, gz and bz2 can. Decompress it beside the compressed file."
            )
        return path

    def _places(self, number: int, samples: int) -> NDArray[np.int64]:
        """Where each sample of a shard begins, and where the last one ends."""
        reader = self._files.reader(number)
        path, size = reader.path, reader.size()
        wanted = (samples + 2) * _SIZE
        remedy = "Copy it again from its origin."
        if size < wanted:
            raise SourceError(f"{path} has {size} bytes, too few for {samples} samples. {remedy}")
        head = np.frombuffer(reader.read([(0, wanted)])[0], "<u4").astype(np.int64)
        if head[0] != samples:
            raise SourceError(
                f"{path} says that it has {head[0]} samples, and {_INDEX} says {samples}. {remedy}"
            )
        places = head[1:]
        least = sum(column.size or _SIZE for column in self._all)
        if places[0] < wanted or places[-1] > size or (places[1:] - places[:-1] < least).any():
            raise SourceError(f"{path} is damaged or cut off: its offsets are wrong. {remedy}")
        return places

    def __len__(self) -> int:
        return len(self._begins)

    def read(self, indices: Sequence[int]) -> list[Any]:
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"sample {wanted.max()} is out of range: there are {len(self)}")
        contents = self._files.read(list(self.shard_parts(wanted).rows()))
        return [
            self._decode(content, index)
            for content, index in zip(contents, wanted.tolist(), strict=True)
        ]

    def shard_parts(self, indices: NDArray[np.int64]) -> ShardParts:
        begins, stops = self._begins[indices], self._stops[indices]
        return ShardParts(self._ends.searchsorted(indices, side="right"), begins, stops - begins)

    def _decode(self, data: bytes, index: int) -> dict[str, Any]:
        """A sample: the sizes of values that have no fixed one, then all values."""
        variable = sum(not column.size for column in self._all)
        sizes = iter(np.frombuffer(data, "<u4", variable).tolist())
        at, parts = variable * _SIZE, {}
        for column in self._all:
            size = column.size or next(sizes)
            parts[column.name] = (at, size)
            at += size
        if at != len(data):
            raise SourceError(
                f"{self.name(index)} has {len(data)} bytes, and its columns have {at}: the shard "
                "is damaged. Copy it again from its origin."
            )
        sample = {}
        for column in self._columns:
            start, size = parts[column.name]
            try:
                sample[column.name] = column.decode(data[start : start + size])
            except (ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
                raise SourceError(
                    f"Column {column.name!r} of {self.name(index)} cannot be decoded as "
                    f"{column.encoding}: {error}. Copy the shard again from its origin."
                ) from error
        return sample

    def file_samples(self) -> FileSamples | None:
        """The samples, if one column is bytes and the others are numbers.

        The place of each value is then known without reading: only one column has no fixed size.
        """
        contents = [column for column in self._columns if isinstance(column.spec, BytesSpec)]
        others = [column for column in self._columns if column.kind in _NUMBERS]
        variable = [column for column in self._all if not column.size]
        if self._files.listing is None and others:
            # Each number would be a request of its own, also for samples that a cache has.
            return None
        if len(contents) != 1 or variable != contents or len(others) + 1 != len(self._columns):
            return None
        content = contents[0]
        place = self._all.index(content)
        before = _SIZE + sum(column.size or 0 for column in self._all[:place])
        fixed = _SIZE + sum(column.size or 0 for column in self._all)
        counts = self.shards
        files = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        sizes = self._stops - self._begins - fixed
        way = self._files.contents(ShardParts(files, self._begins + before, sizes))
        return FileSamples(
            None,
            content.name,
            {column.name: partial(self._numbers, column, place) for column in others},
            [column.name for column in self._columns],
            **way,
            peek=partial(self._peek, before),
        )

    def _peek(self, before: int) -> bytes:
        try:
            return self._files.reader(0).read([(int(self._begins[0]) + before, 12)])[0]
        except SourceError:
            return b""  # reported by the sample itself

    def _numbers(self, column: MdsColumn, content: int, indices: NDArray[np.int64]) -> NDArray[Any]:
        """The values of a column of numbers. ``content``: the place of the one without a size."""
        place, size = self._all.index(column), column.size or 0
        if place < content:
            starts = self._begins[indices] + _SIZE
            starts = starts + sum(other.size or 0 for other in self._all[:place])
        else:
            starts = self._stops[indices] - sum(other.size or 0 for other in self._all[place:])
        shards = self._ends.searchsorted(indices, side="right")
        found = self._files.read(
            list(ShardParts(shards, starts, np.full_like(starts, size)).rows())
        )
        values: NDArray[Any] = np.frombuffer(b"".join(found), _NUMBERS[column.kind])
        return values

    def name(self, index: int) -> str:
        shard = int(self._ends.searchsorted(index, side="right"))
        row = index - (int(self._ends[shard - 1]) if shard else 0)
        return f"sample {row} of {self._files.paths[shard]}"

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        paths = [path.removeprefix(f"{self.folder}/") for path in self._files.paths]
        columns = [(column.name, column.encoding) for column in self._columns]
        return fingerprint(("mds", paths, stats, columns))

    @property
    def shards(self) -> NDArray[np.int64]:
        return self._ends - np.concatenate(([0], self._ends[:-1]))

    def fields(self) -> dict[str | int, Spec] | Spec:
        return {column.name: column.spec for column in self._columns}


def _columns(shard: dict[str, Any]) -> list[MdsColumn]:
    names, encodings, sizes = (shard[f"column_{part}"] for part in ("names", "encodings", "sizes"))
    return [MdsColumn(*column) for column in zip(names, encodings, sizes, strict=True)]
