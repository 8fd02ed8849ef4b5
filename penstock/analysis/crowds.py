"""How fast the loader is with other numbers of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

from penstock.analysis.report import Setup
from penstock.analysis.subject import Subject

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
    with ExitStack() as opened:
        every: dict[int, Any] = {
            number: opened.enter_context(closing(subject.cached(number)))  # type: ignore[type-var]
            for number in numbers
        }
        for turn in range(TURNS):
            if turn and clock() - started > seconds * len(numbers):
                break
            for number, batches in every.items():
                for _ in range(setup.ahead_with(number) + 1):  # those that were there already
                    next(batches)
                began, count = clock(), 0
                while (spent := clock() - began) < seconds / TURNS or count < 2:
                    for _ in range(number):
                        next(batches)
                    count += number
                found[number].append(count * setup.batch / spent)
    return {number: median(rates) for number, rates in found.items()}
