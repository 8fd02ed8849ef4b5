"""Which interpreter runs a contestant: a peer has an environment of its own in ``.bench``, made by
``scripts/bench-setup``, so that what one peer asks for does not decide what another gets."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.alone import ROOT

BENCH = ROOT / ".bench"
"""A folder for each environment; ``installed.txt`` or ``failed.txt`` in it says how it went."""

PATIENCE = 60.0
"""Seconds that an interpreter may take to say what it has."""

_LOOK = """\
import json, sys
from benchmarks.harness.environments import lacking
print(json.dumps([name for name in sys.argv[1:] if lacking(name)]))
"""

_TELL = """\
import json, platform
from importlib.metadata import distributions
packages = {found.metadata["Name"]: found.version for found in distributions()}
print(json.dumps({"python": platform.python_version(), "packages": packages}))
"""

# A search path that was meant for this interpreter would lead another to the wrong packages.
_NOT_FOR_OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Interpreter:
    """What a contestant runs with; ``why_not`` says why there is none."""

    python: str
    why_not: str = ""


def interpreter(env: str, needs: tuple[str, ...]) -> Interpreter:
    """The environment of that name if it was made, else this interpreter if it has what is
    needed."""
    place = BENCH / env
    if env and (place / "installed.txt").exists():
        python = str(place / "bin" / "python")
        absent = missing(python, needs)
        if not absent:
            return Interpreter(python)
        return Interpreter("", f"not in .bench/{env}: {', '.join(absent)}")
    absent = missing(sys.executable, needs)
    if not absent:
        return Interpreter(sys.executable)
    if not env:
        return Interpreter("", f"not installed: {', '.join(absent)}")
    failed = place / "failed.txt"
    if failed.exists():
        why = failed.read_text(errors="replace").strip().partition("\n")[0]
        return Interpreter("", f"does not install here: {why}")
    return Interpreter("", f"not installed: run scripts/bench-setup {env}")


@cache
def missing(python: str, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the modules that this interpreter does not find."""
    if python == sys.executable:
        return tuple(name for name in modules if lacking(name))
    found = _ask(python, _LOOK, *modules)
    return modules if found is None else tuple(found)


def lacking(module: str) -> bool:
    """Whether this interpreter has no such module. Nothing but its parents is imported."""
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


@cache
def facts(python: str) -> dict[str, Any]:
    """The version of an interpreter, and of every package it has."""
    return _ask(python, _TELL) or {}


def surroundings(python: str, place: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a contestant: its home and its temporary files are in
    ``place``, because some loaders keep state in the one and clear folders in the other."""
    found = dict(os.environ)
    if python == sys.executable:
        # Packages that were installed for the user are found through the home.
        found.setdefault("PYTHONUSERBASE", site.getuserbase())
    else:
        for name in _NOT_FOR_OTHERS:
            found.pop(name, None)
    found.update(dict.fromkeys(("HOME", "TMPDIR", "TEMP", "TMP"), str(place)))
    found.update(more)
    return found


def _ask(python: str, code: str, *args: str) -> Any:
    """What the code prints, read as JSON; ``None`` where the interpreter does not run."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_OTHERS}
    try:
        done = subprocess.run(
            [python, "-c", code, *args],
            capture_output=True,
            check=True,
            cwd=ROOT,
            env=environment if python != sys.executable else None,
            timeout=PATIENCE,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
