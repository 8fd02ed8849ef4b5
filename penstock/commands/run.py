"""``penstock run``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock.errors import PipelineError

EXAMPLE = """\
examples:
  penstock run -- python train.py --epochs 10
  penstock run --cache 8GB --workers auto -- python train.py
  penstock run --cache 8GB --reuse 3 --split 2 -- torchrun --nproc-per-node 4 train.py
  penstock run --share search-1 --seed 0 -- python train.py --lr 0.1

The script is not edited: torch DataLoaders that it makes, or that a library makes for it, are
iterated by Penstock. What was changed, what was not, and why is told on stderr. The exit code is
the command's own. A loader that shuffles is taken for training; one that goes through its data in
order is for validation, and has neither reuse, echo nor share.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs a training script with its torch DataLoaders upgraded."
    parser.epilog = EXAMPLE
    parser.usage = "penstock run [options] -- COMMAND ..."
    parser.add_argument("--cache", metavar="SIZE", help="keep as much in memory, for each loader")
    parser.add_argument(
        "--no-random",
        dest="random",
        action="store_false",
        default=None,
        help="the script's datasets draw nothing, so they may be cached as they are",
    )
    parser.add_argument(
        "--reuse", type=_whole_or_auto, metavar="R", help="use partly transformed samples R times"
    )
    parser.add_argument(
        "--split", type=int, metavar="K", help="with --reuse: the last K transforms are fresh"
    )
    parser.add_argument("--echo", type=_number_or_auto, metavar="F", help="use everything F times")
    parser.add_argument(
        "--echo-at", choices=("sample", "augmented", "batch"), default="sample", help="where"
    )
    parser.add_argument("--share", metavar="NAME", help="prepare once for all jobs of this name")
    parser.add_argument(
        "--workers", type=_whole_or_auto, metavar="N", help="in place of the script's, or auto"
    )
    parser.add_argument("--kind", choices=("auto", "threads", "processes"), default="auto")
    parser.add_argument("--seed", type=int, metavar="S", help="for augmentation; torch's own seed")
    parser.add_argument("--on-error", choices=("raise", "skip", "substitute"), default="raise")
    parser.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Penstock's operations in place of torchvision's: faster, and pixels within a "
        "stated tolerance",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from penstock.inject import environment, launch, processes, reports, unseen, words
    from penstock.inject.messages import loaders, summary

    command = words(arguments.command)
    settings = _settings(arguments)
    with reports() as place:
        settings["reports"] = str(place)
        code = launch(command, environment("run", settings))
        reached, found = processes(place), loaders(place)
    if not reached:
        text = unseen(command)
    elif any(one.why for one in reached):
        text = ""  # has been said where it happened
    else:
        text = summary(found)
    # A command that fails has its own to say.
    if text and (found or not code):
        sys.stderr.write(f"penstock: {text}\n")
    return code


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from penstock import config

    if arguments.cache is not None:
        config.size(arguments.cache, "--cache")
    if arguments.split is not None and arguments.reuse is None:
        raise PipelineError("--split is for refurbishing; give --reuse too, such as --reuse 3.")
    if arguments.reuse not in (None, "auto") and arguments.split is None:
        raise PipelineError(
            f"--reuse {arguments.reuse} needs to know what is done to a sample every time: give "
            "--split, the number of transforms at the end of the script's Compose that are. Or "
            "have both chosen by --reuse auto."
        )
    return {name: value for name, value in vars(arguments).items() if name != "command"}


def _whole_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)
