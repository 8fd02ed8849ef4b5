"""Runs scripts with torch in forks of one server process that has imported it.

Importing torch takes 2 s of CPU time, more than all else that such a script does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed

import penstock.torch

__all__ = ["penstock", "start", "torch"]


def start(
    script: Path, words: list[str], variables: dict[str, str], errors: Path
) -> ForkServerProcess:
    """A process that runs a script with these arguments and environment variables, and writes its
    standard error to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_run, args=(script, words, variables, errors))
    process.start()
    return process


def _run(script: Path, words: list[str], variables: dict[str, str], errors: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = [str(script), *words]
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    runpy.run_path(str(script), run_name="__main__")
