"""A source whose samples are groups of members of tar archives, as WebDataset writes them."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.manifest import provenance_of, read_manifest
from penstock.source.names import Names
from penstock.source.objects.address import is_url
from penstock.source.objects.protocol import StorageOptions
from penstock.source.packed_folder import folder_at
from penstock.source.shard_paths import ShardNames
from penstock.source.shards import ShardParts, ShardSource, open_shards
from penstock.source.source import FileSamples
from penstock.source.tar_index import (
    MOST_EXTENSIONS,
    NUMBERS,
    TarIndex,
    as_number,
    load_index,
    note_kept,
    too_many_extensions,
)
from penstock.store.ledger import Ledger

Decoder = Callable[[bytes], Any]
TarFields = str | Sequence[str] | Mapping[str, str] | None

KEY = "__key__"
"""The field that is the name of the sample."""

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def _array(content: bytes) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array


def _text(content: bytes) -> str:
    return content.decode("utf-8")


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(NUMBERS, int),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
}
"""By the last part of the extension. Others stay bytes. Pickles are never read unasked."""


@dataclass
class _TarField:
    """One field of all samples: for each sample, where its content is.

    - ``name``: a key of a dict, a position in a tuple, or ``None``: the sample itself.
    - ``extensions``: those that may hold it; ``kinds``: for each sample the number of its own, or
      -1 if it has none of them.
    - ``numbers``: values that are known without reading; all of them, or ``None``.
    """

    name: str | int | None
    extensions: tuple[str, ...]
    kinds: NDArray[np.int16]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    numbers: NDArray[np.int64] | None
    decoders: tuple[Decoder | None, ...] = ()

    @property
    def is_number(self) -> bool:
        return all(decode is int for decode in self.decoders)

    @property
    def spec(self) -> Spec:
        if self.is_number:
            return ArraySpec.of((), np.int64)
        return BytesSpec() if all(decode is None for decode in self.decoders) else None

    @property
    def complete(self) -> bool:
        return bool((self.kinds >= 0).all())


class TarSource(ShardSource):
    """Samples of tar shards: members with one name up to the first dot are one sample.

    ``fields`` says which extensions make up a sample: one (``"jpg"``: the sample is its bytes),
    a sequence (a tuple), or a mapping from names to extensions (a dict). ``"jpg;png"`` is the first
    of them that a sample has. ``None``: a dict of everything, and the name as ``"__key__"``; for a
    folder that ``pack`` wrote, samples are as they were packed.

    ``decoders`` are functions of bytes by extension, added to the default ones; ``None`` as a value
    leaves bytes. ``decoders=None``: all contents stay bytes.
    """

    def __init__(
        self,
        paths: ShardNames,
        fields: TarFields = None,
        decoders: Mapping[str, Decoder | None] | str | None = "auto",
        storage: StorageOptions | None = None,
        version: str | None = None,
    ) -> None:
        if fields is None and isinstance(paths, (str, os.PathLike)):
            packed = _packed(paths, storage)
            if packed is not None:
                paths, fields = packed
        files = self._files = open_shards(paths, SUFFIXES, "tar", storage, version)
        self._decoders = _decoders(decoders)
        ours = set(DECODERS.values())
        own = [decode for decode in self._decoders.values() if decode not in (None, *ours)]
        self.__dict__["threadsafe"] = not own
        self.__dict__["runs_user_code"] = bool(own)
        started = time.perf_counter()
        readers = [files.reader(number) for number in range(len(files.paths))]
        with files.making_index(), ThreadPoolExecutor(min(files.threads, len(readers))) as pool:
            indexes = list(pool.map(load_index, readers))
        note_kept(readers, time.perf_counter() - started)
        self._ends = np.cumsum([len(index) for index in indexes], dtype=np.int64)
        if not self._ends[-1]:
            raise SourceError(
                f"{self._shown()} holds no samples: no member has a name with an extension. Check "
                "the path."
            )
        self._keys = _joined_keys(indexes)
        table = _TarMembers(indexes)
        self._single = isinstance(fields, str)
        self._as_dict = fields is None or isinstance(fields, Mapping)
        self._everything = fields is None
        self._named = _named(fields, table)
        self._parts = [self._part(name, given, table) for name, given in self._named.items()]

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def _part(self, name: str | int | None, given: str, table: _TarMembers) -> _TarField:
        if given == KEY:
            none = np.zeros(0, dtype=np.int64)
            return _TarField(name, (KEY,), none.astype(np.int16), none, none, None)
        extensions = tuple(given.lower().split(";"))
        part = table.part(name, extensions)
        part.decoders = tuple(
            self._decoders.get(extension.rpartition(".")[2]) for extension in extensions
        )
        if not part.is_number:
            part.numbers = None
        missing = np.flatnonzero(part.kinds < 0)
        if len(missing) and not self._everything:
            index = int(missing[0])
            has = ", ".join(table.of_sample(index))
            raise SourceError(
                f"{len(missing):,} of {len(self):,} samples have no {given}. The first is "
                f"{self._keys[index]} in {self._shard(index)}; it has: {has}. Name the extensions "
                'that samples have with fields=, several as "jpg;png", or leave fields out to '
                "get what there is."
            )
        return part

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _shard(self, index: int) -> str:
        return self._files.paths[int(self._ends.searchsorted(index, side="right"))]

    def read(self, indices: Sequence[int]) -> list[Any]:
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"sample {wanted.max()} is out of range: there are {len(self)}")
        values: list[dict[Any, Any]] = [{} for _ in indices]
        shards = self._ends.searchsorted(wanted, side="right").tolist()
        places: list[tuple[int, int, int]] = []
        reads: list[tuple[int, _TarField, int]] = []
        for place, index in enumerate(wanted.tolist()):
            for part in self._parts:
                if part.extensions == (KEY,):
                    values[place][part.name] = self._keys[index]
                elif part.numbers is not None:
                    values[place][part.name] = part.numbers.item(index)
                elif part.kinds[index] >= 0:
                    values[place][part.name] = None  # keeps the order of the fields
                    reads.append((place, part, index))
                    places.append((shards[place], part.offsets.item(index), part.sizes.item(index)))
        contents = self._files.read(places)
        for (place, part, index), content in zip(reads, contents, strict=True):
            values[place][part.name] = self._decoded(part, index, content)
        if self._single:
            return [value[None] for value in values]
        return values if self._as_dict else [tuple(value.values()) for value in values]

    def _decoded(self, part: _TarField, index: int, content: bytes) -> Any:
        kind = int(part.kinds[index])
        decode = part.decoders[kind]
        if decode is None:
            return content
        try:
            return decode(content)
        except Exception as error:
            raise SourceError(
                f"{self._keys[index]}.{part.extensions[kind]} in {self._shard(index)} cannot be "
                f"decoded by {getattr(decode, '__name__', decode)}: {error}. Give another function "
                "with decoders=, or decoders=None to get bytes."
            ) from error

    def shard_parts(self, indices: NDArray[np.int64]) -> ShardParts:
        parts = [part for part in self._parts if len(part.kinds) and part.numbers is None]
        shards = self._ends.searchsorted(indices, side="right")
        if not parts:
            return ShardParts(shards[:0], indices[:0], indices[:0])
        there = np.stack([part.kinds[indices] >= 0 for part in parts], axis=1)
        offsets = np.stack([part.offsets[indices] for part in parts], axis=1)
        sizes = np.stack([part.sizes[indices] for part in parts], axis=1)
        return ShardParts(np.repeat(shards, there.sum(axis=1)), offsets[there], sizes[there])

    def file_samples(self) -> FileSamples | None:
        """The samples, if one field is bytes and the others are numbers."""
        contents = [part for part in self._parts if isinstance(part.spec, BytesSpec)]
        others = [part for part in self._parts if part.is_number and part.extensions != (KEY,)]
        if len(contents) != 1 or len(others) + 1 != len(self._parts):
            return None
        content = contents[0]
        if not all(part.complete for part in self._parts):
            return None
        if not self._as_dict and not self._single and content.name != 0:
            return None
        numbers = np.arange(len(self._files.paths), dtype=np.int64)
        files = np.repeat(numbers, np.diff(self._ends, prepend=0))
        return FileSamples(
            None,
            content.name,
            {part.name: partial(self._numbers, part) for part in others if part.name is not None},
            [str(part.name) for part in self._parts] if self._as_dict else (),
            **self._files.contents(ShardParts(files, content.offsets, content.sizes)),
        )

    def _numbers(self, part: _TarField, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of one field. Those that the index does not have are read."""
        if part.numbers is not None:
            return part.numbers[indices]
        values = np.empty(len(indices), dtype=np.int64)
        shards = self._ends.searchsorted(indices, side="right")
        chosen = ShardParts(shards, part.offsets[indices], part.sizes[indices])
        for place, content in enumerate(self._files.read(list(chosen.rows()))):
            number = as_number(content)
            if number is None:
                raise SourceError(
                    f"{self.name(int(indices[place]))}: {content[:40]!r} is not a whole number "
                    f"that fits 64 bits, and the extension is {part.extensions[0]}. Give a "
                    "function with decoders=, or decoders=None to get bytes."
                )
            values[place] = number
        return values

    def name(self, index: int) -> str:
        part = next((part for part in self._parts if len(part.kinds)), None)
        kind = -1 if part is None else int(part.kinds[index])
        extension = "" if part is None or kind < 0 else f".{part.extensions[kind]}"
        return f"{self._shard(index)}/{self._keys[index]}{extension}"

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        paths = self._relative_paths()
        named = list(self._named.items())
        changed = {
            extension: decode
            for extension, decode in self._decoders.items()
            if DECODERS.get(extension) is not decode
        }
        dropped = sorted(DECODERS.keys() - self._decoders.keys())
        return fingerprint(("tar", paths, stats, named, changed, dropped))

    @property
    def shards(self) -> NDArray[np.int64]:
        return np.diff(self._ends, prepend=0)

    def fields(self) -> dict[str | int, Spec] | Spec:
        if self._single:
            return self._parts[0].spec
        if self._everything and not all(part.complete for part in self._parts):
            return None
        return {
            part.name: None if part.extensions == (KEY,) else part.spec
            for part in self._parts
            if part.name is not None
        }


class _TarMembers:
    """The members of all shards, as if they were one."""

    def __init__(self, indexes: Sequence[TarIndex]) -> None:
        known: dict[str, int] = {}
        kinds = []
        for index in indexes:
            codes = [known.setdefault(e, len(known)) for e in index.extensions]
            kinds.append(np.array(codes, dtype=np.int16)[index.kinds])
            if len(known) > MOST_EXTENSIONS:
                raise too_many_extensions("The data set", list(known))
        self.extensions = list(known)
        self._codes = known
        self._kinds = np.concatenate(kinds)
        counts = np.concatenate([np.diff(index.ends, prepend=0) for index in indexes])
        self._samples = np.repeat(np.arange(len(counts)), counts)
        self._count = len(counts)
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._sizes = np.concatenate([index.sizes for index in indexes])
        self._numbers = np.concatenate([index.numbers for index in indexes])
        self._known = np.concatenate([index.known for index in indexes])

    def part(self, name: str | int | None, extensions: tuple[str, ...]) -> _TarField:
        """The first of these extensions that each sample has."""
        kinds = np.full(self._count, -1, dtype=np.int16)
        members = np.zeros(self._count, dtype=np.int64)
        for number in reversed(range(len(extensions))):
            code = self._codes.get(extensions[number])
            if code is None:
                continue
            found = np.flatnonzero(self._kinds == code)
            kinds[self._samples[found]] = number
            members[self._samples[found]] = found
        known = bool(self._known[members].all()) and bool((kinds >= 0).all())
        numbers = self._numbers[members] if known else None
        return _TarField(
            name, extensions, kinds, self._offsets[members], self._sizes[members], numbers
        )

    def of_sample(self, index: int) -> list[str]:
        """The extensions that a sample has."""
        first, last = self._samples.searchsorted([index, index + 1])
        return [self.extensions[kind] for kind in self._kinds[first:last]]


def _packed(
    folder: str | os.PathLike[str], storage: StorageOptions | None
) -> tuple[list[str], TarFields] | None:
    """The shards and fields of a folder that ``pack`` wrote; ``None`` for other folders and files.

    Only the shards that ``pack`` lists: folders below may have been packed too, and a shard that is
    missing is an error.
    """
    if not is_url(folder) and storage is not None:
        return None  # refused with the names of the shards
    if is_url(folder) and _is_shard(str(folder)):
        return None
    place = folder_at(folder, storage)
    manifest = read_manifest(place)
    if manifest is None:
        return None
    if not manifest.complete:
        done = sum(shard.samples for shard in manifest.shards)
        raise SourceError(
            f"{folder} is not packed to the end: it has {done:,} of {manifest.samples:,} samples. "
            "Pack again, which goes on where it stopped; or give fields= to read what there is."
        )
    if place.path is not None:
        for shard in manifest.shards:
            if not (place.path / shard.name).exists():
                raise SourceError(
                    f"{place.path / shard.name} is missing: pack.json says that it has samples "
                    f"{shard.first:,} to {shard.first + shard.samples - 1:,}. Pack again, which "
                    "writes what is missing."
                )
        Ledger().use(provenance_of(place.path, manifest))
    fields: TarFields = manifest.tar_fields()
    return [f"{place.shown}/{shard.name}" for shard in manifest.shards], fields


def _is_shard(url: str) -> bool:
    """Whether a URL names shards, and not a folder."""
    return url.endswith(SUFFIXES) or any(sign in url for sign in "*?[{")


def _named(fields: TarFields, table: _TarMembers) -> dict[str | int | None, str]:
    """The extensions of each field, by its name, position, or ``None`` for a single one."""
    if fields is None:
        return {KEY: KEY, **{extension: extension for extension in table.extensions}}
    named: dict[Any, str]
    if isinstance(fields, str):
        named = {None: fields}
    elif isinstance(fields, Mapping):
        named = dict(fields)
    else:
        named = dict(enumerate(fields))
    if not named or not all(isinstance(given, str) and given for given in named.values()):
        raise PipelineError(
            f'fields is {fields!r}; give an extension, such as "jpg", a sequence of them, or a '
            'mapping from names to extensions, such as {"image": "jpg;png", "label": "cls"}.'
        )
    return named


def _decoders(given: Mapping[str, Decoder | None] | str | None) -> dict[str, Decoder | None]:
    if given is None:
        return {}
    if given == "auto":
        return dict(DECODERS)
    if isinstance(given, str) or not all(d is None or callable(d) for d in given.values()):
        raise PipelineError(
            f'decoders is {given!r}; give "auto", None for bytes, or a mapping from extensions to '
            'functions of bytes, such as {"cls": int}.'
        )
    return {**DECODERS, **{name.lower().lstrip("."): decode for name, decode in given.items()}}


def _joined_keys(indexes: Sequence[TarIndex]) -> Names:
    starts = np.cumsum([0, *(len(index.keys.text) for index in indexes)])
    ends = [index.keys.ends + start for index, start in zip(indexes, starts, strict=False)]
    return Names.packed(np.concatenate([i.keys.text for i in indexes]), np.concatenate(ends))
