"""Which processes of a command were reached, and what to say where none was."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A Python process that imported torch's DataLoader; ``why`` says why nothing was changed."""

    pid: int
    argv: tuple[str, ...]
    rank: int
    why: str = ""


@contextmanager
def reports() -> Iterator[Path]:
    """A directory of this command's own, for the setting ``"reports"``; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        yield Path(place)


def processes(place: Path) -> list[Process]:
    """Those that have reported there."""
    try:
        lines = (place / "processes").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [
        Process(told["pid"], tuple(told["argv"]), told["rank"], told["why"])
        for told in map(json.loads, lines)
    ]


def unseen(command: Sequence[str]) -> str:
    """What to tell a user when no process of the command has reported.

    >>> print(unseen(["python", "-I", "train.py"]))
    No process of `python -I train.py` was reached: python -I takes no notice of PYTHONPATH, by
    which Penstock gets into a script. Leave -I out.
    """
    shown = shlex.join(command)
    python = "python" in Path(command[0]).name
    for word in command[1:] if python else ():
        if not word.startswith("-") or word in ("-m", "-c"):
            break
        hidden = [] if word.startswith("--") else [letter for letter in word if letter in "IES"]
        if hidden:
            flag = f"-{hidden[0]}"
            return (
                f"No process of `{shown}` was reached: {command[0]} {flag} takes no notice of "
                f"PYTHONPATH, by\nwhich Penstock gets into a script. Leave {flag} out."
            )
    return (
        f"No process of `{shown}` made a torch DataLoader, or none was reached. Penstock gets into "
        "a script by PYTHONPATH:\na Python started with -I, -E or -S takes no notice of it, and a "
        "launcher that clears the environment does not hand it on."
    )
