"""Runs the phases of an analysis: the training loop gets replayed, cached or cold batches."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from penstock import config
from penstock.diagnose.analyze.delayed_reads import wait_losses
from penstock.diagnose.analyze.flow import between
from penstock.diagnose.analyze.judge import contended_seconds, plural, undecided
from penstock.diagnose.analyze.machine import (
    MachineCounters,
    MachineWatch,
    below,
    merged,
    use_between,
)
from penstock.diagnose.analyze.model import fit_cold_run, warm_share
from penstock.diagnose.analyze.phase_timer import PhaseTimer
from penstock.diagnose.analyze.reading import ReadSpeed, storage_speed, time_reads
from penstock.diagnose.analyze.report import (
    AnalysisReport,
    Costs,
    Curve,
    MachineUse,
    OperationTime,
    Phase,
    PhaseName,
    Setup,
    Wait,
    WorkerUse,
)
from penstock.diagnose.analyze.result import LEAST_STEPS
from penstock.diagnose.analyze.sample_files import can_drop, child_processes, device_bytes
from penstock.diagnose.analyze.subject import BATCHES, Host, StepDevice, Subject
from penstock.diagnose.analyze.worker_sweep import sweep_workers, worker_counts
from penstock.diagnose.analyze.worker_watch import WorkerWatch, pause_share

ROUNDS = 3
"""Most turns of each phase with the training loop. Phases take turns, so that a change of the
machine's load affects all of them alike."""

LOOP_SHARE = 0.55
"""Share of the time for the phases with the training loop."""

PART = 0.06
"""Share of the time for each measurement of the loader alone."""

WARM_UP_AS_IT_IS = 8
"""First steps of the unchanged script that are not counted: they load and compile code."""

WARM_UP_SHARE = 0.06
"""Share of the time after which a warm-up ends, if it had two steps."""

WARM_UP_AGAIN = 2
"""Steps of each further turn that are not counted."""

WAITED = 0.05
"""A loop that waits a larger share of the time meets an empty queue. So the queue, which fills
while another phase has its turn, is emptied before the next turn."""

OVERRUN = 0.15
"""Share of the time that the analysis may take longer before it leaves measurements out."""

SLACK = 1.0
"""Seconds that it may take longer in any case."""

WIDE = 0.1
"""Intervals wider than this share of the time may hide a bottleneck."""

MOST_EXTRA = 6
"""Most further turns of the phases that decide."""

REST = 0.3
"""Share of the time that is kept for the measurements without the training loop."""

QUICK = 10.0
"""An analysis with fewer seconds than this shortens all phases and leaves none out."""

QUIET = 0.1
"""The loader is quiet if the job uses less than this share of a core while the loop stands."""

QUIET_LOOK = 0.1
"""Seconds between two looks at whether the loader is quiet."""

AGREE_EVERY = 4
"""Number of steps after which ranks exchange whether the phase is done."""

READERS = 4
"""Least number of threads that measure storage: fewer leave it idle between two requests."""

MOST_WAITS = 500
"""Most waits of the training loop that a report keeps of each phase."""

SLOW_START = 0.05
"""A note is made if the first wait of an epoch takes more than this share of the epoch."""

LEAST_READING, MOST_READING = 0.5, 1.25
"""Limits of the estimated CPU time of reading, relative to that of a thread that only reads."""

RECEIVED = 3
"""Batches that are received after they are surely ready, to time the receiving alone."""


class Track:
    """One phase with the training loop: its batches, which are paused between turns."""

    def __init__(self, name: PhaseName, batches: Iterator[Any], timer: PhaseTimer) -> None:
        self.name = name
        self.batches = batches
        self.timer = timer
        self.ended = False


class PhaseRunner:
    """One analysis. ``run`` yields batches for the training loop, and sets ``report`` at its end.

    ``seconds`` is the time for all phases. ``on_progress`` is called with a line about each; it
    begins with the share of the time that is spent. ``machine`` takes snapshots of the machine,
    ``None`` for none.
    """

    def __init__(
        self,
        subject: Subject,
        device: StepDevice | None = None,
        *,
        seconds: float = 60.0,
        on_progress: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        cpu: Callable[[], float] = time.process_time,
        machine: MachineWatch | None = None,
    ) -> None:
        self._sleep = sleep
        self._cpu = cpu
        self.report: AnalysisReport | None = None
        self._subject = subject
        self._device = device or Host()
        self._whole = seconds
        self._part = seconds * PART
        self._on_progress = on_progress or (lambda _: None)
        self._clock = clock
        self._machine = machine
        self._phases: list[Phase] = []
        self._tracks: dict[PhaseName, Track] = {}
        self._waits: list[Wait] = []
        # Processes of the script that are no workers; those begin with the first batch.
        self._others = below(os.getpid()) if machine is not None else []
        self._began = clock()
        self._batch_gaps: list[float] = []
        self._epoch_starts: list[float] = []
        self._handed_out = 0
        self._uses: list[MachineUse] = []
        self._workers_use: WorkerUse | None = None
        self._fresh: Any = None
        self._device_reads: float | None = None
        self._own_reads: tuple[int | None, int | None, int] = (None, None, 0)
        self._skipped: list[str] = []
        self.steps = 0

    # Time.

    @property
    def spent(self) -> float:
        return self._clock() - self._began

    def _left(self, *, overrun: bool = False) -> float:
        if self._whole < QUICK:
            return math.inf
        more = max(SLACK, OVERRUN * self._whole) if overrun else 0.0
        return self._whole + more - self.spent

    def _tell(self, text: str) -> None:
        share = min(1.0, self.spent / self._whole)
        left = max(0.0, self._whole - self.spent)
        bar = "#" * round(10 * share)
        self._on_progress(f"[{bar:<10}] {share:4.0%}, {left:,.0f} s left: {text}")

    def _fits(self, what: str, seconds: float) -> bool:
        """Whether a measurement of about ``seconds`` fits into the time that is left."""
        if seconds <= self._left(overrun=True):
            return True
        self._skipped.append(what)
        return False

    # The order of the phases.

    def run(self, as_it_is: Iterator[Any]) -> Iterator[Any]:
        """Batches for the training loop; ``as_it_is`` are those of its own loader."""
        own = self._track("as it is", as_it_is)
        try:
            before = device_bytes(child_processes())
            yield from self._turn(own)
            self._own_reads = before, device_bytes(child_processes()), self._handed_out
            yield from self._replay_turn()
            took = self.spent
            if self._agree(self._worth_splitting()):
                self._tell("reading the samples for the next phases")
                self._subject.choose_samples(self._part)
                yield from self._turn(self._track("cached", self._subject.cached()))
                yield from self._cold_turn(took)
            for _ in range(1, ROUNDS):
                if not self._agree(self._another_round()):
                    break
                for track in list(self._tracks.values()):
                    yield from self._turn(track)
            yield from self._catch_up()
            self._keep_phases()
            self._close(except_for="cached")
            self._finish()
        finally:
            self._close()

    def _agree(self, yes: bool) -> bool:
        """Whether all ranks want that, so that all of them do the same."""
        return self._device.agree(yes)

    def _worth_splitting(self) -> bool:
        """Whether there is time for the phases that tell waits for prep from waits for fetch."""
        needed = self._turn_seconds("as it is") + self._part
        waits = self._waiting("as it is") > WAITED / 2
        return needed <= (self._left() if waits else self._left() - (1 - LOOP_SHARE) * self._whole)

    def _cold_turn(self, took: float) -> Iterator[Any]:
        if not self._agree(took <= self._left() / 2):
            self._skipped.append("cold storage")
            return
        cold = self._subject.cold()
        if cold is None:
            return
        before = device_bytes(child_processes()), self._handed_out
        yield from self._turn(self._track("cold", cold))
        self._device_reads = self._device_share(*before)

    def _another_round(self) -> bool:
        """Whether a further turn of each phase fits into the time of the phases with the loop."""
        if all(track.timer.exact and self._enough_steps(track) for track in self._tracks.values()):
            # Exact, but as yet only at one moment: repeat if that is cheap.
            return self.spent + self._round_seconds() <= LOOP_SHARE / 2 * self._whole
        return self.spent + self._round_seconds() <= LOOP_SHARE * self._whole

    def _enough_steps(self, track: Track) -> bool:
        return track.timer.steps >= LEAST_STEPS

    def _round_seconds(self) -> float:
        return sum(map(self._turn_seconds, self._tracks))

    def _turn_seconds(self, name: PhaseName) -> float:
        """Seconds that another turn of a phase takes, as far as its last one tells."""
        timer = self._tracks[name].timer
        each = timer.samples / timer.rate().value if timer.rate().value > 0 else 0.0
        return max((WARM_UP_AGAIN + 2) * each, min(timer.seconds, 16 * each))

    def _catch_up(self) -> Iterator[Any]:
        """Further turns of the phases that decide, if they had too few steps or are not exact."""
        for _ in range(MOST_EXTRA):
            deciding = [
                track
                for name, track in self._tracks.items()
                if name in ("as it is", "replay") and not track.ended
            ]
            few = any(track.timer.steps < LEAST_STEPS for track in deciding)
            wide = self._whole >= QUICK and (
                any(map(self._uncertain, deciding)) or self._undecided()
            )
            needed = sum(self._turn_seconds(track.name) for track in deciding)
            # A verdict comes first; predictions need the rest of the time.
            left = self._left() if few else self._left() - REST * self._whole
            if not self._agree((few or wide) and 0 < needed <= left):
                return
            for track in deciding:
                yield from self._turn(track)

    def _undecided(self) -> bool:
        """Whether the steps so far do not tell the bottleneck."""
        phases = tuple(track.timer.phase() for track in self._tracks.values())
        nothing = Costs(0.0, 0.0, {1: 1.0}, 0.0, 0.0, 0.0)
        setup = replace(self._subject.setup, accelerator=self._device.name)
        return undecided(AnalysisReport(setup, nothing, phases))

    def _uncertain(self, track: Track) -> bool:
        """Whether the interval of a wait, or of a step, is too wide to tell the bottleneck."""
        phase = track.timer.phase()
        if phase.wait is None or phase.step is None:
            return False
        whole = phase.wait.value + phase.step.value
        width = max(one.high - one.low for one in (phase.wait, phase.step))
        return width > WIDE * whole

    def _waiting(self, name: PhaseName) -> float:
        """Share of the time that the loop waited in a phase."""
        phase = self._tracks[name].timer.phase()
        if phase.wait is None or phase.step is None:
            return 0.0
        return phase.wait.value / max(1e-9, phase.wait.value + phase.step.value)

    def stop(self, why: str) -> None:
        """Make the report of what was measured so far: the script ended, or was interrupted."""
        if self.report is not None:
            return
        self._keep_phases()
        self._close()
        step = _seconds(self._rate("replay") or self._rate("as it is"))
        self.report = self._measured(Costs(step, 0.0, {1: 1.0}, 0.0, 0.0, 0.0), (), why)
        self._subject.close()

    def _keep_phases(self) -> None:
        names = {phase.name for phase in self._phases}
        self._phases[:0] = [
            track.timer.phase()
            for track in self._tracks.values()
            if track.name not in names and (track.timer.steps or track.name == "as it is")
        ]

    def _close(self, except_for: str = "") -> None:
        for track in self._tracks.values():
            if track.name != except_for and not isinstance(track.batches, _Closed):
                _close(track.batches)
                track.batches = _Closed()

    def _finish(self) -> None:
        """Measure everything that needs no training loop, and make the report."""
        subject = self._subject
        track = self._tracks.get("cached")
        if track is None:
            self._tell("reading the samples for the next phases")
            subject.choose_samples(self._part)
        cached = subject.cached() if track is None else track.batches
        try:
            self._drain("prep", cached)
            shuttle = self._receive(cached)
        finally:
            _close(cached)
            if track is not None:
                track.batches = _Closed()
        copy = self._device.copy_seconds(self._fresh) / max(1, subject.setup.batch)
        workers = subject.setup.workers
        rates = self._sweep()
        one_worker = rates.get(1) or self._rate("prep") / max(1, workers)
        scaling = {count: rate * _seconds(one_worker) for count, rate in rates.items()}
        if workers and not scaling:
            scaling = {1: 1.0, workers: float(workers)}
        storage, latency, reading = self._measure_storage(max(1, workers))
        after_wait, reading = self._measure_delays(latency, reading, one_worker)
        cached_reads = self._time_reads("cache", max(1, workers), cold=False)
        if cached_reads is not None:
            self._phases.append(cached_reads.phase)
        # Seconds of all workers together, relative to those of one worker.
        slower = _seconds(scaling[workers]) if workers in scaling else 1.0 / max(1, workers)
        miss, hit = self._measure_refurbish(slower)
        penstock = self._measure_penstock(slower, _seconds(one_worker))
        operations: tuple[OperationTime, ...] = ()
        if self._fits("operations one by one", min(OPERATIONS_SECONDS, self._part)):
            self._tell("timing operations one by one")
            operations = tuple(subject.operations())
        replay = next((use for use in merged(self._uses) if use.phase == "replay"), None)
        use, step = self._workers_use, _seconds(self._rate("replay"))
        costs = Costs(
            compute=step,
            prep=_seconds(one_worker),
            scaling=scaling or {1: 1.0},
            storage=storage,
            cache=0.0 if cached_reads is None else cached_reads.bytes_per_second,
            latency=latency,
            copy=copy,
            sizes=subject.sizes,
            shuttle=shuttle / subject.setup.batch,
            reading=reading,
            after_wait=after_wait,
            reuse_miss=miss,
            reuse_hit=hit,
            penstock=penstock,
            step_cpu=0.0 if replay is None else replay.own * step,
            pause=0.0 if use is None else pause_share(use),
        )
        measured = self._measured(costs, operations)
        costs = replace(costs, contended=contended_seconds(measured))
        warm = warm_share(measured, self._own_device_share())
        self.report = fit_cold_run(replace(measured, costs=costs, warm=warm))
        subject.close()

    def _measured(
        self, costs: Costs, operations: tuple[OperationTime, ...], interrupted: str = ""
    ) -> AnalysisReport:
        subject = self._subject
        notes = (*self._slow_start_notes(), *subject.notes)
        if self._skipped:
            notes += (
                f"not measured, because the time was up: {', '.join(dict.fromkeys(self._skipped))}."
                " Give more --seconds.",
            )
        return AnalysisReport(
            setup=replace(subject.setup, accelerator=self._device.name),
            costs=costs,
            phases=tuple(self._phases),
            operations=operations,
            batch_times=tuple(subject.batch_times() or self._batch_gaps),
            waits=tuple(self._waits),
            device_reads=self._device_reads,
            made=time.strftime("%Y-%m-%d %H:%M:%S"),
            machine=f"{plural(config.cores(), 'core')}, {config.show_size(config.memory())}",
            host=socket.gethostname(),
            notes=notes,
            workers_use=self._workers_use,
            machine_use=merged(self._uses),
            asked_seconds=self._whole,
            interrupted=interrupted,
        )

    def _sweep(self) -> dict[int, float]:
        """Samples per second by number of workers, as far as the time allows."""
        setup = self._subject.setup
        together = setup.batch * _seconds(self._rate("prep"))
        counts, left = [], self._left()
        # The largest number first: whether more workers help is what matters most.
        for count in sorted(worker_counts(setup, self._workers_use), reverse=True):
            # Every number of workers fills its queue, and is then timed for two batches of each.
            pieces = setup.ahead_with(count) + 1 + 2 * count
            needed = pieces * together * max(1.0, setup.workers / count)
            if needed <= max(left if count > setup.workers else left / 2, SLACK):
                counts.append(count)
                left -= needed
            else:
                self._skipped.append(plural(count, "worker"))
        if not counts:
            return {}
        self._tell(f"the loader alone: {', '.join(map(str, sorted(counts)))} workers")
        rates = sweep_workers(self._subject, sorted(counts), self._part, self._clock)
        rates.setdefault(setup.workers, self._rate("prep"))
        return rates

    def _slow_start_notes(self) -> Iterator[str]:
        """A note if epochs begin with a long wait, which dominates short epochs."""
        setup = self._subject.setup
        epoch = setup.samples * _seconds(self._rate("as it is"))
        if self._epoch_starts and epoch:
            yield from slow_start(setup, median(self._epoch_starts), epoch)

    # Phases with the training loop.

    def _track(self, name: PhaseName, batches: Iterator[Any]) -> Track:
        self._tracks[name] = Track(name, batches, self._timer(name))
        return self._tracks[name]

    def _replay_turn(self) -> Iterator[Any]:
        batch = self._fresh
        if batch is None:  # the loader had only a few batches
            self._subject.choose_samples(self._part)
            some = self._subject.cached()
            batch = self._fresh = next(some)
            _close(some)
        replay = self._track("replay", self._replay(self._device.to_device(batch)))
        yield from self._turn(replay)

    def _turn(self, track: Track) -> Iterator[Any]:
        """One turn of a phase in the training loop."""
        if track.ended or isinstance(track.batches, _Closed):
            return
        name, timer = track.name, track.timer
        if timer.seen:
            self._resume(track)
        if name == "replay":
            self._settle()
        self._tell(f"in the training loop: {name}")
        before = self._machine.snapshot() if self._machine else None
        yield from self._in_loop(track)
        if before is not None and self._machine is not None:
            after = self._machine.snapshot()
            self._note_use(before, after, name)

    def _note_use(self, before: MachineCounters, after: MachineCounters, phase: str) -> None:
        assert self._machine is not None
        cores, spare = self._machine.cores, self._machine.spare
        self._uses.append(use_between(before, after, phase, cores, spare))

    def _resume(self, track: Track) -> None:
        """Empty a queue that filled up meanwhile, unless it is full while the loop runs too."""
        if track.name != "replay" and self._waiting(track.name) > WAITED:
            for _ in range(self._subject.setup.ahead):
                if next(track.batches, None) is None:
                    break
        track.timer.next_turn(WARM_UP_AGAIN)

    def _settle(self) -> None:
        """Wait until the loader of the phase before has filled its queue, and stands still."""
        if self._machine is None:
            return
        until = self._clock() + self._part
        while self._clock() < until:
            before = self._machine.job_cpu()
            self._sleep(QUIET_LOOK)
            if self._machine.job_cpu() - before <= QUIET * QUIET_LOOK:
                return

    def _in_loop(self, track: Track) -> Iterator[Any]:
        name, timer, batches = track.name, track.timer, track.batches
        every = AGREE_EVERY if self._subject.setup.world > 1 else 1
        last = self._clock()
        while True:
            asked = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                track.ended = True
                break
            if timer.counts_next(self._clock()):
                # Work queued on the accelerator before must not count.
                self._device.sync()
            now = self._clock()
            # The start of an epoch is not part of the rate: it has a note of its own.
            begins = name == "as it is" and getattr(batches, "begins", False)
            timer.step(now, now - asked if begins else 0.0, now - asked, asked - last)
            if begins and timer.seen > 1:
                self._epoch_starts.append(now - asked)
            if timer.seen <= MOST_WAITS:
                self._waits.append(Wait(asked - self._began, name, now - asked, asked - last))
            last = now
            # All ranks are at the same step, so all of them ask and all get the same answer.
            done = timer.done or self._left() <= 0
            if timer.seen % every == 0 and self._device.agree(done):
                self._device.sync()
                timer.end(self._clock())
                if name == "as it is":
                    self._fresh = batch  # the loop has not seen it, so it has not changed it
                break
            self._handed_out += 1
            self.steps += 1
            yield batch
            del batch

    def _replay(self, batch: Any) -> Iterator[Any]:
        while True:
            yield self._device.replayed(batch)

    def _timer(self, name: PhaseName) -> PhaseTimer:
        setup = self._subject.setup
        ahead = 2 if name == "replay" else setup.ahead + 2
        warm_up = WARM_UP_AS_IT_IS if name == "as it is" else ahead
        period = 1 if name == "replay" else max(1, setup.workers)
        seconds = self._whole * LOOP_SHARE / (4 * ROUNDS)
        if name == "prep":
            seconds = self._part
        return PhaseTimer(
            name,
            setup.batch,
            warm_up,
            seconds,
            period=period,
            warm_up_seconds=WARM_UP_SHARE * self._whole,
        )

    # Phases without the training loop.

    def _drain(self, name: PhaseName, batches: Iterator[Any], *, keep: bool = True) -> Phase:
        """Take batches as fast as they come. ``keep``: add the phase to the report."""
        self._tell(f"the loader alone: {name}")
        setup, timer = self._subject.setup, self._timer(name)
        moments = []
        # In a crew the main thread of a process waits for messages while the others work, and only
        # the process itself could tell their waits for the GIL from those for other locks.
        watched = keep and setup.workers and setup.kind != "crew" and self._machine is not None
        watch = WorkerWatch(threads=not setup.own_process, others=self._others) if watched else None
        before = self._machine.snapshot() if self._machine and keep else None
        with watch or nullcontext():
            while not timer.done and (self._left(overrun=True) > 0 or not timer.steps):
                next(batches)
                now = self._clock()
                moments.append(now)
                timer.step(now)
        if keep:
            self._batch_gaps = [after - before for before, after in pairwise(moments)]
            self._phases.append(timer.phase())
        if before is not None and self._machine is not None:
            after = self._machine.snapshot()
            self._note_use(before, after, name)
        if watch is not None:
            self._workers_use = watch.use(places=self._subject.waiting_places())
        return timer.phase()

    def _measure_storage(self, threads: int) -> tuple[float, float, float]:
        """Bytes per second of storage, and the wait and the CPU seconds of one reader per sample.

        All are 0 if reads cannot be measured.
        """
        alone = self._time_reads("storage", 1, cold=True)
        many = self._time_reads("storage", max(READERS, 2 * threads), cold=True)
        size = self._subject.setup.sample_bytes
        if alone is None or many is None:
            return 0.0, 0.0, 0.0
        if not (size and alone.bytes_per_second and many.bytes_per_second):
            return 0.0, 0.0, 0.0
        took = size / alone.bytes_per_second
        cpu = 0.0
        if not self._subject.prep_includes_reading:
            cpu = min(took, size * alone.cpu_per_byte)
        storage = storage_speed(many, size / max(1e-9, took - cpu))
        rate = many.phase.rate.times(storage / many.bytes_per_second)
        self._phases.append(replace(many.phase, rate=rate))
        return storage, took - cpu, cpu

    def _measure_delays(
        self, wait: float, reading: float, one_worker: float
    ) -> tuple[Curve, float]:
        """The loss of a worker by length of its wait, and its CPU seconds to fetch a sample."""
        subject = self._subject
        needed = self._part + 6 * subject.setup.batch * _seconds(one_worker)
        if not wait or not self._fits("losses after waits", needed):
            return (), reading
        self._tell("the loader alone: with delayed reads")
        after_wait, fetched = wait_losses(
            partial(subject.cached, min(1, subject.setup.workers)),
            wait,
            batch=subject.setup.batch,
            fetches=not subject.prep_includes_reading,
            seconds=self._part,
            clock=self._clock,
            sleep=self._sleep,
        )
        if fetched is not None:
            # If preparing takes long, this is a small difference of large numbers. So keep it close
            # to the CPU time of a thread that only reads.
            estimate = fetched - wait - between(after_wait, wait)
            reading = max(LEAST_READING * reading, min(MOST_READING * reading, estimate))
        return after_wait, reading

    def _time_reads(self, name: PhaseName, threads: int, *, cold: bool) -> ReadSpeed | None:
        reading = self._subject.reading(threads, cold=cold)
        if reading is None:
            return None
        self._tell(f"reads: {name}, {threads} at a time")
        size = max(1.0, self._subject.setup.sample_bytes)
        limit = self._part / 2
        timer = PhaseTimer(name, 1, 2 * threads + 2, limit, min_steps=64, period=threads)
        try:
            return time_reads(reading, timer, size, self._clock, self._cpu)
        finally:
            _close(reading)

    def _measure_refurbish(self, slower: float) -> tuple[float | None, float | None]:
        """``prep`` with refurbish, of fresh samples and of kept ones."""
        if self._subject.setup.of_torch:  # it has no place for refurbish
            return None, None
        if not self._fits("refurbish", self._batches_seconds(BATCHES)):
            return None, None
        refurbished = self._subject.with_refurbish()
        if refurbished is None:
            return None, None
        batches, fresh = refurbished
        self._tell("the loader alone: with refurbish")
        batch, began = self._subject.setup.batch, self._clock()
        try:
            for _ in range(max(1, fresh // 4)):
                next(batches)
            began = self._clock()
            left = max(1, fresh - fresh // 4)
            for _ in range(left):
                next(batches)
            # This is the time of all workers together; ``prep`` is that of one.
            miss = (self._clock() - began) / (left * batch) / slower
            timer = PhaseTimer("prep", batch, fresh + 2, self._part)
            while not timer.done:
                next(batches)
                timer.step(self._clock())
            hit = _seconds(timer.rate().value) / slower
        finally:
            _close(batches)
        return miss, hit

    def _measure_penstock(self, slower: float, present: float) -> float | None:
        """``prep`` with Penstock's loader in place of torch's; ``present`` is that of torch's.

        Where the difference is within the intervals, none is stated.
        """
        setup = self._subject.setup
        if setup.loader == "penstock.Loader":
            return None
        if not self._fits("Penstock's loader", self._batches_seconds(2 * setup.ahead + 4)):
            return None
        batches = self._subject.with_penstock()
        if batches is None:
            return None
        phase = self._drain("prep", batches, keep=False)
        _close(batches)
        prep = next(one for one in self._phases if one.name == "prep")
        if phase.rate.low <= prep.rate.high and prep.rate.low <= phase.rate.high:
            return present
        return _seconds(phase.rate.value) / slower

    def _batches_seconds(self, count: int) -> float:
        """Seconds that the loader takes to prepare ``count`` batches."""
        return count * self._subject.setup.batch * _seconds(self._rate("prep"))

    def _rate(self, name: PhaseName) -> float:
        return next((phase.rate.value for phase in self._phases if phase.name == name), 0.0)

    def _receive(self, batches: Iterator[Any]) -> float:
        """Seconds to receive a batch that is ready."""
        setup, times = self._subject.setup, []
        if setup.workers and self._batches_seconds(RECEIVED) <= self._left() / 2:
            for _ in range(RECEIVED):
                self._sleep(
                    min(1.0, (setup.ahead + 1) * setup.batch * _seconds(self._rate("prep")))
                )
                asked = self._clock()
                next(batches)
                times.append(self._clock() - asked)
        return min(times, default=0.0)

    def _device_share(self, bytes_before: int | None, handed_out_before: int) -> float | None:
        """Share of the bytes of the cold phase that came from the device; ``None`` if unknown."""
        bytes_now = device_bytes(child_processes())
        if not can_drop():
            return None
        return self._share_from_device(
            bytes_before, bytes_now, self._handed_out - handed_out_before
        )

    def _own_device_share(self) -> float | None:
        """The same of the run as it is."""
        return self._share_from_device(*self._own_reads)

    def _share_from_device(
        self, before: int | None, after: int | None, batches: int
    ) -> float | None:
        setup = self._subject.setup
        uncached = 1 - setup.cached_share(setup.cache)
        wanted = batches * setup.batch * uncached * setup.sample_bytes
        if before is None or after is None or wanted <= 0:
            return None
        return min(1.0, max(0, after - before) / wanted)


class Epochs(Iterator[Any]):
    """Batches of epoch after epoch; ``begins``: the last batch was the first of its epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        self.begins = False
        self._epoch = epoch
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        self.begins = self._batches is None
        for _ in range(2):
            if self._batches is None:
                self._batches = self._epoch()
            try:
                return next(self._batches)
            except StopIteration:
                self._batches, self.begins = None, True
        raise StopIteration

    def close(self) -> None:
        batches, self._batches = self._batches, None
        _close(batches)


class _Closed(Iterator[Any]):
    """Takes the place of batches that were closed."""

    def __next__(self) -> Any:
        raise StopIteration


OPERATIONS_SECONDS = 3.0
"""Most seconds in which operations are timed one by one."""


def slow_start(setup: Setup, wait: float, epoch: float) -> Iterator[str]:
    """A note if epochs of ``epoch`` seconds begin with a long ``wait`` for a batch, in seconds."""
    if wait <= SLOW_START * epoch:
        return
    what = f"every epoch began with a wait of {wait:.2f} s, before {epoch:.2f} s of steps"
    if not setup.of_torch or not setup.workers:
        yield f"{what}: no batch was ready."
    elif setup.persistent:
        yield f"{what}: workers had no batch ready."
    else:
        yield (
            f"{what}: workers are started again, and have no batch ready. "
            "Give the DataLoader persistent_workers=True."
        )


def _seconds(rate: float) -> float:
    """Seconds per sample; 0 for a rate of 0, which stands for a loop without any work."""
    return 1 / rate if rate > 0 else 0.0


def _close(batches: Iterator[Any] | None) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
