"""Starts a command as a shell would: its input and output, its signals, its exit code."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence

from penstock.errors import PenstockError

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

_LOOK = 1.0
"""Seconds after which the command is looked at even if no signal says that it has ended."""

_FROM_KERNEL = 0x80
"""``si_code`` of a signal that somebody typed. The whole foreground has it, the command too."""


def words(given: Sequence[str]) -> list[str]:
    """The command among the arguments that argparse left over."""
    command = list(given[1:] if given[:1] == ["--"] else given)
    if not command:
        raise PenstockError("there is no command to run. Give it after --: -- python train.py")
    return command


def launch(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; its exit code, or 128 and its signal's number.

    Signals that are sent to this process are passed on to it, so that it decides how to end. Must
    be called in the main thread.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    waited = PASSED_ON | {signal.SIGCHLD}
    # Blocked they are kept until they are waited for, so none is lost between start and wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = _start(command, environment, before)
        while True:
            found = signal.sigtimedwait(waited, _LOOK)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if found is not None and found.si_signo in PASSED_ON and found.si_code != _FROM_KERNEL:
                os.kill(pid, found.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals | int]
) -> int:
    # Python ignores these for itself; the command has to have them as a shell would give them.
    usual = {signal.SIGPIPE, signal.SIGXFSZ}
    try:
        return os.posix_spawnp(
            command[0], list(command), environment, setsigmask=mask, setsigdef=usual
        )
    except OSError as error:
        raise PenstockError(_why(command, error)) from error


def _why(command: Sequence[str], error: OSError) -> str:
    program = command[0]
    if program.endswith(".py") and os.path.exists(program):
        return (
            f"{program} is no program by itself. Say which Python runs it: "
            f"python {shlex.join(command)}"
        )
    if error.errno == errno.ENOENT:
        where = "" if os.sep in program else ", on the PATH of this shell"
        return (
            f"there is no command {program!r}{where}. Give the command as you start it otherwise."
        )
    return f"{program!r} cannot be run: {error.strerror}."
