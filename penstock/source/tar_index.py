"""The index of a tar shard: which samples it holds, and where their parts begin and end.

It is read from a sidecar file, in our own format or in DALI's, or made once by reading all headers
and kept in a private directory, under the path, size and modification time of the shard.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.errors import PenstockError, SourceError
from penstock.host.private_dir import own_directory, replacing
from penstock.host.text import many
from penstock.source.names import Names
from penstock.source.ranges import RangeReader
from penstock.source.shard_paths import common_folder
from penstock.store.ledger import Ledger, Provenance

_log = logging.getLogger("penstock.source")

BLOCK = 512
"""Tar archives consist of blocks of this size: a header is one, contents are padded to it."""

_LONGEST_HEADER = 1 << 20
"""Bytes of an extended header. Real ones have a few hundred; more means a damaged archive."""

_FILES = frozenset(b"07\0")
"""Types of members that are ordinary files."""

NUMBERS = ("cls", "cls2", "count", "id", "index", "inx")
"""Extensions that hold one whole number as text. The index keeps them, so they need no reading."""

_DIGITS = 20

MOST_EXTENSIONS = 1000
"""Different extensions of a data set. More of them are keys with dots in them."""

_DALI = ("v1.2",)
_NUMBER = re.compile("[0-9]{1,18}")
_VERSION = 2
"""Of the files in which indexes are kept."""


@dataclass
class TarIndex:
    """The samples of one shard, in order.

    - ``keys``: the name of each sample: that of its members up to the first dot.
    - ``ends``: for each sample, the number of members up to its last one.
    - ``extensions``: all that occur; ``kinds``: for each member, the number of its own.
    - ``offsets``, ``sizes``: of the content of each member, in bytes.
    - ``numbers``: the value of members with an extension of ``NUMBERS``, where ``known`` is true.
    """

    keys: Names
    ends: NDArray[np.int64]
    extensions: tuple[str, ...]
    kinds: NDArray[np.int16]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    numbers: NDArray[np.int64]
    known: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def sound(self) -> bool:
        """Whether the arrays fit each other: a sidecar comes with the data, from anywhere."""
        members: tuple[NDArray[Any], ...] = (
            self.kinds,
            self.offsets,
            self.sizes,
            self.numbers,
            self.known,
        )
        kinds = ("i", "i", "i", "i", "b")
        if self.ends.ndim != 1 or self.ends.dtype.kind != "i" or len(self.keys) != len(self.ends):
            return False
        if any(a.ndim != 1 or a.dtype.kind != k for a, k in zip(members, kinds, strict=True)):
            return False
        count = int(self.ends[-1]) if len(self.ends) else 0
        if (
            any(len(array) != count for array in members)
            or (np.diff(self.ends, prepend=0) < 1).any()
        ):
            return False
        if not count:
            return True
        fits = self.kinds.min() >= 0 and self.kinds.max() < len(self.extensions)
        return bool(fits and self.offsets.min() >= 0 and self.sizes.min() >= 0)


@dataclass
class IndexBuilder:
    """Collects members in the order of the archive, and groups them into samples."""

    path: str
    keys: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    _extensions: dict[str, int] = field(default_factory=dict)
    _in_sample: set[int] = field(default_factory=set)

    def add(self, name: str, offset: int, size: int, number: int | None = None) -> None:
        """Add a member. Members without an extension, and WebDataset's own, are no samples."""
        parts = split_name(name)
        if parts is None:
            return
        key, extension = parts
        kind = self._extensions.setdefault(extension, len(self._extensions))
        if len(self._extensions) > MOST_EXTENSIONS:
            raise too_many_extensions(self.path, list(self._extensions))
        if not self.keys or self.keys[-1] != key:
            self.keys.append(key)
            self.ends.append(len(self.kinds))
            self._in_sample.clear()
        if kind in self._in_sample:
            raise SourceError(
                f"{self.path} has two members {key}.{extension}, the second at byte {offset}: a "
                "sample can have only one. Write the shard again with different names."
            )
        self._in_sample.add(kind)
        self.ends[-1] += 1
        self.kinds.append(kind)
        self.places.append((offset, size))
        self.numbers.append(number)

    def index(self) -> TarIndex:
        places = np.array(self.places, dtype=np.int64).reshape(-1, 2)
        return TarIndex(
            Names(self.keys),
            np.array(self.ends, dtype=np.int64),
            tuple(self._extensions),
            np.array(self.kinds, dtype=np.int16),
            places[:, 0].copy(),
            places[:, 1].copy(),
            np.array([number or 0 for number in self.numbers], dtype=np.int64),
            np.array([number is not None for number in self.numbers], dtype=bool),
        )


def too_many_extensions(path: str, extensions: list[str]) -> SourceError:
    shown = ", ".join(extensions[:3])
    return SourceError(
        f"{path} has more than {MOST_EXTENSIONS:,} different extensions, such as {shown}: the "
        "names of samples have dots, and WebDataset's extension begins at the first dot. Write the "
        "shards again without dots in the names of samples."
    )


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member, as WebDataset divides them; ``None`` if it is no sample's.

    >>> split_name("train/cat/007.left.JPG")
    ('train/cat/007', 'left.jpg')
    >>> split_name("README") is split_name(".hidden") is None
    True
    """
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start or dot == len(name) - 1:
        return None
    if name[start:dot].startswith("__") and name.endswith("__"):
        return None
    return name[:dot], name[dot + 1 :].lower()


# --------------------------------------------------------------------------------------- headers


def scan(reader: RangeReader) -> TarIndex:
    """Read all headers of an archive. Raises SourceError if it is damaged or cut off."""
    builder = IndexBuilder(reader.path)
    headers = _TarHeaders(reader)
    for name, offset, size in headers:
        number = None
        if size <= _DIGITS and name.rpartition(".")[2].lower() in NUMBERS:
            number = as_number(headers.at(offset, size))
        builder.add(name, offset, size, number)
    return builder.index()


def as_number(content: bytes) -> int | None:
    """The whole number that a member holds as text; ``None`` if it holds something else."""
    try:
        number = int(content)
    except ValueError:
        return None
    return number if -(2**63) <= number < 2**63 else None


class _TarHeaders:
    """The members of an archive that are files: name, offset and size of the content."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._path = reader.path
        self._size = reader.size()
        self._start = 0
        self._window = b""
        self._last = 0
        """The size of the last member."""

    def at(self, offset: int, size: int) -> bytes:
        """Bytes of the archive, from the window if it has them."""
        start = offset - self._start
        if start < 0 or start + size > len(self._window):
            # A header and a small member come along. If members are large, only headers are read.
            window = self._reader.block if self._last < self._reader.block // 4 else 8 * BLOCK
            length = min(max(size, window), self._size - offset)
            if length < size:
                raise self._cut_off(offset, size)
            (self._window,) = self._reader.read([(offset, length)])
            self._start, start = offset, 0
        return self._window[start : start + size]

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        if self._size and self._size < BLOCK:
            raise self._damaged(0, "it is shorter than one header")
        at, name, size_given = 0, None, None
        while at < self._size:
            block = self.at(at, BLOCK)
            if not block.strip(b"\0"):
                return  # blocks of zeros end an archive
            size = self._check(block, at)
            kind = block[156:157]
            content = at + BLOCK
            if size_given is not None and kind[0] in _FILES:
                size = size_given
            if content + size > self._size:
                raise self._cut_off(content, size)
            if kind in (b"x", b"L") and size <= _LONGEST_HEADER:
                text = self.at(content, size)
                if kind == b"L":
                    name = _text(text)
                else:
                    records = self._records(text, at)
                    if b"path" in records:
                        name = _text(records[b"path"])
                    if records.get(b"size", b"").isdigit():
                        size_given = int(records[b"size"])
            elif kind in (b"x", b"L"):
                raise self._damaged(at, f"its header says that a name has {size:,} bytes")
            elif kind == b"S":
                raise SourceError(
                    f"{self._path} has a sparse member at byte {at}, which cannot be read at "
                    "random. Write the archive again without --sparse."
                )
            elif kind not in (b"g", b"K"):
                if kind[0] in _FILES:
                    yield name or _short_name(block), content, size
                name = size_given = None
            self._last = size
            at = content + -(-size // BLOCK) * BLOCK
        if name is not None or size_given is not None:
            raise self._damaged(self._size, "a member is missing after its extended header")

    def _check(self, block: bytes, at: int) -> int:
        """The size of the content, if the checksum of the header is right."""
        try:
            stated = int(block[148:156].strip(b"\0 "), 8)
        except ValueError:
            stated = -1
        if stated != sum(block) - sum(block[148:156]) + 8 * 32:
            hint = " It is compressed." if at == 0 and block[:2] == b"\x1f\x8b" else ""
            raise self._damaged(at, f"there is no tar header.{hint}".rstrip("."))
        field = block[124:136]
        if field[0] & 0x80:
            return int.from_bytes(field, "big") & ~(0x80 << 88)
        digits = field.strip(b"\0 ")
        try:
            size = int(digits, 8) if digits else 0
        except ValueError:
            size = -1
        if size < 0:  # int() takes a sign, with which reading would go back
            raise self._damaged(at, "the header has no size")
        return size

    def _records(self, text: bytes, at: int) -> dict[bytes, bytes]:
        """The records of an extended header: "LENGTH KEY=VALUE\\n", one after the other."""
        records: dict[bytes, bytes] = {}
        while text:
            length, _, _ = text.partition(b" ")
            if not length.isdigit() or not 0 < int(length) <= len(text):
                raise self._damaged(at, "its extended header cannot be read")
            key, _, value = text[len(length) + 1 : int(length) - 1].partition(b"=")
            records[key] = value
            text = text[int(length) :]
        return records

    def _damaged(self, at: int, why: str) -> SourceError:
        return SourceError(
            f"{self._path} is damaged at byte {at}: {why}. Copy it again from its origin, or leave "
            "it out."
        )

    def _cut_off(self, at: int, size: int) -> SourceError:
        return SourceError(
            f"{self._path} is cut off: a member of {size:,} bytes begins at byte {at:,}, and the "
            f"file has {self._size:,} bytes. Copy it again from its origin, or leave it out."
        )


def _text(name: bytes) -> str:
    return os.fsdecode(name.split(b"\0", 1)[0])


def _short_name(block: bytes) -> str:
    name = _text(block[:100])
    if block[257:263] == b"ustar\0":
        prefix = _text(block[345:500])
        if prefix:
            return f"{prefix}/{name}"
    return name


# -------------------------------------------------------------------------------------- sidecars


def dali_path(path: str) -> str:
    """Where ``wds2idx`` writes the index of a shard by default: x.idx for x.tar."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.split(".", 1)[0] + ".idx")


def read_dali(text: str, path: str) -> TarIndex | None:
    """An index in the format of DALI's ``wds2idx``; ``None`` if it is another format.

    The first line is "v1.2 SAMPLES". Each further line is a sample: for each member its extension,
    offset, size and name.
    """
    lines = text.splitlines()
    head = lines[0].split() if lines else []
    if len(head) != 2 or head[0] not in _DALI or head[1] != str(len(lines) - 1):
        return None
    builder = IndexBuilder(path)
    for line in lines[1:]:
        words = line.split(" ")
        if len(words) % 4:
            return None  # a name with a blank: the line cannot be divided
        for extension, offset, size, name in zip(*(words[i::4] for i in range(4)), strict=True):
            if not (_NUMBER.fullmatch(offset) and _NUMBER.fullmatch(size)):
                return None
            if not name.endswith(extension):
                return None
            builder.add(name, int(offset), int(size))
    index = builder.index()
    return index if len(index) == len(lines) - 1 else None


def write_dali(index: TarIndex) -> str:
    """The index in DALI's format. Names have no blanks, or DALI could not read them."""
    lines = [f"{_DALI[0]} {len(index)}"]
    start = 0
    for sample, end in enumerate(index.ends.tolist()):
        key, words = index.keys[sample], []
        for member in range(start, end):
            extension = index.extensions[index.kinds[member]]
            place = f"{index.offsets[member]} {index.sizes[member]}"
            words.append(f"{extension} {place} {key}.{extension}")
        lines.append(" ".join(words))
        start = end
    return "\n".join(lines) + "\n"


def agrees(index: TarIndex, reader: RangeReader) -> bool:
    """Whether some members of a sidecar index are where it says: it may be of an older shard."""
    count, size = len(index.offsets), reader.size()
    if not count:
        return False
    ends = index.offsets + index.sizes
    if int(ends.max()) > size or int(index.offsets.min()) < BLOCK:
        return False
    last = -(-int(ends[-1]) // BLOCK) * BLOCK
    looks = sorted({0, count // 3, 2 * count // 3, count - 1})
    ranges = [(int(index.offsets[member]) - BLOCK, BLOCK) for member in looks]
    after, *blocks = reader.read([(min(last, size), max(0, min(BLOCK, size - last))), *ranges])
    if after.strip(b"\0"):
        return False  # members were added
    for member, block in zip(looks, blocks, strict=True):
        sample = int(index.ends.searchsorted(member, side="right"))
        name = f"{index.keys[sample]}.{index.extensions[index.kinds[member]]}"
        try:
            found = int(block[124:136].strip(b"\0 ") or b"0", 8)
        except ValueError:
            return False
        # A long name is cut off in the header.
        short = _short_name(block)
        if found != index.sizes[member] or not name.lower().startswith(short.lower()[:100]):
            return False
    return True


# ------------------------------------------------------------------------------------------ kept


def load_index(reader: RangeReader) -> TarIndex:
    """The index of a shard: kept before, in a sidecar, or read from all its headers."""
    place = _place(reader)
    kept = None if place is None else read_index(place)
    if kept is not None:
        return kept
    sidecar = _sidecar(reader)
    if sidecar is not None and not reader.far:
        return sidecar
    index = sidecar or scan(reader)
    if place is not None:
        _keep(place, index)
    return index


def note_kept(readers: Sequence[RangeReader], seconds: float) -> None:
    """Note in the ledger the indexes that are kept of these shards, and how long reading took."""
    places = [place for reader in readers if (place := _place(reader)) and place.exists()]
    if not places:
        return
    paths = [reader.path for reader in readers]
    top = paths[0] if len(paths) == 1 else common_folder(paths)
    names = tuple(place.name for place in places)
    made = Provenance(
        kind="index",
        identity=hashlib.blake2b("\0".join(names).encode(), digest_size=16).hexdigest(),
        place=str(places[0].parent),
        files=names,
        origin=top,
        made_by=(f"{many(len(names), 'index', 'indexes')} of shards in {top}",),
        line=f"index {top}",
    )
    Ledger().note(made, seconds)


def sidecar_path(path: str) -> str:
    """Where ``pack`` writes our index of a shard. It also has the numbers of ``NUMBERS``."""
    return f"{path}.npz"


def _sidecar(reader: RangeReader) -> TarIndex | None:
    ours, dalis = sidecar_path(reader.path), dali_path(reader.path)
    for path, read in ((ours, read_index), (dalis, partial(_read_dali, reader.path))):
        content = reader.beside(path)
        if content is None:
            continue
        index = read(io.BytesIO(content))
        if index is not None and agrees(index, reader):
            return index
        _log.warning(
            "penstock: %s does not fit %s, and is not used. Make it again, or remove it.",
            path,
            reader.path,
        )
    return None


def _read_dali(shard: str, file: IO[bytes]) -> TarIndex | None:
    return read_dali(file.read().decode("utf-8", "surrogateescape"), shard)


def _place(reader: RangeReader) -> Path | None:
    """The file in which the index of a shard is kept, or will be; ``None`` if it has no version."""
    about = reader.about()
    if about is None:
        return None
    name = hashlib.blake2b(os.fsencode(f"{_VERSION}\0{about}"), digest_size=16).hexdigest()
    return config.disk_dir() / "indexes" / f"{name}.npz"


_ARRAYS = ("ends", "kinds", "offsets", "sizes", "numbers", "known")


def read_index(place: Path | IO[bytes]) -> TarIndex | None:
    """An index that ``write_index`` wrote; ``None`` if there is none, or it is damaged."""
    try:
        with np.load(place, allow_pickle=False) as kept:
            arrays: dict[str, Any] = {name: kept[name] for name in _ARRAYS}
            keys = Names.packed(kept["key_text"], kept["key_ends"])
            extensions = tuple(os.fsdecode(bytes(kept["extensions"])).split("\0"))
    except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile, zlib.error):
        return None
    index = TarIndex(keys=keys, extensions=extensions, **arrays)
    return index if index.sound else None


def write_index(file: IO[bytes], index: TarIndex) -> None:
    """Write an index; its bytes depend on the index only."""
    np.savez(
        file,
        key_text=index.keys.text,
        key_ends=index.keys.ends,
        extensions=np.frombuffer(os.fsencode("\0".join(index.extensions)), dtype=np.uint8),
        **{name: getattr(index, name) for name in _ARRAYS},
    )


def _keep(place: Path, index: TarIndex) -> None:
    """Keep an index for the next run. A directory that cannot be written to is not an error."""
    try:
        own_directory(place.parent)
        with replacing(place) as file:
            write_index(file, index)
    except (OSError, PenstockError) as error:
        _log.warning(
            "penstock: the index of a shard cannot be kept in %s (%s); it is made again in the "
            "next run. PENSTOCK_CACHE_DIR names another directory.",
            place.parent,
            error,
        )
