"""Trials: remedies are built on the script's own loader, and the best take turns in its loop."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.diagnose.analyze.remedies import remedies
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.trials import RemedyTrial, RunWith
from penstock.errors import PipelineError
from penstock.inject import trials
from penstock.stops.cache import Cache
from tests.support.reports import report

torch = pytest.importorskip("torch")
import torch.utils.data.dataloader as module  # noqa: E402

MEMORY = 64 << 30


class Squares:
    """Deterministic, but nobody can know that from outside."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index * index])


class Noisy(Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index * random.random()])


def torch_loader(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=8)


def of_torch(**changed: Any) -> AnalysisReport:
    return report(workers=0, penstock=1e-3, **changed)


def test_a_cache_that_the_dataset_refuses_is_printed_with_what_makes_it_work() -> None:
    made = of_torch()
    found = trials.trials_of(torch_loader(Squares()), made, module)
    by_options = {trial.options: trial.refusal for trial in found}
    cached = [options for options in by_options if options.cache and options.workers is None]
    assert by_options[next(one for one in cached if one.random is None and not one.native)]
    assert by_options[next(one for one in cached if one.random is False and not one.native)] == ""
    tried = remedies(replace(made, trials=found), MEMORY)
    (cache,) = (one for one in tried if one.options and one.options.cache and one.tried)
    assert "--no-random" in cache.command.split()
    assert cache.condition == "only if the datasets of the script draw no random numbers"
    assert cache.command.endswith(f" -- {made.command}")


def test_native_is_not_printed_for_a_dataset_that_it_does_not_change() -> None:
    made = of_torch()
    found = trials.trials_of(torch_loader(Squares()), made, module)
    assert all(trial.refusal for trial in found if trial.options.native)
    commands = [one.command for one in remedies(replace(made, trials=found), MEMORY)]
    assert any(commands)
    assert not any("--native" in command.split() for command in commands)


def test_a_remedy_that_could_not_be_built_is_not_printed() -> None:
    made = of_torch()
    refused = tuple(
        RemedyTrial(trial.options, "no")
        for trial in trials.trials_of(torch_loader(Noisy()), made, module)
    )
    titles = [one.title for one in remedies(replace(made, trials=refused), MEMORY)]
    assert titles
    assert not any("cache" in title or "Penstock" in title or "echo" in title for title in titles)


def test_torch_takes_any_number_of_workers_itself() -> None:
    made = report(prep=20e-3)
    only = replace(made, trials=(RemedyTrial(RunWith(workers=8), "refused"),))
    (workers,) = (one for one in remedies(only, MEMORY) if one.change.workers == 8)
    assert (workers.command, workers.code) == ("", "DataLoader(..., num_workers=8)")


def test_remedies_of_a_pipeline_are_built_from_it() -> None:
    pipeline = ps.from_dataset(np.zeros((64, 8))).map(lambda sample: sample + 1).batch(8)
    with pipeline.loader(workers=0) as loader:
        built = trials.build(loader, RunWith(cache=10**6, workers=1), None)
        assert sum(len(batch) for batch in built.epoch()) == 64
        built.close()


def test_a_larger_cache_takes_the_place_of_the_present_one() -> None:
    pipeline = ps.from_dataset(np.zeros((64, 8))).cache(10**5).batch(8)
    with pipeline.loader(workers=0) as loader:
        built = trials.build(loader, RunWith(cache=10**6), None)
        assert isinstance(built, trials._BuiltOwn)
        budgets = [stop.budget for stop in built._loader.pipeline.stops if isinstance(stop, Cache)]
        assert budgets == [10**6]
        built.close()


def test_a_pipeline_that_keeps_nothing_random_refuses_to_refurbish() -> None:
    pipeline = ps.from_dataset(np.zeros((64, 8))).batch(8)
    with pipeline.loader(workers=0) as loader, pytest.raises(PipelineError):
        trials.build(loader, RunWith(reuse=True), None)


def test_trials_leave_the_generators_of_the_script_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    trials.trials_of(torch_loader(Squares()), of_torch(), module)
    assert torch.rand(1).item() == expected


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """A loader that takes ``seconds`` for a batch, of an epoch of 10."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.closed = clock, seconds, False
        self.batches = 0

    def epoch(self) -> Iterator[int]:
        for number in range(10):
            self.clock.now += self.seconds
            self.batches += 1
            yield number

    def close(self) -> None:
        self.closed = True


def trained(
    running: Generator[Any, None, AnalysisReport], clock: Clock, step: float
) -> AnalysisReport:
    """Run a training loop to its end; return what the generator returns."""
    while True:
        try:
            next(running)
        except StopIteration as end:
            result: AnalysisReport = end.value
            return result
        clock.now += step


def test_the_best_remedies_take_turns_with_the_loader_of_the_script() -> None:
    clock = Clock()
    options = RunWith(), RunWith(workers=2)
    made = replace(report(ahead=1), trials=tuple(map(RemedyTrial, options)))
    own, fakes = Fake(clock, 0.2), {options[0]: Fake(clock, 0.05), options[1]: Fake(clock, 0.1)}
    said: list[str] = []
    running = trials.compare(
        made,
        own.epoch,
        options,
        lambda one: fakes[one],
        seconds=2.0,
        on_progress=said.append,
        clock=clock,
    )
    result = trained(running, clock, step=0.1)
    assert [trial.gain for trial in result.trials] == pytest.approx([2.0, 1.5])
    assert all(len(trial.rounds) == trials.ROUNDS for trial in result.trials)
    assert all(fake.closed for fake in fakes.values())
    assert said[0].endswith(f"round 1 of {trials.ROUNDS}")
    by_change = {one.options: one.measured for one in remedies(result, MEMORY)}
    assert by_change.get(options[1], 1.5) == pytest.approx(1.5)


def test_a_cache_is_filled_before_its_turns() -> None:
    clock = Clock()
    options = RunWith(cache=10**6)
    made = replace(report(ahead=1), trials=(RemedyTrial(options),))
    fake = Fake(clock, 0.1)
    running = trials.compare(
        made,
        Fake(clock, 0.1).epoch,
        [options],
        lambda one: fake,
        seconds=1.0,
        on_progress=lambda _: None,
        clock=clock,
    )
    next(running)
    assert fake.batches == 10
    running.close()
    assert fake.closed
