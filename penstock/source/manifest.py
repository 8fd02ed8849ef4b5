"""What ``pack`` wrote into a folder of shards, and from what: the file ``pack.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import SourceError
from penstock.host.text import many
from penstock.source.packed_folder import PackedFolder
from penstock.store.ledger import Provenance

NAME = "pack.json"
_VERSION = 1


@dataclass(frozen=True)
class PackedShard:
    """A finished shard: samples ``first`` to before ``first + samples``."""

    name: str
    first: int
    samples: int
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if os.path.basename(self.name) != self.name or self.name in ("", ".", ".."):
            raise ValueError(f"{self.name!r} is not the name of a file in this folder")


@dataclass
class Manifest:
    """The content of ``pack.json``.

    - ``fingerprint``: of the data and of all stages that made the samples.
    - ``made_by``: the same as text for readers; ``versions``: of the packages that ran.
    - ``samples``: of the whole data set; ``per_shard``: of each shard but the last.
    - ``form``: what a sample is: ``"single"``, ``"tuple"`` or ``"dict"``; ``fields``: the
      extensions of each field, as the argument ``fields`` of ``from_tar`` takes them.
    - ``shards``: those that are finished.
    """

    fingerprint: str
    made_by: list[str]
    versions: dict[str, str]
    samples: int
    per_shard: int
    form: str = ""
    fields: dict[str, list[str]] = field(default_factory=dict)
    shards: list[PackedShard] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return sum(shard.samples for shard in self.shards) == self.samples

    def tar_fields(self) -> Any:
        """The argument ``fields`` of ``from_tar`` with which samples are as they were packed."""
        given = {name: ";".join(extensions) for name, extensions in self.fields.items()}
        if self.form == "single":
            return next(iter(given.values()))
        return tuple(given.values()) if self.form == "tuple" else given

    def write(self, folder: PackedFolder) -> None:
        """Replace the file in one step, so that a reader or a crash never sees half of it."""
        text = json.dumps({"version": _VERSION, **asdict(self)}, indent=1)
        folder.put(NAME, text.encode())


def read_manifest(folder: PackedFolder) -> Manifest | None:
    """The manifest of a folder; ``None`` if it has none."""
    text, path = folder.read(NAME), f"{folder.shown}/{NAME}"
    if text is None:
        return None
    try:
        state: Mapping[str, Any] = json.loads(text)
        if state["version"] != _VERSION:
            raise SourceError(
                f"{path} has version {state['version']!r}, and this release of Penstock reads "
                f"version {_VERSION}. Use the release that wrote it."
            )
        rest = {name: value for name, value in state.items() if name not in ("version", "shards")}
        return Manifest(**rest, shards=[PackedShard(**shard) for shard in state["shards"]])
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{path} cannot be read as the manifest of a packed folder ({error}). If it is another "
            "program's, pack into another folder; if it is damaged, pack again."
        ) from error


def provenance_of(folder: Path, manifest: Manifest, origin: str = "", data: str = "") -> Provenance:
    """What the ledger says of a packed folder. ``origin`` and ``data``: of what was packed."""
    return Provenance(
        kind="packed",
        identity=manifest.fingerprint,
        place=str(folder.absolute()),
        origin=origin,
        data=data,
        made_by=(*manifest.made_by, f"packed into {many(len(manifest.shards), 'shard')}"),
        versions=manifest.versions,
    )
