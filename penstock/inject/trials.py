"""Tries remedies on the loader of a script: whether they can be built, and what they bring."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import ModuleType
from typing import Any, Protocol

from penstock.diagnose.analyze.phase_runner import Epochs
from penstock.diagnose.analyze.remedies import options_to_try, variants
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.trials import RemedyTrial, RunWith
from penstock.errors import PenstockError
from penstock.inject.build import Builder, RunOptions, Upgraded
from penstock.inject.messages import reason
from penstock.keyed import preserved_globals
from penstock.loader import Loader
from penstock.stops.cache import Cache

BEST = 2
"""Number of remedies that ``--try`` runs."""

ROUNDS = 3
"""Turns of each remedy: odd, because the middle one counts."""

FILLING = 20.0
"""Most seconds of filling the cache of a remedy, before it is measured."""

MIN_STEPS = 4
"""Least steps of a turn that are counted."""


class Built(Protocol):
    """A loader with the options of a remedy. ``epoch`` begins an epoch of it."""

    def epoch(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


def build(loader: Any, options: RunWith, module: ModuleType | None) -> Built:
    """The script's loader with these options, as ``penstock run`` builds it.

    Raises ``PenstockError`` if it does not work. ``module``: ``torch.utils.data.dataloader``, for
    loaders of torch.
    """
    with preserved_globals():
        if isinstance(loader, Loader):
            return _BuiltOwn(loader, options)
        assert module is not None
        return _BuiltTorch(loader, options, module)


def trials_of(
    loader: Any, report: AnalysisReport, module: ModuleType | None = None
) -> tuple[RemedyTrial, ...]:
    """Build each remedy of the report on this loader; say which work, and why others do not."""
    found: dict[RunWith, RemedyTrial] = {}
    for wanted in options_to_try(report):
        for options in variants(wanted):
            if options not in found:
                found[options] = _trial(loader, options, module)
            if not found[options].refusal:
                break
    return tuple(found.values())


def _trial(loader: Any, options: RunWith, module: ModuleType | None) -> RemedyTrial:
    try:
        build(loader, options, module).close()
    except Exception as error:  # a dataset may raise anything while it is looked at
        return RemedyTrial(options, reason(error) or type(error).__name__)
    return RemedyTrial(options)


class _BuiltTorch:
    """A torch loader that Penstock iterates."""

    def __init__(self, loader: Any, options: RunWith, module: ModuleType) -> None:
        if options.native and not _native_applies(loader.dataset):
            raise PenstockError("--native changes nothing for this dataset")
        # A name of its own, so that a trial does not join the jobs of anybody.
        share = None if options.share is None else f"trial-{os.getpid()}"
        self._loader = loader
        self._upgraded: Upgraded = Builder(
            RunOptions(
                cache=None if options.cache is None else f"{options.cache}B",
                reuse="auto" if options.reuse else None,
                echo=options.echo,
                echo_at="batch",
                share=share,
                workers=options.workers,
                native=options.native,
                random=options.random,
            ),
            module,
        ).build(loader)
        if self._upgraded.missing:
            self.close()
            raise next(iter(self._upgraded.missing.values()))

    def epoch(self) -> Iterator[Any]:
        from penstock.torch.iteration import Iteration

        return Iteration(self._loader, self._upgraded)

    def close(self) -> None:
        self._upgraded.loader.close()


def _native_applies(dataset: Any) -> bool:
    from penstock.torch.image_folder import list_transforms, take_apart
    from penstock.torch.translate import translate

    if take_apart(dataset, True) is None:
        return False
    return translate(list_transforms(dataset.transform)) is not None


class _BuiltOwn:
    """A loader of Penstock's own, with a changed pipeline."""

    def __init__(self, loader: Loader, options: RunWith) -> None:
        pipeline, changed = loader.pipeline, loader.options
        stops = pipeline.stops
        if options.cache is not None:
            if stops and isinstance(stops[0], Cache):
                stops = stops[1:]  # the new cache takes the place of the present one
            cached = replace(pipeline, stops=(), batching=None).cache(options.cache)
            pipeline = replace(pipeline, stops=(*cached.stops, *stops))
        if options.reuse:
            pipeline = replace(
                replace(pipeline, batching=None).refurbish("auto"), batching=pipeline.batching
            )
        if options.echo is not None:
            pipeline = pipeline.echo(options.echo)
        if options.workers is not None:
            changed = replace(changed, workers=options.workers)
        if options.share is not None:
            changed = replace(changed, share=f"trial-{os.getpid()}")
        self._loader = loader.remade(pipeline, changed)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


# Measuring the best remedies, in the training loop of the script.


@dataclass
class _Turns:
    """One way to load, and its seconds per batch in each of its turns."""

    batches: Epochs
    times: list[float]


def compare(
    report: AnalysisReport,
    as_it_is: Callable[[], Iterator[Any]],
    chosen: Sequence[RunWith],
    made: Callable[[RunWith], Built],
    *,
    seconds: float,
    on_progress: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[Any, None, AnalysisReport]:
    """Yield batches for the training loop: of its own loader and of the remedies, in turns.

    Returns the report with the gains of these remedies (``RemedyTrial.gain``). All take turns of
    ``seconds``, so that a change of the machine affects all of them. The first batches of a turn
    come from queues that were filled before, and are not counted.
    """
    built: list[Built] = []
    with contextlib.ExitStack() as stack:
        for options in chosen:
            one = made(options)
            stack.callback(one.close)
            built.append(one)
            if options.cache is not None:
                on_progress("trying the best remedies: filling the cache")
                _fill(one, clock)
        ways = [_Turns(Epochs(as_it_is), [])]
        ways += [_Turns(Epochs(one.epoch), []) for one in built]
        for way in ways:
            stack.callback(way.batches.close)
        for turn in range(ROUNDS):
            on_progress(f"trying the best remedies: round {turn + 1} of {ROUNDS}")
            for way in ways:
                way.times.append((yield from _turn(way.batches, report, seconds, clock)))
    own, *others = ways
    trials = list(report.trials)
    for options, way in zip(chosen, others, strict=True):
        rounds = tuple(before / after for before, after in zip(own.times, way.times, strict=True))
        at = next(at for at, trial in enumerate(trials) if trial.options == options)
        trials[at] = replace(trials[at], gain=median(rounds), rounds=rounds)
    return replace(report, trials=tuple(trials))


def _fill(built: Built, clock: Callable[[], float]) -> None:
    """Run an epoch without the training loop, which fills a cache, or a part of it."""
    until = clock() + FILLING
    for _ in built.epoch():
        if clock() > until:
            break


def _turn(
    batches: Iterator[Any], report: AnalysisReport, seconds: float, clock: Callable[[], float]
) -> Generator[Any, None, float]:
    """Yield batches for about ``seconds``; return the seconds per batch without the first ones."""
    queued = report.setup.ahead + 1
    began, start, steps = clock(), 0.0, 0
    while True:
        batch = next(batches)
        now = clock()
        if steps == queued:
            start = now
        if steps >= queued + MIN_STEPS and now - began >= seconds:
            return (now - start) / (steps - queued)
        steps += 1
        yield batch
        del batch
