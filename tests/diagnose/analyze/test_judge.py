"""Verdicts agree with what the loop waited, and nothing contradictory is stated.

The figures of the first tests are those of real analyses whose verdicts were wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.diagnose.analyze.judge import result_of, undecided
from penstock.diagnose.analyze.model import Change, predict, warm_share
from penstock.diagnose.analyze.remedies import Remedy, remedies
from penstock.diagnose.analyze.report import (
    AnalysisReport,
    Costs,
    Interval,
    MachineUse,
    Phase,
    PhaseName,
    Rate,
    WorkerUse,
)
from penstock.diagnose.analyze.result import broken_rules
from penstock.diagnose.analyze.text import gain_words, meaning, remarks, remedy_lines
from penstock.diagnose.analyze.what_if import Forecast
from tests.support.reports import report as invented

BATCH = 64


def loop(name: PhaseName, step: float, wait: float, steps: int = 24, spread: float = 0.02) -> Phase:
    """A phase of the training loop; ``step`` and ``wait`` are seconds per batch."""
    whole = step + wait
    return Phase(
        name,
        Rate(BATCH / whole, BATCH / whole * (1 - spread), BATCH / whole * (1 + spread)),
        steps,
        steps * whole,
        True,
        Interval(step, step * (1 - spread), step * (1 + spread)),
        Interval(wait, wait * (1 - spread), wait * (1 + spread)),
        3,
    )


def alone(name: PhaseName, rate: float, spread: float = 0.02) -> Phase:
    return Phase(name, Rate(rate, rate * (1 - spread), rate * (1 + spread)), 60, 5.0)


def analysed(
    *phases: Phase, prep: float = 788.0, storage: float = 1_159.0, **changed: object
) -> AnalysisReport:
    """The report of a run with these phases of the loop; ``prep`` and ``storage`` in samples/s."""
    nbytes = 110_000.0
    made = invented(
        workers=2,
        cores=2,
        ahead=4,
        compute=1 / next(phase.rate.value for phase in phases if phase.name == "replay"),
        prep=2 / prep,
        scaling={1: 1.0, 2: 2.0},
        storage=storage * nbytes,
        latency=1 / storage,
        **changed,
    )
    return replace(
        made,
        costs=replace(made.costs, cache=20_000 * nbytes),
        phases=(
            *phases,
            alone("prep", prep),
            alone("storage", storage),
            alone("cache", 20_000),
        ),
        waits=(),
        asked_seconds=60.0,
    )


def test_a_step_that_the_loader_slows_is_contention_and_not_a_stall() -> None:
    # ResNet-18 on two cores with two workers: said to be prep-bound, 26 % stalled on prep.
    found = result_of(
        analysed(
            loop("as it is", 0.613, 0.002),
            loop("replay", 0.427, 0.0),
            loop("cached", 0.611, 0.003),
            loop("cold", 0.615, 0.002),
            step_cpu=2 / 150,
        )
    )
    assert found.bound == "contention"
    assert found.shares is not None
    assert found.shares.waiting < 0.01
    assert found.shares.contention.value == pytest.approx(0.3, abs=0.02)
    assert "427 ms" in found.verdict.reason
    assert not broken_rules(found)


def test_a_loop_that_does_not_wait_is_not_bound_by_prep() -> None:
    # On a busy machine: prep-bound, 12 % stalled on prep, beside G 6 and P 267. Its own meter
    # showed 2 ms of waiting.
    found = result_of(
        analysed(
            loop("as it is", 10.9, 0.002, steps=6),
            loop("replay", 10.6, 0.0, steps=6, spread=0.05),
            loop("cached", 12.2, 0.002, steps=6),
            prep=267.0,
        )
    )
    assert found.bound == "compute"
    assert not broken_rules(found)


def test_an_interval_without_limit_is_refused() -> None:
    # fetch-bound, beside G 8 (2 to inf) and S 1,159.
    replay = replace(loop("replay", 8.0, 0.0, steps=2), rate=Rate(8.0, 2.0, math.inf))
    found = result_of(
        analysed(loop("as it is", 7.9, 0.01, steps=3), replay, loop("cached", 8.0, 0.01, steps=3))
    )
    assert found.bound is None
    assert found.verdict.refusal == (
        "not enough steps to tell: 8 steps in 64 s. Give --seconds 420."
    )
    assert not found.trust.numbers
    assert found.forecasts.cores == ()


def test_a_model_that_is_far_off_gives_no_numbers() -> None:
    # Training runs at 266 samples/s; the model says 487, 82.9 % too fast.
    found = result_of(
        analysed(
            loop("as it is", 0.120, 0.1206),
            loop("replay", 0.120, 0.0),
            loop("cached", 0.120, 0.118),
            prep=487.0,
            storage=15_000.0,
        )
    )
    assert found.bound == "prep"
    assert not found.trust.numbers
    assert found.trust.phase == "cached" or found.trust.phase == "as it is"
    assert any("too fast" in reason for reason in found.trust.reasons)


def test_a_model_that_is_a_little_off_widens_every_prediction() -> None:
    exact = result_of(prep_bound(prep=300.0))
    wide = result_of(prep_bound(prep=350.0))
    assert exact.trust.numbers
    assert wide.trust.numbers
    assert wide.trust.error > exact.trust.error + 0.1
    assert wide.trust.phase
    assert wide.trust.factor == pytest.approx(300 / 350, rel=0.03)


def prep_bound(prep: float = 300.0, **changed: object) -> AnalysisReport:
    return analysed(
        loop("as it is", 0.1, 64 / 300 - 0.1),
        loop("replay", 0.1, 0.0),
        loop("cached", 0.1, 64 / 300 - 0.1),
        prep=prep,
        storage=15_000.0,
        **changed,
    )


def test_more_cores_never_predict_less_whatever_the_sweep_measured() -> None:
    noisy = replace(prep_bound(), setup=replace(prep_bound().setup, cores=4, workers=4))
    costs = replace(noisy.costs, scaling={1: 1.0, 2: 0.8, 4: 0.9}, prep=1 / 300)
    noisy = replace(noisy, costs=costs)
    speeds = [predict(noisy, Change(cores=cores)).speed for cores in (1, 2, 4, 8)]
    assert speeds == sorted(speeds)
    found = result_of(noisy)
    assert not [line for line in broken_rules(found) if "cores" in line]


def test_jobs_that_do_not_share_are_never_each_faster_than_one() -> None:
    found = result_of(prep_bound())
    speeds = [speed for _, speed in found.forecasts.jobs]
    assert speeds == sorted(speeds, reverse=True)
    assert found.forecasts.jobs


WAITING = WorkerUse(10.0, computing=0.02, sleep=0.49, lock=0.49)
"""Workers behind one lock, as recorded: the one that has it sleeps, the other waits for it."""


def locked() -> AnalysisReport:
    made = prep_bound(pause=0.4855)
    scaling = {1: 1.0, 2: 1.018, 4: 1.071}
    costs = replace(made.costs, prep=1.018 / 300, scaling=scaling)
    return replace(made, workers_use=WAITING, costs=costs)


def test_recorded_waits_for_a_lock_contradict_no_rule_and_more_workers_are_no_remedy() -> None:
    # Printed: neither more workers nor more cores help. Most useful: 8 workers. And: each of 2
    # jobs that do not share is predicted to be faster (257 samples/s) than each of 1 (219).
    report = locked()
    found = result_of(report)
    assert (found.bound, found.verdict.cause) == ("latency", "lock")
    assert found.trust.numbers
    assert not found.warnings
    for remedy in remedies(report, result=found):
        assert (remedy.change.workers, remedy.change.cores) == (None, None)


def test_recorded_waits_for_a_server_predict_no_loss_from_more_cores() -> None:
    # Printed: no predictions: 4 cores are predicted to be slower (309 samples/s) than 2 (312).
    made = prep_bound(pause=0.95)
    scaling = {1: 1.0, 2: 1.058, 4: 1.027}
    costs = replace(made.costs, prep=1.058 / 300, scaling=scaling)
    use = WorkerUse(10.0, computing=0.02, network=0.64, other=0.31)
    found = result_of(replace(made, workers_use=use, costs=costs))
    assert found.bound == "latency"
    assert found.trust.numbers
    speeds = [speed for _, speed in found.forecasts.cores]
    assert speeds == sorted(speeds)


def test_a_contradiction_is_told_once() -> None:
    wrong = prep_bound()
    costs = replace(wrong.costs, cache=1e6, storage=100e6)
    found = result_of(replace(wrong, costs=costs, phases=wrong.phases[:4]))
    said = [*found.trust.reasons, *found.warnings]
    assert len([line for line in said if "memory (C" in line]) == 1


def test_a_wait_that_may_be_nothing_or_a_bottleneck_wants_more_steps() -> None:
    # Refused with time left: training waits for batches 2 % to 13 % of the time. The interval was
    # narrow enough for the phases to end.
    def waiting(wait: float, spread: float) -> AnalysisReport:
        run = replace(
            loop("as it is", 0.104, wait), wait=Interval(wait, wait - spread, wait + spread)
        )
        return analysed(run, loop("replay", 0.104, 0.0), loop("cached", 0.104, wait))

    unsure = waiting(0.0051, 0.0035)
    assert result_of(unsure).bound is None
    assert undecided(unsure)
    assert not undecided(waiting(0.05, 0.0054))
    assert not undecided(waiting(0.0, 0.0))


def test_a_gain_never_passes_the_rate_of_the_accelerator() -> None:
    found = result_of(prep_bound())
    most = found.rates.G
    assert most is not None
    assert max(speed for _, speed in found.forecasts.cores) <= most.value * 1.001


def test_warm_data_stays_warm_and_cold_storage_is_another_scenario() -> None:
    warm = analysed(
        loop("as it is", 0.1, 0.002),
        loop("replay", 0.1, 0.0),
        loop("cached", 0.1, 0.002),
        loop("cold", 0.1, 0.9),
        storage=64.0,
    )
    assert warm_share(warm, None) == 1.0
    found = result_of(replace(warm, warm=1.0))
    assert found.bound == "compute"
    assert found.trust.numbers
    # The model of the measured run knows nothing of the slow storage.
    assert found.trust.modelled == pytest.approx(640, rel=0.05)
    assert predict(replace(warm, warm=1.0), Change(cold=True)).speed < 100


def test_the_source_of_reads_decides_where_cold_data_makes_no_difference() -> None:
    same = analysed(*(loop(name, 0.1, 0.0) for name in ("as it is", "replay", "cached", "cold")))
    assert warm_share(same, 0.02) == 1.0
    assert warm_share(same, 0.98) == 0.0


@pytest.mark.parametrize(
    ("cause", "name"), [("sleep", "sleep"), ("open", "open"), ("lock", "lock"), ("read", "read")]
)
def test_workers_that_wait_are_bound_by_latency_and_the_cause_is_named(
    cause: str, name: str
) -> None:
    use = WorkerUse(10.0, computing=0.05, places=(("load (train.py:12)", 0.9),), **{cause: 0.95})
    found = result_of(replace(prep_bound(), workers_use=use))
    assert (found.bound, found.verdict.cause) == ("latency", name)
    assert found.verdict.place == "load (train.py:12)"


def test_workers_that_compute_are_bound_by_prep() -> None:
    use = WorkerUse(10.0, computing=0.9, queueing=0.05, lock=0.05)
    found = result_of(replace(prep_bound(), workers_use=use))
    assert (found.bound, found.verdict.cause) == ("prep", "")


def test_more_workers_help_where_workers_sleep_and_more_cores_do_not() -> None:
    sleeping = prep_bound(pause=0.95)
    speed = predict(sleeping).speed
    assert predict(sleeping, Change(workers=4)).speed > 1.8 * speed
    assert predict(sleeping, Change(cores=4, workers=2)).speed == pytest.approx(speed, rel=0.05)
    # A lock lets only one worker proceed: measured, more of them bring nothing.
    locked = replace(sleeping, costs=replace(sleeping.costs, scaling={1: 1.0, 2: 1.0, 4: 1.0}))
    ratio = predict(locked, Change(workers=8)).speed / predict(locked, Change(workers=4)).speed
    assert ratio < 1.1


def test_more_cores_are_no_remedy_for_workers_that_sleep() -> None:
    # Printed below "more workers help, more cores do not": a machine with 4 cores, 2.00 times.
    use = WorkerUse(10.0, computing=0.02, sleep=0.98)
    sleeping = replace(prep_bound(pause=0.95), workers_use=use)
    found = remedies(sleeping, result=result_of(sleeping))
    assert any(remedy.change.workers for remedy in found)
    assert all(remedy.change.cores is None for remedy in found)
    computing = replace(prep_bound(), workers_use=WorkerUse(10.0, computing=1.0))
    assert any(remedy.change.cores for remedy in remedies(computing, result=result_of(computing)))


def test_preparation_of_a_few_batches_gives_no_predictions_and_is_no_contradiction() -> None:
    # Printed: the interval of P does not contain P, or is not above 0.
    short = prep_bound()
    phases = tuple(
        replace(phase, rate=Rate(phase.rate.value, 0.0, math.inf))
        if phase.name == "prep"
        else phase
        for phase in short.phases
    )
    found = result_of(replace(short, phases=phases))
    assert found.bound == "prep"
    assert not found.trust.numbers
    assert "preparation was measured in too few batches" in found.trust.reasons[0]
    assert not found.warnings


def test_slow_storage_is_told_from_slow_preparation_by_the_wait_for_cached_samples() -> None:
    found = result_of(
        analysed(
            loop("as it is", 0.1, 0.3),
            loop("replay", 0.1, 0.0),
            loop("cached", 0.1, 0.01),
            loop("cold", 0.1, 0.3),
            storage=160.0,
        )
    )
    assert found.bound == "fetch"
    assert found.verdict.also == ()


def test_the_stall_of_the_slowest_rank_is_that_of_the_job() -> None:
    # Ranks exchange gradients: rank 1 waits for its loader, rank 0 waits for rank 1 in its step.
    phases = (loop("replay", 0.1, 0.0), loop("cached", 0.1, 0.2))
    waiting = analysed(loop("as it is", 0.1, 0.2), *phases, prep=213.0, rank=1, world=2)
    other = analysed(
        loop("as it is", 0.3, 0.0),
        loop("replay", 0.1, 0.0),
        loop("cached", 0.3, 0.0),
        prep=900.0,
        rank=0,
        world=2,
    )
    for report in (
        replace(waiting, ranks=(other,)),
        replace(other, ranks=(waiting,)),
    ):
        found = result_of(report)
        assert (found.bound, found.rank, found.world) == ("prep", 1, 2)


def test_waiting_that_other_processes_cause_is_refused() -> None:
    use = WorkerUse(10.0, computing=0.03, queueing=0.4, idle=0.57)
    busy = replace(
        prep_bound(),
        workers_use=use,
        machine_use=(MachineUse("prep", 5.0, 2, own=0.2, others=1.8),),
    )
    found = result_of(busy)
    assert found.bound is None
    assert "other processes kept 90 % of the cores busy" in found.verdict.refusal
    assert "workers needed only 3 % of the time for their work" in found.verdict.refusal
    # Printed: they could prepare 197,324 samples/s, and 4 workers would prepare about 3,707.
    replay = next(phase for phase in busy.phases if phase.name == "replay")
    slow = tuple(
        alone("prep", 1.5 * replay.rate.value) if phase.name == "prep" else phase
        for phase in busy.phases
    )
    found = result_of(replace(busy, phases=slow))
    assert "the loader alone prepares 960 samples/s, more than the 640" in found.verdict.refusal
    assert not any("queued for a core" in line for line in found.warnings)
    assert any("other processes" in line for line in found.warnings)


def test_fetch_is_not_stated_where_it_counts_as_prep() -> None:
    # Printed: 62 % stalled on prep, 6 % on fetch, memory serves 100 % of the present reads. And a
    # note: no files were found that the dataset reads, so fetch counts as prep.
    made = analysed(
        loop("as it is", 0.0055, 0.0118, spread=0.1),
        loop("replay", 0.0053, 0.0),
        loop("cached", 0.0052, 0.0100, spread=0.1),
    )
    made = replace(made, costs=replace(made.costs, storage=0.0, latency=0.0), warm=1.0)
    found = result_of(made)
    assert found.bound == "prep"
    assert found.shares is not None
    assert found.shares.fetch.value == 0.0
    assert found.shares.prep.value == pytest.approx(0.68, abs=0.01)
    assert not [line for line in remarks(made, found) if "page cache" in line]


def test_a_prediction_that_may_be_anything_is_not_given() -> None:
    # Printed: 4.00 times as fast (-0.80 to 7.93). It was 1.86 times as fast.
    wild = analysed(
        loop("as it is", 0.026, 0.155, spread=0.8),
        loop("replay", 0.024, 0.0, spread=0.4),
        loop("cached", 0.013, 0.203, spread=0.4),
        prep=BATCH / 0.181,
        storage=15_000.0,
    )
    found = result_of(wild)
    assert not found.trust.numbers
    assert "there are no predictions: they would be within" in found.trust.reasons[-1]


def test_more_workers_that_were_not_tried_have_a_condition() -> None:
    # Printed: 8 workers, 4.00 times as fast (1.70 to 6.30). It was 1.32 times as fast: all of them
    # waited for one server, and the sweep had been left out.
    use = WorkerUse(10.0, computing=0.02, network=0.98)

    def more_workers(scaling: dict[int, float]) -> Remedy:
        made = prep_bound(pause=0.95)
        made = replace(made, workers_use=use, costs=replace(made.costs, scaling=scaling))
        found = remedies(made, result=result_of(made))
        return next(one for one in found if (one.change.workers or 0) > 2)

    untried = more_workers({1: 1.0, 2: 2.0})
    assert "only if workers do not wait for each other" in untried.condition
    assert untried.low <= 1.0
    tried = more_workers({1: 1.0, 2: 2.0, 4: 4.0})
    assert not tried.condition
    assert tried.low > 1.0


def busy_machine(
    others: float, *, computing: float = 0.28, own: float = 0.5, workers: int = 2
) -> AnalysisReport:
    """Workers that sleep and compute, on two cores of which others keep a part busy."""
    made = prep_bound(pause=1 - computing)
    scaling = {1: 1.0, 2: 1.97, 4: 3.46 if computing < 0.5 else 1.97}
    return replace(
        made,
        setup=replace(made.setup, workers=workers, ahead=2 * workers),
        workers_use=WorkerUse(10.0, computing=computing, sleep=1 - computing),
        machine_use=(MachineUse("prep", 5.0, 2, own=own, others=others),),
        costs=replace(made.costs, scaling=scaling, prep=scaling[workers] / 300),
    )


def more_workers(report: AnalysisReport) -> Remedy:
    found = remedies(report, result=result_of(report))
    return next(one for one in found if (one.change.workers or 0) > 2)


def test_a_gain_that_needs_cores_of_others_is_not_given() -> None:
    # Printed on a busy machine: 8 workers, 4.00, 3.47 and 1.95 times as fast. Measured were 1.96,
    # 1.48 and 1.50.
    taken = more_workers(busy_machine(1.7))
    assert not taken.certain
    assert taken.gain < 1.1
    assert taken.condition == "only if other processes leave the workers the cores that they need"
    assert taken.low <= 1.0
    assert "times" not in gain_words(taken, result_of(busy_machine(1.7)))
    free = more_workers(busy_machine(0.1))
    assert free.certain
    assert not free.condition
    assert free.gain > 2
    # Workers that only sleep need no cores.
    asleep = more_workers(busy_machine(1.7, computing=0.02, own=0.04))
    assert asleep.certain
    assert asleep.gain > 2


def test_repeated_samples_are_no_faster_training() -> None:
    # Printed: most useful: echo with factor 2: 2.00 times as fast (600 instead of 300 samples/s).
    report = busy_machine(1.7)
    result = result_of(report)
    found = remedies(report, result=result)
    lines = remedy_lines(found, result)
    assert lines[0].startswith("May be useful: 4 workers: how much it helps depends on the load")
    echo = next(line for line in lines if "echo with factor 2" in line)
    assert "2.00 times as many steps" in echo
    assert "no more fresh samples" in echo
    only = [remedy for remedy in found if remedy.repeats]
    assert remedy_lines(only, result)[0].startswith("Only with repeated samples: echo")


def test_sleeping_workers_still_sleep_with_a_remedy() -> None:
    # Printed below latency-bound: 4 workers, 1.76 times as fast, then prep-bound.
    report = busy_machine(0.0, computing=0.02, own=0.04)
    result = result_of(report)
    four = next(one for one in remedies(report, result=result) if one.change.workers == 4)
    assert "then latency-bound" in gain_words(four, result)
    assert "more cores do not" in meaning(report, result)[0]
    assert (
        "as long as cores are free" in meaning(busy_machine(1.7), result_of(busy_machine(1.7)))[0]
    )


def test_load_by_others_lowers_and_widens_the_gain_of_more_workers() -> None:
    idle, busy = (more_workers(busy_machine(others)) for others in (0.0, 1.2))
    assert busy.certain
    assert 1 < busy.gain < idle.gain
    # Eight workers may have the free cores, or all of them.
    assert busy.high - busy.low > idle.high - idle.low


@pytest.mark.parametrize("others", [0.0, 0.5, 1.2, 1.9])
@pytest.mark.parametrize("computing", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_load_by_others_breaks_a_rule_of_predictions(
    others: float, computing: float, workers: int
) -> None:
    report = busy_machine(others, computing=computing, workers=workers)
    found = result_of(report)
    forecast = Forecast(report, found.trust)
    for penstock in (False, True):
        given = Change(penstock=penstock)
        speeds = [forecast(replace(given, cores=cores)).speed for cores in (1, 2, 3, 4, 8)]
        assert speeds == pytest.approx(sorted(speeds), rel=1e-3)
    jobs = [forecast(Change(jobs=jobs)).speed for jobs in (1, 2, 4)]
    assert jobs == pytest.approx(sorted(jobs, reverse=True), rel=1e-3)
    most = found.rates.G
    assert most is not None
    assert max([*speeds, *jobs]) <= most.value * 1.001
    for remedy in remedies(report, result=found):
        if remedy.change.echo == 1 and not remedy.change.share:
            assert remedy.speed <= most.value * 1.001
            assert remedy.high * remedy.baseline <= most.value * 1.001
        assert remedy.low <= remedy.gain <= remedy.high


def test_one_core_is_written_as_one() -> None:
    made = analysed(loop("as it is", 0.1, 0.2), loop("replay", 0.1, 0.0), loop("cached", 0.1, 0.2))
    report = replace(
        made,
        setup=replace(made.setup, cores=1),
        workers_use=WorkerUse(10.0, computing=0.5, queueing=0.5),
        machine_use=(MachineUse("prep", 5.0, 1, own=0.5, others=0.5),),
    )
    said = " ".join(result_of(report).warnings)
    assert "2 workers on 1 core queued for a core 50 % of the time" in said
    assert "0.5 of 1 core busy" in said


def test_an_interrupted_analysis_says_so_and_keeps_what_it_has() -> None:
    cut = replace(
        analysed(loop("replay", 0.1, 0.0)),
        phases=(loop("as it is", 0.1, 0.05),),
        interrupted="it was interrupted after 30 steps",
    )
    found = result_of(cut)
    assert found.bound is None
    assert found.verdict.refusal.startswith("it was interrupted after 30 steps, before replay")
    assert found.interrupted
    assert found.phases[0].rate.value == pytest.approx(64 / 0.15)
    assert not found.trust.numbers


def test_an_interrupted_analysis_does_not_guess_between_prep_and_fetch() -> None:
    cut = replace(
        analysed(loop("as it is", 0.05, 0.2), loop("replay", 0.05, 0.0)),
        interrupted="it was interrupted after 35 steps",
        costs=Costs(0.05 / 64, 0.0, {1: 1.0}, 0.0, 0.0, 0.0),
    )
    found = result_of(cut)
    assert found.bound is None
    assert "whether for preparation or for storage was not measured" in found.verdict.refusal


def test_memory_that_seems_slower_than_storage_gives_no_predictions() -> None:
    wrong = prep_bound()
    wrong = replace(
        wrong, costs=replace(wrong.costs, cache=1e6, storage=100e6), phases=wrong.phases[:3]
    )
    found = result_of(wrong)
    assert not broken_rules(found)
    assert not found.trust.numbers
    assert found.rates.S is None
    assert any("memory (C" in line for line in found.trust.reasons)


def test_waits_are_not_named_prep_or_fetch_without_a_run_on_cached_samples() -> None:
    found = result_of(analysed(loop("as it is", 0.05, 0.2), loop("replay", 0.05, 0.0)))
    assert found.bound is None
    assert "80 % of the time for batches; whether for preparation or" in found.verdict.refusal
