"""The command line: finds the command, loads nothing else, and ends it politely."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import penstock
from penstock.errors import PenstockError

COMMANDS: dict[str, tuple[str, str]] = {
    "analyze": ("penstock.commands.analyze", "tell why training waits, and what would help"),
    "doctor": (
        "penstock.commands.doctor",
        "show what this machine offers and what is amiss",
    ),
    "profile": ("penstock.commands.profile", "show what each stop of a pipeline costs"),
    "run": ("penstock.commands.run", "run a script with its DataLoaders upgraded"),
    "status": ("penstock.commands.status", "show what the node of this machine is doing"),
    "stop": ("penstock.commands.stop", "end the node of this machine"),
    "store": ("penstock.commands.store", "list, verify and clear what is kept"),
    "top": ("penstock.commands.top", "show how the loaders of this machine are doing"),
    "watch": ("penstock.commands.watch", "the same as a web page, with a course over time"),
    "what-if": (
        "penstock.commands.what_if",
        "predict speed, stalls and cost if...",
    ),
}
"""A command's name, its module (see ``Command``), and its line in the help."""

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class Command(Protocol):
    """What the module of a command offers. It imports what it needs when it is run."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return FAILED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dispatch(words: list[str]) -> int:
    # Options of a command belong to the command: only what comes before it is ours.
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    parser = _parser()
    parser.parse_args(words[:at])
    if at == len(words):
        parser.print_help()
        return 0
    name, rest = words[at], words[at + 1 :]
    if name not in COMMANDS:
        sys.stderr.write(_unknown(name))
        return MISUSED
    command = cast(Command, importlib.import_module(COMMANDS[name][0]))
    own = argparse.ArgumentParser(
        prog=f"penstock {name}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.configure(own)
    return command.run(own.parse_args(rest))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="penstock",
        usage="penstock [--help] [--version] COMMAND ...",
        description="Feeds training jobs: keeps accelerators from waiting for data."
        f"\n\ncommands:\n{listed}",
        epilog="example:\n  penstock doctor\n\n`penstock COMMAND --help` tells more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    return parser


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    known = ", ".join(COMMANDS)
    return (
        f"penstock: there is no command {name!r}.{guess}\n"
        f"Commands: {known}. `penstock --help` says what they do.\n"
    )
