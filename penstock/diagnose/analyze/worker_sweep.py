"""The worker sweep: how fast the loader is with other numbers of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median

from penstock.diagnose.analyze.report import Setup, WorkerUse
from penstock.diagnose.analyze.subject import Subject

TURNS = 9
"""Most turns of each number of workers."""


WAITING = 0.5
"""Workers that wait for more than this share of their work are tried in larger numbers too."""


def worker_counts(setup: Setup, use: WorkerUse | None = None) -> list[int]:
    """The numbers of workers to try: one, the script's, one per core, and two per core.

    Twice the script's too if its workers mostly wait. Empty if the training process prepares
    batches itself.
    """
    workers, cores = setup.workers, setup.cores
    if not workers:
        return []
    if use is not None and sum(use.waits.values()) > WAITING * (1 - use.idle):
        return sorted({1, workers, 2 * workers})
    if setup.kind in ("processes", "crew"):  # many of them take long to start
        return sorted({1, workers, min(cores, 4 * workers)})
    return sorted({1, workers, cores, 2 * cores})


def sweep_workers(
    subject: Subject, counts: Sequence[int], seconds: float, clock: Callable[[], float]
) -> dict[int, float]:
    """Samples per second by number of workers, each measured for ``seconds`` in total.

    The numbers take turns, so that a disturbance of the machine affects all of them. Slow loaders
    get fewer turns.
    """
    setup, started = subject.setup, clock()
    rates: dict[int, list[float]] = {workers: [] for workers in counts}
    # Processes take too long to start to be started for every turn.
    turns = 1 if setup.kind in ("processes", "crew") else TURNS
    for turn in range(turns):
        if turn and clock() - started > seconds * len(counts):
            break
        for workers, own_rates in rates.items():
            # End these workers with their turn: they would go on prefetching, and slow down those
            # of the next turn.
            with closing(subject.cached(workers)) as batches:  # type: ignore[type-var]
                for _ in range(setup.ahead_with(workers) + 1):
                    next(batches)
                began, count = clock(), 0
                while (spent := clock() - began) < seconds / turns or count < 2:
                    for _ in range(workers):
                        next(batches)
                    count += workers
                own_rates.append(count * setup.batch / spent)
    return {workers: median(own_rates) for workers, own_rates in rates.items()}
