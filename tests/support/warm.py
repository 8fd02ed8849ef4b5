"""Runs scripts with torch in forks of one server process that has imported it.

To import torch takes more than a second of CPU time, and to make the first optimizer another one:
more than all else that such a script does.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from penstock.inject.launch import SITE, VARIABLE
from tests.support import SCRIPTS

PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed", "penstock.torch.dataloader"),
    *("tests.support.warm_programs", "penstock.engine.pools.zygote", "penstock.image"),
    *("pytest", "hypothesis", "hypothesis.strategies", "pyarrow.parquet", "cv2"),
]
"""What the server imports; every optimizer imports ``torch._dynamo``, and worker programs import
the modules of tests."""


PENSTOCK = SCRIPTS / "penstock_in_forks.py"


def server() -> ForkServerContext:
    """The server, which is started with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    return context


def start(
    script: Path,
    words: Sequence[str],
    variables: Mapping[str, str],
    errors: Path,
    *,
    output: Path | Connection | None = None,
    given: Connection | None = None,
) -> ForkServerProcess:
    """A process that runs a script with these arguments and environment variables, and writes its
    standard error to a file. ``output``, ``given``: its standard output and input.
    """
    process = server().Process(
        target=run_here, args=(script, words, dict(variables), errors, output, given)
    )
    process.start()
    return process


def run(
    script: Path,
    words: Sequence[str],
    variables: Mapping[str, str],
    place: Path,
    timeout: float = 500,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, with files for its output in the directory ``place``."""
    output, errors = place / "output.txt", place / "errors.txt"
    process = start(script, words, variables, errors, output=output)
    process.join(timeout)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired([str(script), *words], timeout)
    return subprocess.CompletedProcess(
        [str(script), *words], code, output.read_text(), errors.read_text()
    )


def penstock(
    words: Sequence[str], variables: Mapping[str, str], place: Path, timeout: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run ``penstock`` with these arguments. The Python script that it starts runs in a fork, too,
    and what ``penstock`` injects is injected into that."""
    return run(PENSTOCK, words, variables, place, timeout)


def run_here(
    script: Path,
    words: Sequence[str],
    variables: dict[str, str],
    errors: Path | None = None,
    output: Path | Connection | None = None,
    given: Connection | None = None,
) -> None:
    """Run a script in this process, a fork that ends with it."""
    multiprocessing.set_start_method(None, force=True)  # that of the platform, as in any script
    os.environ.clear()
    os.environ.update(variables)
    if errors is not None:
        _redirect(errors, 2)
    if output is not None:
        _redirect(output, 1)
    if given is not None:
        _redirect(given, 0)
        sys.stdin = open(0)  # noqa: SIM115
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(script.parent), *paths]
    for path in paths:
        if (custom := Path(path) / "sitecustomize.py").exists():
            runpy.run_path(str(custom))
    if VARIABLE in variables:
        # As at the end of the import of torch below ``penstock run`` and ``penstock analyze``.
        site = runpy.run_path(str(SITE / "sitecustomize.py"))
        site["install"](sys.modules["torch.utils.data.dataloader"])
        site["prepare"]()
    if threads := variables.get("OMP_NUM_THREADS"):
        importlib.import_module("torch").set_num_threads(int(threads))
    sys.argv[:] = [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
        sys.stdout.flush()


def _redirect(target: Path | Connection, number: int) -> None:
    """Let one of the standard descriptors be this file, or this end of a pipe."""
    if isinstance(target, Path):
        with open(target, "wb") as file:
            os.dup2(file.fileno(), number)
    else:
        os.dup2(target.fileno(), number)
