"""The ``penstock`` command. The script that it starts runs in forks of this process."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import penstock.inject
from penstock.cli import main
from tests.support.ports import free_port
from tests.support.warm import run_here

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(command: Sequence[str], environment: Mapping[str, str], watch: object = None) -> int:
    """``penstock.inject.launch`` for a Python script, alone or with ranks below torchrun.

    ``watch`` would end a script that is slow to begin, on a busy machine.
    """
    ranks, (script, *words) = [dict(environment)], command[1:]
    if list(command[1:5]) == TORCHRUN:
        world, script, *words = command[5:]
        port = str(free_port())
        group = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{**environment, **group, "RANK": str(rank)} for rank in range(int(world))]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_run_in_fork, args=(Path(script), words, rank)) for rank in ranks
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(process.exitcode or 0 for process in processes)


def _run_in_fork(script: Path, words: Sequence[str], variables: dict[str, str]) -> None:
    # Its temporary directories are those of the parent, which removes them.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    run_here(script, words, variables)


if __name__ == "__main__":
    penstock.inject.launch = launch
    sys.exit(main())
