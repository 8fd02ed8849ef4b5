"""The files of a sharded data set, named by paths, folders, patterns and ranges in braces."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from penstock.errors import SourceError

ShardNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_INNERMOST = re.compile(r"\{([^{}]*)\}")


def common_folder(paths: Sequence[str]) -> str:
    """The folder that all these paths or URLs are in, for people.

    >>> common_folder(["s3://bucket/train/a.tar", "s3://bucket/tests/b.tar"])
    's3://bucket'
    """
    folders = [path.split("/")[:-1] for path in paths]
    pairs = zip(min(folders), max(folders), strict=False)
    return "/".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def braces(pattern: str) -> Iterator[str]:
    """The names that a pattern with braces stands for, as in a shell.

    >>> list(braces("shard-{08..10}.tar"))
    ['shard-08.tar', 'shard-09.tar', 'shard-10.tar']
    >>> list(braces("{train,val}-{0..1}.tar"))
    ['train-0.tar', 'train-1.tar', 'val-0.tar', 'val-1.tar']
    """
    for match in _INNERMOST.finditer(pattern):
        choices = _choices(match[1])
        if choices is not None:
            before, after = pattern[: match.start()], pattern[match.end() :]
            for choice in choices:
                yield from braces(before + choice + after)
            return
    yield pattern


def _choices(text: str) -> list[str] | None:
    """What one pair of braces stands for; ``None`` if it is just text."""
    numbers = _RANGE.fullmatch(text)
    if numbers is None:
        return text.split(",") if "," in text else None
    first, last = int(numbers[1]), int(numbers[2])
    padded = any(len(n.lstrip("-")) > 1 and n.lstrip("-")[0] == "0" for n in numbers.groups())
    width = max(map(len, numbers.groups())) if padded else 0
    step = 1 if last >= first else -1
    return [f"{n:0{width}d}" for n in range(first, last + step, step)]


def shard_paths(
    names: ShardNames, suffixes: Sequence[str], kind: str, *, hidden: str = ""
) -> list[str]:
    """The absolute paths of shards. A folder stands for all files below it with these suffixes.

    ``hidden``: files and folders of it whose names begin with one of these characters are left out.
    """
    found: list[str] = []
    for given in [names] if isinstance(names, (str, os.PathLike)) else names:
        text = os.fspath(given)
        for one in [text] if os.path.exists(text) else braces(text):
            found += _matching(os.path.abspath(os.path.expanduser(one)), suffixes, kind, hidden)
    if not found:
        raise SourceError(f"The list of {kind} files is empty; give at least one path.")
    return found


def _matching(path: str, suffixes: Sequence[str], kind: str, hidden: str) -> list[str]:
    if os.path.isdir(path):
        matches = [
            name
            for name in glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
            if name.endswith(tuple(suffixes)) and os.path.isfile(name)
            if not any(part[0] in hidden for part in os.path.relpath(name, path).split(os.sep))
        ]
    elif os.path.exists(path):
        matches = [path]
    else:
        matches = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    if not matches:
        raise SourceError(
            f"{path} is not a {kind} file, not a folder that holds one, and not a pattern that "
            "matches one. Check the path."
        )
    return sorted(matches)
