"""Python environments of contestants. ``scripts/bench-setup`` makes one per peer in ``.bench``, so
that the requirements of one peer do not affect the versions another peer gets."""

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
"""One folder per environment. It holds ``installed.txt``, or ``failed.txt`` with the reason."""

TIMEOUT = 60.0
"""Seconds an interpreter may take to list its modules or packages."""

_LIST_MISSING = """\
import json, sys
from benchmarks.harness.environments import is_missing
print(json.dumps([name for name in sys.argv[1:] if is_missing(name)]))
"""

_LIST_VERSIONS = """\
import json, platform
from importlib.metadata import distributions
packages = {package.metadata["Name"]: package.version for package in distributions()}
print(json.dumps({"python": platform.python_version(), "packages": packages}))
"""

# Search paths for this interpreter would lead another one to the wrong packages.
_NOT_FOR_OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Interpreter:
    """The path of a contestant's interpreter, or in ``why_not`` the reason why there is none."""

    python: str
    why_not: str = ""


def interpreter(env: str, needs: tuple[str, ...]) -> Interpreter:
    """The interpreter of environment ``env`` if it is installed, else this interpreter if it has
    the modules in ``needs``."""
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
    """The modules that the interpreter ``python`` cannot find."""
    if python == sys.executable:
        return tuple(name for name in modules if is_missing(name))
    absent = _run_json(python, _LIST_MISSING, *modules)
    return modules if absent is None else tuple(absent)


def is_missing(module: str) -> bool:
    """Whether this interpreter lacks a module. Imports only the module's parent packages."""
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


@cache
def installed_versions(python: str) -> dict[str, Any]:
    """Version of an interpreter, and of every package installed for it."""
    return _run_json(python, _LIST_VERSIONS) or {}


def process_environment(python: str, place: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a contestant's process, with ``more`` added. Home and temporary
    directory are ``place``, because some loaders keep state in the home directory or clear
    folders in the temporary one."""
    variables = dict(os.environ)
    if python == sys.executable:
        # Python finds packages installed with --user through the home directory.
        variables.setdefault("PYTHONUSERBASE", site.getuserbase())
    else:
        for name in _NOT_FOR_OTHERS:
            variables.pop(name, None)
    variables.update(dict.fromkeys(("HOME", "TMPDIR", "TEMP", "TMP"), str(place)))
    variables.update(more)
    return variables


def _run_json(python: str, code: str, *args: str) -> Any:
    """Run code in an interpreter and parse its output as JSON; ``None`` if that fails."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_OTHERS}
    try:
        done = subprocess.run(
            [python, "-c", code, *args],
            capture_output=True,
            check=True,
            cwd=ROOT,
            env=environment if python != sys.executable else None,
            timeout=TIMEOUT,
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
