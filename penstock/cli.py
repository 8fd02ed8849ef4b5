"""The command line: finds a command, imports only its module, and reports its errors."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import penstock
from penstock.errors import PenstockError

COMMANDS: dict[str, tuple[str, str]] = {
    "analyze": (
        "penstock.commands.analyze",
        "say why training waits for data, and what would help",
    ),
    "cluster": (
        "penstock.commands.cluster",
        "let several machines share one cache",
    ),
    "doctor": (
        "penstock.commands.doctor",
        "check this machine and its packages, and suggest fixes",
    ),
    "pack": ("penstock.commands.pack", "write the samples of a pipeline as tar shards"),
    "profile": ("penstock.commands.profile", "show what each stage of a pipeline costs"),
    "run": ("penstock.commands.run", "run a script with Penstock in its torch DataLoaders"),
    "status": ("penstock.commands.status", "show what the node of this machine is doing"),
    "stop": ("penstock.commands.stop", "stop the node of this machine"),
    "store": ("penstock.commands.store", "show what is kept on disk, what made it, and remove it"),
    "top": ("penstock.commands.top", "show the running loaders of this machine, live"),
    "watch": ("penstock.commands.watch", "show the same on a web page, with charts over time"),
    "what-if": (
        "penstock.commands.what_if",
        "predict speed, stalls and cost for another setup",
    ),
}
"""Each command's module (see ``Command``) and its line in the help, by name."""

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

_OPTION = re.compile(r"-(?!\d+$|\d*\.\d+$)[^ ]+$")
"""What argparse takes for an option: not a negative number, no blanks."""


class Command(Protocol):
    """The module of a command. It imports what it needs in ``run``, so that help is fast."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the closest known option for an unknown one.

    It leaves alone what follows ``--``, the command of ``penstock run`` and ``penstock analyze``,
    and the words of a subcommand, which has a parser of its own.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        unknown, end = self._scan(words)
        if unknown:
            self.exit(MISUSED, self._unknown_options(unknown))
        if end < len(words) and words[end] != "--" and self._takes(argparse.REMAINDER):
            # Without this, argparse would look for our options in the user's command.
            words.insert(end, "--")
        return super().parse_known_args(words, namespace)

    def _scan(self, words: Sequence[str]) -> tuple[list[str], int]:
        """The unknown options among our own words, and the number of our own words."""
        unknown: list[str] = []
        leaves_rest = self._takes(argparse.REMAINDER) or self._takes(argparse.PARSER)
        at = 0
        while at < len(words) and words[at] != "--":
            option, equals, _ = words[at].partition("=")
            matches = self._matches(option)
            if matches and matches[0].dest == "help":
                return [], len(words)  # argparse prints the help, whatever else is wrong
            if matches:
                at += matches[0].nargs is None and not equals  # skip the value of the option
            elif _OPTION.match(words[at]):
                unknown.append(option)
            elif leaves_rest:
                break
            at += 1
        return unknown, min(at, len(words))

    def _matches(self, option: str) -> list[argparse.Action]:
        """The actions that an option may mean; argparse accepts unique abbreviations."""
        actions = self._option_string_actions
        if option in actions:
            return [actions[option]]
        if not option.startswith("--"):
            return [actions[option[:2]]] if option[:2] in actions else []  # as -hv for -h -v
        return [action for name, action in actions.items() if name.startswith(option)]

    def _takes(self, nargs: str) -> bool:
        """Whether a positional argument takes all remaining words (REMAINDER, PARSER)."""
        return any(action.nargs == nargs for action in self._actions)

    def _unknown_options(self, unknown: Sequence[str]) -> str:
        known = {name.lstrip("-"): name for name in self._option_string_actions}
        lines = []
        for option in unknown:
            guess = _did_you_mean(option.lstrip("-"), known)
            lines.append(f"{self.prog}: there is no option {option}.{guess}\n")
        return "".join(lines) + f"`{self.prog} --help` lists its options.\n"


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
        # The reader of the output, such as `head`, has closed it. Without this, Python would report
        # the broken pipe again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dispatch(words: list[str]) -> int:
    # Options before the command are ours; the command parses those after it.
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    parser = _parser()
    parser.parse_args(words[:at])
    if at == len(words):
        parser.print_help()
        return 0
    name, rest = words[at], words[at + 1 :]
    if name not in COMMANDS:
        sys.stderr.write(_unknown_command(name))
        return MISUSED
    command = cast(Command, importlib.import_module(COMMANDS[name][0]))
    command_parser = CommandParser(
        prog=f"penstock {name}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.configure(command_parser)
    return command.run(command_parser.parse_args(rest))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    parser = CommandParser(
        prog="penstock",
        usage="penstock [--help] [--version] COMMAND ...",
        description="Feeds training jobs: keeps accelerators from waiting for data."
        f"\n\ncommands:\n{listed}",
        epilog="example:\n  penstock doctor\n\n`penstock COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    return parser


def _unknown_command(name: str) -> str:
    guess = _did_you_mean(name, {command: command for command in COMMANDS})
    known = ", ".join(COMMANDS)
    return (
        f"penstock: there is no command {name!r}.{guess}\n"
        f"Commands: {known}. `penstock --help` describes them.\n"
    )


def _did_you_mean(word: str, known: Mapping[str, str]) -> str:
    """A suggestion, or ``""``; the values of ``known`` are its keys as they are shown."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {known[close[0]]}?" if close else ""
