"""Starts a command with a task injected into every Python process below it.

The command gets this process's input and output, its signals, and returns its own exit code, as if
a shell had started it.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import PenstockError, PipelineError

TASKS = {"analyze": "penstock.inject.analysis", "run": "penstock.inject.upgrade"}
"""The tasks, and the module of each whose ``install(settings, module)`` does the work."""

VARIABLE = "PENSTOCK_INJECT"
SITE = Path(__file__).resolve().parent / "site"

PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)

_CHECK_INTERVAL = 1.0
"""Seconds after which the command is checked even if no SIGCHLD has arrived."""

_FROM_KERNEL = 0x80
"""``si_code`` of a signal typed at the terminal. The kernel sends it to the command as well."""


# The environment of the command.


def environment(
    task: str, settings: Mapping[str, Any], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment variables for a command, with which Python runs our ``sitecustomize``.

    ``settings`` must be plain data. They are passed to ``install`` with ``"rank"`` added: the rank
    that torchrun gave the process, or 0. If they contain ``"reports"``, a directory, every reached
    process writes its entry there (see ``processes``). ``base``: the variables to start from, by
    default those of this process.

    >>> variables = environment("run", {"cache": "8GB"}, {"PYTHONPATH": "/mine"})
    >>> variables["PYTHONPATH"].endswith("penstock/inject/site:/mine")
    True
    """
    if task not in TASKS:
        raise PipelineError(f"there is no task {task!r} to inject; the tasks are {list(TASKS)}.")
    variables = dict(os.environ if base is None else base)
    injected = {
        "module": TASKS[task],
        "version": penstock.__version__,
        "settings": dict(settings),
    }
    variables[VARIABLE] = json.dumps(injected)
    # An empty entry would mean the working directory of the command.
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if Path(path) != SITE]
    variables["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    return variables


# Running the command.


def words(given: Sequence[str]) -> list[str]:
    """The command in the arguments that argparse left over, without the leading ``--``."""
    command = list(given[1:] if given[:1] == ["--"] else given)
    if not command:
        raise PenstockError("there is no command to run. Give it after --: -- python train.py")
    return command


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    watch: Callable[[], signal.Signals | None] | None = None,
) -> int:
    """Run a command to its end. Returns its exit code, or 128 plus the signal that killed it.

    ``watch`` is called about once a second; the signal that it returns is sent to the command.
    Signals sent to this process are passed on to the command, which decides how to end. Must be
    called in the main thread.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    waited = PASSED_ON | {signal.SIGCHLD}
    # Blocked signals stay pending until sigtimedwait, so none is lost between start and wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = _start(command, environment, before)
        while True:
            received = signal.sigtimedwait(waited, _CHECK_INTERVAL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if (
                received is not None
                and received.si_signo in PASSED_ON
                and received.si_code != _FROM_KERNEL
            ):
                os.kill(pid, received.si_signo)
            wanted = watch() if watch is not None else None
            if wanted is not None:
                os.kill(pid, wanted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals | int]
) -> int:
    # Python ignores these signals itself. The command must have their defaults, as under a shell.
    defaults = {signal.SIGPIPE, signal.SIGXFSZ}
    try:
        return os.posix_spawnp(
            command[0], list(command), environment, setsigmask=mask, setsigdef=defaults
        )
    except OSError as error:
        raise PenstockError(_start_error(command, error)) from error


def _start_error(command: Sequence[str], error: OSError) -> str:
    program = command[0]
    if program.endswith(".py") and os.path.exists(program):
        return (
            f"{program} is a Python script, not a program. Name the Python that runs it: "
            f"python {shlex.join(command)}"
        )
    if error.errno == errno.ENOENT:
        where = "" if os.sep in program else ", on the PATH of this shell"
        return (
            f"there is no command {program!r}{where}. Give the command exactly as you start it "
            "without Penstock."
        )
    return f"{program!r} cannot be run: {error.strerror}."


# The processes that were reached.


@dataclass(frozen=True)
class Process:
    """A Python process that imported torch's DataLoader.

    ``why``: the reason for which the task was not installed there; empty if it was.
    """

    pid: int
    argv: tuple[str, ...]
    rank: int
    why: str = ""


@contextmanager
def reports() -> Iterator[Path]:
    """A temporary directory for the setting ``"reports"``."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        yield Path(directory)


def processes(directory: Path) -> list[Process]:
    """The processes that were reached, as they reported in that directory."""
    try:
        lines = (directory / "processes").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [
        Process(entry["pid"], tuple(entry["argv"]), entry["rank"], entry["why"])
        for entry in map(json.loads, lines)
    ]


def unseen(command: Sequence[str]) -> str:
    """Explain to the user why no process of the command was reached.

    >>> print(unseen(["python", "-I", "train.py"]))
    No process of `python -I train.py` was reached: python -I ignores PYTHONPATH, which Penstock
    needs to get into a script. Leave -I out.
    """
    shown = shlex.join(command)
    python = "python" in Path(command[0]).name
    for word in command[1:] if python else ():
        if not word.startswith("-") or word in ("-m", "-c"):
            break
        isolating = [] if word.startswith("--") else [letter for letter in word if letter in "IES"]
        if isolating:
            flag = f"-{isolating[0]}"
            return (
                f"No process of `{shown}` was reached: {command[0]} {flag} ignores PYTHONPATH, "
                f"which Penstock\nneeds to get into a script. Leave {flag} out."
            )
    return (
        f"No process of `{shown}` made a torch DataLoader, or none was reached. Penstock gets into "
        "a script by PYTHONPATH:\na Python started with -I, -E or -S ignores it, and a launcher "
        "that clears the environment does not pass it on."
    )
