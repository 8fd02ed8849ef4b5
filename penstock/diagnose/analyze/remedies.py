"""Remedies: changes that would make training faster, by how much, and the code for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock import config
from penstock.diagnose.analyze.model import Change, Prediction, possible_on_device, predict
from penstock.diagnose.analyze.report import AnalysisReport

LEAST_GAIN = 1.03
"""A gain below this is within the error of measurement."""

JOBS = 4
"""Number of jobs for which the gain of sharing is predicted."""

REUSE, ECHO = 3, 2
"""Factors that training tolerates well: see the pages on refurbish and echo."""


DEVICE_SPEED = 10.0
"""Speed of a device relative to a worker, for which the gain of preparing there is predicted. It is
an assumption: no GPU was measured."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change. ``gain`` is the predicted speed relative to the present one.

    ``code`` is the code to write, ``why`` says how it reduces the stall.
    """

    title: str
    gain: float
    code: str
    why: str
    prediction: Prediction
    change: Change


def remedies(report: AnalysisReport, memory: int | None = None) -> list[Remedy]:
    """The remedies with a gain, the largest first. ``memory``: bytes of memory of the machine."""
    present = predict(report)
    found = []
    for title, change, code, why in _possible_remedies(report, memory or config.memory()):
        prediction = predict(report, change)
        # Compare jobs that share with as many jobs that do not share.
        before = present
        if change.share:
            before = predict(report, replace(change, share=False))
        gain = prediction.speed / before.speed
        if gain >= LEAST_GAIN:
            found.append(Remedy(title, gain, code, why, prediction, change))
    return sorted(found, key=lambda remedy: -remedy.gain)


class PossibleRemedy(NamedTuple):
    """A remedy whose gain is not predicted yet."""

    title: str
    change: Change
    code: str
    why: str


def _possible_remedies(report: AnalysisReport, memory: int) -> Iterator[PossibleRemedy]:
    setup = report.setup
    write = _CodeWriter(report)
    if report.costs.penstock is not None:
        yield PossibleRemedy(
            "Penstock's loader in place of torch's",
            Change(penstock=True),
            write.loader(""),
            "the same batches, prepared with less work",
        )
    data = setup.full_cache_bytes
    cached = min(data, memory / 2)
    if data and cached > setup.cache:
        budget = _round_up(cached)
        yield PossibleRemedy(
            f"a cache of {config.show_size(budget)}",
            Change(cache=budget),
            write.loader(f'cache="{_short(budget)}"', stop=f'.cache("{_short(budget)}")'),
            f"{cached / data:.0%} of the data is read from storage once, and never again",
        )
    for workers in sorted({setup.cores, 2 * setup.cores}):
        if workers > setup.workers:
            yield PossibleRemedy(
                f"{workers} workers",
                Change(workers=workers),
                write.loader(f"{write.workers}={workers}"),
                "more samples are read and prepared at the same time",
            )
    yield PossibleRemedy(
        f"{2 * setup.cores} cores",
        Change(cores=2 * setup.cores),
        f"a machine with {2 * setup.cores} cores, and {write.workers}={2 * setup.cores}",
        "twice as many samples are prepared at the same time",
    )
    if report.costs.reuse_hit is not None:
        yield PossibleRemedy(
            f"refurbish with reuse {REUSE}",
            Change(reuse=REUSE),
            write.loader(f'reuse="auto"  # or reuse={REUSE}', stop=f".refurbish(reuse={REUSE})"),
            "the first part of preparation is done only for every third use of a sample",
        )
    yield PossibleRemedy(
        f"echo with factor {ECHO}",
        Change(echo=ECHO),
        write.loader(f'echo={ECHO}, echo_at="batch"', stop=f".echo({ECHO})  # below batch()"),
        "every batch is used twice; the validation loss shows what the repeats are worth",
    )
    yield PossibleRemedy(
        f"one preparation for {JOBS} jobs",
        Change(jobs=JOBS, share=True),
        write.loader('share="search-1"'),
        f"if {JOBS} jobs run on this machine, each sample is prepared once instead of {JOBS} times",
    )
    if report.costs.storage > 0 and setup.sample_bytes:
        faster = 4 * report.costs.storage
        yield PossibleRemedy(
            f"storage of {config.show_size(faster)}/s",
            Change(storage=faster),
            "a local copy on an SSD, or larger requests to the object store",
            "samples that are not cached arrive faster",
        )
    yield from _offloads(report, write)


def _offloads(report: AnalysisReport, write: _CodeWriter) -> Iterator[PossibleRemedy]:
    """Moving the last operations to the device, if they only convert numbers."""
    cheap = ("normalize", "normalise", "totensor", "to_tensor", "convert", "todtype", "to_float")
    last = 0
    for operation in reversed(report.operations):
        if operation.kind == "batch":
            last += 1
            continue
        if not any(word in operation.name.lower() for word in cheap):
            break
        last += 1
    moved = report.operations[-last:] if last else ()
    names = [operation.name for operation in moved if operation.kind != "batch"]
    if names and report.setup.accelerator != "cpu":
        yield PossibleRemedy(
            f"{' and '.join(names)} on the device",
            Change(offload=last),
            "images = images.to(device).float().sub_(mean).div_(std)  # uint8 until here",
            "a quarter of the bytes is copied, and workers have less to do",
        )
    if report.setup.accelerator != "cpu" and possible_on_device(report):
        yield PossibleRemedy(
            f"a share of the preparation on a device as fast as {DEVICE_SPEED:g} workers",
            Change(device_prep=DEVICE_SPEED),
            write.loader('device="cuda"'),
            "the device prepares while training waits; its speed is assumed, not measured",
        )


class _CodeWriter:
    """Writes the code of remedies for the kind of loader that the script uses."""

    def __init__(self, report: AnalysisReport) -> None:
        self.pipeline = report.setup.loader == "penstock.Loader"
        self.workers = "workers" if self.pipeline else "num_workers"

    def loader(self, argument: str, stop: str = "") -> str:
        if self.pipeline:
            return stop or f"pipeline.loader(..., {argument})"
        given = f"..., {argument}" if argument else "..."
        return f"from penstock.torch import DataLoader\nDataLoader({given})"


def _round_up(nbytes: float) -> int:
    """Round up to two significant digits.

    >>> _round_up(5_432_100)
    5500000
    """
    scale: int = 10 ** max(0, len(str(int(nbytes))) - 2)
    return -(-int(nbytes) // scale) * scale


def _short(nbytes: int) -> str:
    return config.show_size(nbytes).replace(" ", "").replace(".0", "")
