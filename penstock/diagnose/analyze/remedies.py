"""What would help, by how much, and what to write for it: worked out of a report. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock import config
from penstock.diagnose.analyze.model import Change, Prediction, predict
from penstock.diagnose.analyze.report import Report

WORTH = 1.03
"""A gain below this is within what was measured."""

JOBS = 4
"""So many jobs are taken to run at once where the gain of sharing is told."""

REUSE, ECHO = 3, 2
"""Factors that training stands well: see the pages on refurbish and echo."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change. ``gain`` is the speed it makes over the present one, as predicted.

    ``code`` is what to write, ``why`` what it does about the stall.
    """

    title: str
    gain: float
    code: str
    why: str
    prediction: Prediction
    change: Change


def remedies(report: Report, memory: int | None = None) -> list[Remedy]:
    """All that gain something, the most useful first. ``memory`` is that of the machine."""
    present = predict(report)
    found = []
    for title, change, code, why in _candidates(report, memory or config.memory()):
        prediction = predict(report, change)
        # Where the question is about several jobs, the present is several jobs that do not share.
        before = present
        if change.share:
            before = predict(report, replace(change, share=False))
        gain = prediction.speed / before.speed
        if gain >= WORTH:
            found.append(Remedy(title, gain, code, why, prediction, change))
    return sorted(found, key=lambda one: -one.gain)


Candidate = tuple[str, Change, str, str]


def _candidates(report: Report, memory: int) -> Iterator[Candidate]:
    setup = report.setup
    write = _Writing(report)
    if report.costs.penstock is not None:
        yield (
            "Penstock's loader in place of torch's",
            Change(penstock=True),
            write.loader(""),
            "the same batches, prepared with less work",
        )
    data = setup.to_keep_all
    room = min(data, memory / 2)
    if data and room > setup.cache:
        budget = _round_up(room)
        yield (
            f"a cache of {config.show_size(budget)}",
            Change(cache=budget),
            write.loader(f'cache="{_short(budget)}"', stop=f'.cache("{_short(budget)}")'),
            f"{room / data:.0%} of the data is read from storage once, and never again",
        )
    for workers in sorted({setup.cores, 2 * setup.cores}):
        if workers > setup.workers:
            yield (
                f"{workers} workers",
                Change(workers=workers),
                write.loader(f"{write.workers}={workers}"),
                "more samples are read and prepared at the same time",
            )
    yield (
        f"{2 * setup.cores} cores",
        Change(cores=2 * setup.cores),
        f"a machine with {2 * setup.cores} cores, and {write.workers}={2 * setup.cores}",
        "twice as many samples are prepared at the same time",
    )
    if report.costs.reuse_hit is not None:
        yield (
            f"refurbish with reuse {REUSE}",
            Change(reuse=REUSE),
            write.loader(f'reuse="auto"  # or reuse={REUSE}', stop=f".refurbish(reuse={REUSE})"),
            "the first part of preparation is done for every third use of a sample",
        )
    yield (
        f"echo with factor {ECHO}",
        Change(echo=ECHO),
        write.loader(f'echo={ECHO}, echo_at="batch"', stop=f".echo({ECHO})  # below batch()"),
        "every batch is used twice; see in the validation loss what that is worth",
    )
    yield (
        f"one preparation for {JOBS} jobs",
        Change(jobs=JOBS, share=True),
        write.loader('share="search-1"'),
        f"where {JOBS} jobs run on this machine, each sample is prepared once and not {JOBS} times",
    )
    if report.costs.storage > 0 and setup.sample_bytes:
        faster = 4 * report.costs.storage
        yield (
            f"storage of {config.show_size(faster)}/s",
            Change(storage=faster),
            "a local copy on an SSD, or larger requests to the object store",
            "what is not cached comes faster",
        )
    yield from _offloads(report)


def _offloads(report: Report) -> Iterator[Candidate]:
    """Operations at the end that a device does in no time: those that only change numbers."""
    cheap = ("normalize", "normalise", "totensor", "to_tensor", "convert", "todtype", "to_float")
    last = 0
    for one in reversed(report.operations):
        if one.kind == "batch":
            last += 1
            continue
        if not any(word in one.name.lower() for word in cheap):
            break
        last += 1
    names = [one.name for one in report.operations[-last:] if one.kind != "batch"] if last else []
    if names and report.setup.accelerator != "cpu":
        yield (
            f"{' and '.join(names)} on the device",
            Change(offload=last),
            "images = images.to(device).float().sub_(mean).div_(std)  # uint8 until there",
            "a quarter of the bytes is copied, and the workers have less to do",
        )


class _Writing:
    """How arguments are written for the loader that the script has."""

    def __init__(self, report: Report) -> None:
        self.pipeline = report.setup.loader == "penstock.Loader"
        self.workers = "workers" if self.pipeline else "num_workers"

    def loader(self, argument: str, stop: str = "") -> str:
        if self.pipeline:
            return stop or f"pipeline.loader(..., {argument})"
        given = f"..., {argument}" if argument else "..."
        return f"from penstock.torch import DataLoader\nDataLoader({given})"


def _round_up(nbytes: float) -> int:
    """To two digits, so that people can read it.

    >>> _round_up(5_432_100)
    5500000
    """
    scale: int = 10 ** max(0, len(str(int(nbytes))) - 2)
    return -(-int(nbytes) // scale) * scale


def _short(nbytes: int) -> str:
    return config.show_size(nbytes).replace(" ", "").replace(".0", "")
