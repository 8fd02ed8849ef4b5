"""How a sample is written to a tar shard: which members, under which extensions."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.errors import PipelineError
from penstock.source.tar import KEY

_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
)
_PICTURES = ("bmp", "gif", "jpeg", "jpg", "pbm", "pgm", "png", "ppm", "tif", "tiff", "webp")
_BINARY = frozenset((*_PICTURES, "bin", "flac", "mp3", "mp4", "ogg", "pth", "wav"))

Members = dict[str, bytes]
"""The contents of a sample by extension, in order."""


class Form:
    """The form of samples: single values, tuples or dicts, and the extensions of each field."""

    def __init__(self, kind: str = "", fields: Mapping[str, list[str]] | None = None) -> None:
        self.kind = kind
        self.fields = {name: list(known) for name, known in (fields or {}).items()}
        self._field_of = {one: name for name, known in self.fields.items() for one in known}
        """The field that each extension belongs to: no two fields may share one."""

    def members(self, sample: Any, name: str) -> Members:
        """The members of a sample. Raises PipelineError; ``name`` names it there."""
        kind, values = _fields_of(sample)
        if self.kind and kind != self.kind:
            raise PipelineError(
                f"{name} is a {kind}, and the samples before it are of the form {self.kind!r}. "
                "Samples of a pipeline must have one form: change it with a map above."
            )
        if self.kind and list(values) != list(self.fields):
            raise PipelineError(
                f"{name} has the fields {list(values)}, and the samples before it have "
                f"{list(self.fields)}. Samples must have the same fields: change that with a map."
            )
        if not self.fields and kind == "dict":
            _check_names(values, name)
        self.kind = kind
        members: Members = {}
        encoded = {field: encode(value, f"{field} of {name}") for field, value in values.items()}
        for field, (extension, content) in encoded.items():
            full = self._extension(field, extension, [given for given, _ in encoded.values()])
            other = self._field_of.setdefault(full, field)
            if other != field:
                raise PipelineError(
                    f"The fields {other!r} and {field!r} of {name} would both be written as "
                    f"{full}. Rename one of them with a map above."
                )
            known = self.fields.setdefault(field, [])
            if full not in known:
                known.append(full)
            members[full] = content
        return members

    def _extension(self, field: str, extension: str, all_extensions: list[str]) -> str:
        if self.kind == "dict":
            last = field.rpartition(".")[2].lower()
            if last == extension or (extension in _BINARY and last in _BINARY):
                return field.lower()
            return f"{field.lower()}.{extension}"
        # Plain extensions, as other programs expect them, as long as no two fields share one, in
        # this sample or between this one and those before it.
        alone = all_extensions.count(extension) == 1
        if alone and self._field_of.get(extension, field) == field:
            return extension
        return f"{field}.{extension}"


def _check_names(names: Iterable[str], where: str) -> None:
    """Refuse names of fields that cannot be part of the name of a member."""
    for name in names:
        found = next((sign for sign in ("/", ";", "\0") if sign in name), None)
        if found is not None:
            raise PipelineError(
                f"The field {name!r} of {where} has {found!r} in its name, which the name of a "
                "file in a shard cannot have. Rename the field with a map above."
            )


def _fields_of(sample: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(sample, Mapping):
        return "dict", {str(name): value for name, value in sample.items() if name != KEY}
    if isinstance(sample, tuple):
        return "tuple", {str(place): value for place, value in enumerate(sample)}
    return "single", {"0": sample}


def encode(value: Any, where: str) -> tuple[str, bytes]:
    """The extension and bytes of a value, from which ``from_tar`` makes the same value again."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        content = bytes(value)
        return _signature(content), content
    if isinstance(value, str):
        return "txt", value.encode("utf-8")
    if type(value) is int and -(2**63) <= value < 2**63:
        return "cls", str(value).encode()
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise PipelineError(
                f"{where} is an array of Python objects, which cannot be packed. Make it an array "
                "of numbers with a map above."
            )
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        return "npy", file.getvalue()
    try:
        text = json.dumps(value)
        same = json.loads(text) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise PipelineError(
            f"{where} is a {type(value).__name__}, which cannot be packed: bytes, text, numbers, "
            "arrays, and lists and dicts of plain values can. Change it with a map above."
        )
    return "json", text.encode()


def _signature(content: bytes) -> str:
    if content[:4] == b"RIFF" and content[8:12] in (b"WEBP", b"WAVE"):
        return "webp" if content[8:12] == b"WEBP" else "wav"
    for signature, extension in _SIGNATURES:
        if content.startswith(signature):
            return extension
    return "bin"
