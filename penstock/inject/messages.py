"""Messages of ``penstock run`` about a script's loaders: one for each loader, and a summary."""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ErrorCode, PipelineError
from penstock.inject.build import shuffles

if TYPE_CHECKING:
    from penstock.inject.build import RunOptions, Upgraded

FILE = "loaders"

_COMMAND_TEXTS: dict[ErrorCode, str] = {
    "random-above-cache": (
        "the dataset may be random, and a cached sample would never change again. If the datasets "
        "of this script draw no random numbers, say so with --no-random."
    ),
    "echo-with-sampler": (
        "both its sampler and echo would decide how often a sample is used. Give --echo-at batch."
    ),
    "nothing-random-below-refurbish": (
        "none of the last --split transforms, which run every time, is random, so exactly the same "
        "sample would be used several times. Give a larger --split."
    ),
    "no-transforms": (
        "its dataset has no attribute 'transform' with transforms that it could be placed between."
    ),
    "iterable-dataset": "its dataset can only be iterated, so its samples have no index.",
}
"""Texts for errors whose own message names arguments that the command does not have."""


class StderrHandler(logging.Handler):
    """Writes messages to stderr as ``penstock: ...``."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("penstock: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Looked up for every message: a script may replace sys.stderr at any time.
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class CommandLog:
    """A logger whose every message reaches stderr once, however the script configures logging."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._handler = StderrHandler()

    def write(self, level: int, message: str) -> None:
        """Log a message."""
        self._attach()
        logger = self._logger
        # Not logger.log, because logging.disable would drop the message.
        logger.handle(logger.makeRecord(logger.name, level, __file__, 0, message, (), None))

    def _attach(self) -> None:
        """Attach the handler, and stop propagation to the handlers of the script.

        Before every message: ``logging.config.dictConfig`` disables or resets the loggers that
        exist already, and scripts change the level of all loggers in a loop.
        """
        logger = self._logger
        if self._handler not in logger.handlers:
            logger.addHandler(self._handler)
        self._handler.setLevel(logging.NOTSET)
        logger.propagate = False
        logger.disabled = False


log = CommandLog("penstock.run")


@dataclass(frozen=True)
class LoaderOutcome:
    """What happened to one loader of a script; ``why`` is empty if it was upgraded."""

    pid: int
    number: int
    name: str
    changes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.name} stays as it is: {self.why}"
        without = "".join(f"\n  without {option}" for option in self.missing)
        return f"{self.name} is upgraded: {'; '.join(self.changes)}.{without}"


class LoaderReporter:
    """Logs what happens to each loader, and writes it to a file for the summary.

    Of several ranks only the first reports.
    """

    def __init__(self, dist: Any, rank: int, reports: str | None) -> None:
        self._dist = dist
        self._rank = rank
        self._reports = reports
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def upgraded(self, loader: Any, upgraded: Upgraded, options: RunOptions) -> None:
        changes = [str(upgraded.loader._loader.choice), *options.show(upgraded.extras)]
        if upgraded.plan is None and not upgraded.stream:
            changes.append("shuffled by Penstock")
        missing = tuple(f"--{name}: {reason(why)}" for name, why in upgraded.missing.items())
        self._report(loader, changes=tuple(changes), missing=missing)

    def not_upgraded(self, loader: Any, why: Exception) -> None:
        self._report(loader, why=reason(why))

    def _report(self, loader: Any, **outcome_fields: Any) -> None:
        if loader not in self._numbers:
            self._count += 1
            self._numbers[loader] = self._count
        number = self._numbers[loader]
        outcome = LoaderOutcome(os.getpid(), number, _name(loader, number), **outcome_fields)
        if self._dist.is_available() and self._dist.is_initialized():
            self._rank = int(self._dist.get_rank())
        if self._rank:
            return
        complete = not outcome.why and not outcome.missing
        log.write(logging.INFO if complete else logging.WARNING, str(outcome))
        if self._reports is not None:
            with open(Path(self._reports) / FILE, "ab", 0) as file:
                file.write(json.dumps(asdict(outcome)).encode() + b"\n")


def loaders(reports: Path) -> list[LoaderOutcome]:
    """The final outcome of every loader, read from the directory of reports."""
    try:
        lines = (reports / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    outcomes: dict[tuple[int, int], LoaderOutcome] = {}
    for line in lines:
        entry = json.loads(line)
        entry |= {name: tuple(entry[name]) for name in ("changes", "missing")}
        outcomes[entry["pid"], entry["number"]] = LoaderOutcome(**entry)
    return list(outcomes.values())


def summary(outcomes: Sequence[LoaderOutcome]) -> str:
    """The last line of ``penstock run``.

    >>> print(summary([LoaderOutcome(7, 1, "DataLoader 1", ("2 threads",))]))
    1 of 1 DataLoaders upgraded.
    """
    if not outcomes:
        return "the script iterated no torch DataLoader, so nothing was changed."
    upgraded = [outcome for outcome in outcomes if not outcome.why]
    partial = [outcome for outcome in upgraded if outcome.missing]
    text = f"{len(upgraded)} of {len(outcomes)} DataLoaders upgraded"
    if partial:
        text += f", {len(partial)} of them without some of the given options"
    complete = len(upgraded) == len(outcomes) and not partial
    return f"{text}{'.' if complete else '; the reasons are above.'}"


def _name(loader: Any, number: int) -> str:
    try:
        samples = f"{len(loader.dataset)} samples"
    except (TypeError, NotImplementedError):
        samples = "a stream"
    order = "shuffled" if shuffles(loader) else "in order"
    return f"DataLoader {number} ({type(loader.dataset).__name__}, {samples}, {order})"


def reason(why: Exception) -> str:
    """The text of an error in terms of the command's own options."""
    code = why.code if isinstance(why, PipelineError) else None
    return str(why).removeprefix("DataLoader: ") if code is None else _COMMAND_TEXTS[code]
