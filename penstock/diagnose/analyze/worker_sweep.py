"""How fast the loader is with other numbers of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median

from penstock.diagnose.analyze.report import Setup
from penstock.diagnose.analyze.subject import Subject

TURNS = 9
"""How often they take turns at most."""


def worth_trying(setup: Setup) -> list[int]:
    """How many workers are tried: as many as there are, one, one for each core, two.

    None where the training process prepares by itself.
    """
    workers, cores = setup.workers, setup.cores
    if not workers:
        return []
    if setup.kind == "processes":  # which take long to start where they are many
        return sorted({1, workers, min(cores, 4 * workers)})
    return sorted({1, workers, cores, 2 * cores})


def rates_of(
    subject: Subject, numbers: Sequence[int], seconds: float, clock: Callable[[], float]
) -> dict[int, float]:
    """Samples a second with so many workers, seen for so many seconds each.

    They take turns, so that what disturbs one number of them disturbs all; fewer, where they are
    slow.
    """
    setup, started = subject.setup, clock()
    found: dict[int, list[float]] = {number: [] for number in numbers}
    # Processes take too long to start to do so again and again.
    turns = 1 if setup.kind == "processes" else TURNS
    for turn in range(turns):
        if turn and clock() - started > seconds * len(numbers):
            break
        for number, rates in found.items():
            # Its workers end with its turn: they would go on until they are as far ahead as they
            # may be, beside those of the next.
            with closing(subject.cached(number)) as batches:  # type: ignore[type-var]
                for _ in range(setup.ahead_with(number) + 1):
                    next(batches)
                began, count = clock(), 0
                while (spent := clock() - began) < seconds / turns or count < 2:
                    for _ in range(number):
                        next(batches)
                    count += number
                rates.append(count * setup.batch / spent)
    return {number: median(rates) for number, rates in found.items()}
