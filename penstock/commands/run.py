"""``penstock run``: a script with its torch DataLoaders upgraded."""

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
  penstock run --cache 64GB --cluster auto -- torchrun --nnodes 2 ... train.py

The script is not edited: Penstock iterates the torch DataLoaders that the script, or a library,
creates. Messages on stderr say what was changed, what was not, and why. The exit code is that of
the command. A loader that shuffles is taken for training. One that reads its data in order is taken
for validation, and gets no reuse, echo, share or cluster.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs a training script with its torch DataLoaders upgraded."
    parser.epilog = EXAMPLE
    parser.usage = "penstock run [options] -- COMMAND ..."
    parser.add_argument(
        "--cache", metavar="SIZE", help="keep a cache of this size in memory, for each loader"
    )
    parser.add_argument(
        "--no-random",
        dest="random",
        action="store_false",
        default=None,
        help="the script's datasets draw no random numbers, so their samples may be cached",
    )
    parser.add_argument(
        "--reuse", type=_whole_or_auto, metavar="R", help="use partly transformed samples R times"
    )
    parser.add_argument(
        "--split",
        type=int,
        metavar="K",
        help="with --reuse: run the last K transforms anew each time",
    )
    parser.add_argument("--echo", type=_number_or_auto, metavar="F", help="use each sample F times")
    parser.add_argument(
        "--echo-at",
        choices=("sample", "augmented", "batch"),
        default="sample",
        help="with --echo: repeat before augmentation, after it, or after batching "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--share", metavar="NAME", help="prepare the data once for all jobs with this name"
    )
    parser.add_argument(
        "--cluster",
        metavar="MACHINES",
        help="use the caches of several machines as one: their addresses, ray, or auto; it is the "
        "PENSTOCK_CLUSTER of the command, too",
    )
    parser.add_argument(
        "--workers",
        type=_whole_or_auto,
        metavar="N",
        help="number of workers, or auto (default: the script's num_workers)",
    )
    parser.add_argument(
        "--kind",
        choices=("auto", "threads", "processes", "crew"),
        default="auto",
        help="kind of workers (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="seed for augmentation (default: torch's seed)"
    )
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip", "substitute"),
        default="raise",
        help="what to do with bad samples (default: %(default)s)",
    )
    parser.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="use Penstock's operations instead of torchvision's: faster, with pixel values within "
        "a stated tolerance",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from penstock.inject import environment, launch, processes, reports, unseen, words
    from penstock.inject.messages import loaders, summary

    command = words(arguments.command)
    settings = _settings(arguments)
    named = None if arguments.cluster in (None, "auto") else arguments.cluster
    if named is not None:
        settings["cluster"] = "auto"
    with reports() as place:
        settings["reports"] = str(place)
        variables = environment("run", settings)
        if named is not None:
            # Loaders with cluster="auto", ours and those of the script, use these machines.
            variables["PENSTOCK_CLUSTER"] = named
        code = launch(command, variables)
        reached, outcomes = processes(place), loaders(place)
    if not reached:
        text = unseen(command)
    elif any(process.why for process in reached):
        text = ""  # the process has printed the reason
    elif not outcomes and any(process.rank for process in reached):
        text = "rank 0 says which loaders were changed, and none of its loaders was iterated here."
    else:
        text = summary(outcomes)
    # A command that failed before its first loader has printed its own error.
    if text and (outcomes or not code):
        sys.stderr.write(f"penstock: {text}\n")
    return code


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from penstock import config

    if arguments.cache is not None:
        config.size(arguments.cache, "--cache")
    if arguments.cluster is not None:
        from penstock.cluster.find import find_cluster

        find_cluster(arguments.cluster)  # an address that is none is an error now
    if arguments.split is not None and arguments.reuse is None:
        raise PipelineError("--split belongs to --reuse; give both: --reuse 3 --split 2.")
    if arguments.split is not None and arguments.reuse == "auto":
        raise PipelineError(
            "--split has no effect with --reuse auto, which chooses both. Leave out --split, or "
            "give a number: --reuse 3 --split 2."
        )
    if arguments.reuse not in (None, "auto") and arguments.split is None:
        raise PipelineError(
            f"--reuse {arguments.reuse} needs --split: the number of transforms, at the end of the "
            "script's Compose, that run anew each time. Or let --reuse auto choose both."
        )
    return {name: value for name, value in vars(arguments).items() if name != "command"}


def _whole_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)
