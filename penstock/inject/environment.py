"""The environment in which Python runs our ``sitecustomize`` before a script."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import PipelineError

TASKS = {"analyze": "penstock.inject.analysis", "run": "penstock.inject.upgrade"}
"""What can be put into a script, and the module whose ``install(settings, module)`` does it."""

VARIABLE = "PENSTOCK_INJECT"
SITE = Path(__file__).resolve().parent / "site"


def environment(
    task: str, settings: Mapping[str, Any], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Every variable for a command below which all of Python is to run a task.

    ``settings`` are plain data, and reach ``install`` with a ``"rank"`` added to them, which is
    that of the process among those that torchrun started, or 0. ``"reports"`` among them is the
    directory where processes say that they were reached (see ``processes``). ``base`` stands for
    the environment of this process.

    >>> made = environment("run", {"cache": "8GB"}, {"PYTHONPATH": "/mine"})
    >>> made["PYTHONPATH"].endswith("penstock/inject/site:/mine")
    True
    """
    if task not in TASKS:
        raise PipelineError(f"there is no task {task!r} to put into scripts; give one of {TASKS}.")
    made = dict(os.environ if base is None else base)
    told = {
        "module": TASKS[task],
        "version": penstock.__version__,
        "settings": dict(settings),
    }
    made[VARIABLE] = json.dumps(told)
    # An empty entry would mean the directory the command is run in.
    theirs = [one for one in made.get("PYTHONPATH", "").split(os.pathsep) if one]
    made["PYTHONPATH"] = os.pathsep.join([str(SITE), *(one for one in theirs if Path(one) != SITE)])
    return made
