"""Runs the phases of an analysis: the training loop gets replayed, cached or cold batches."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from penstock import config
from penstock.diagnose.analyze.delayed_reads import wait_losses
from penstock.diagnose.analyze.flow import between
from penstock.diagnose.analyze.model import fit_cold_run
from penstock.diagnose.analyze.phase_timer import PhaseTimer
from penstock.diagnose.analyze.reading import ReadSpeed, storage_speed, time_reads
from penstock.diagnose.analyze.report import AnalysisReport, Costs, Curve, Phase, PhaseName, Wait
from penstock.diagnose.analyze.sample_files import can_drop, child_processes, device_bytes
from penstock.diagnose.analyze.subject import Host, StepDevice, Subject
from penstock.diagnose.analyze.worker_sweep import sweep_workers, worker_counts

PHASES = 10
"""The time limit of one phase is the total time divided by this; most are exact sooner."""

WARM_UP_AS_IT_IS = 8
"""First steps of the unchanged script that are not counted: they load and compile code."""

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


class PhaseRunner:
    """One analysis. ``run`` yields batches for the training loop, and sets ``report`` at its end.

    ``seconds`` is the time for all phases, ``on_progress`` is called with a line about each.
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
    ) -> None:
        self._sleep = sleep
        self._cpu = cpu
        self.report: AnalysisReport | None = None
        self._subject = subject
        self._device = device or Host()
        self._seconds = seconds / PHASES
        self._on_progress = on_progress or (lambda _: None)
        self._clock = clock
        self._phases: list[Phase] = []
        self._waits: list[Wait] = []
        self._began = clock()
        self._batch_gaps: list[float] = []
        self._epoch_starts: list[float] = []
        self._handed_out = 0

    def run(self, as_it_is: Iterator[Any]) -> Iterator[Any]:
        """Batches for the training loop; ``as_it_is`` are those of its own loader."""
        subject = self._subject
        yield from self._in_loop("as it is", as_it_is)
        _close(as_it_is)
        self._on_progress("reading the samples for the next phases")
        subject.choose_samples()
        cached = subject.cached()
        yield from self._in_loop("cached", cached)
        self._drain("prep", cached)
        batch, shuttle = self._receive(cached)
        _close(cached)
        yield from self._in_loop("replay", self._replay(self._device.to_device(batch)))
        copy = self._device.copy_seconds(batch) / max(1, subject.setup.batch)
        cold, device_reads = subject.cold(), None
        if cold is not None:
            before = device_bytes(child_processes()), self._handed_out
            yield from self._in_loop("cold", cold)
            device_reads = self._device_share(*before)
            _close(cold)
        self._finish(shuttle, copy, device_reads)

    def _finish(self, shuttle: float, copy: float, device_reads: float | None) -> None:
        """Measure everything that needs no training loop, and make the report."""
        subject = self._subject
        workers = subject.setup.workers
        counts = worker_counts(subject.setup)
        if counts:
            self._on_progress(f"measuring the loader alone: {', '.join(map(str, counts))} workers")
        rates = sweep_workers(subject, counts, self._seconds, self._clock)
        one_worker = rates[1] if workers else self._rate("prep")
        scaling = {count: rate * _seconds(one_worker) for count, rate in rates.items()}
        storage, latency, reading = self._measure_storage(max(1, workers))
        after_wait, reading = self._measure_delays(latency, reading)
        cached = self._time_reads("cache", max(1, workers), cold=False)
        if cached is not None:
            self._phases.append(cached.phase)
        # Seconds of all workers together, relative to those of one worker.
        slower = _seconds(scaling[workers]) if workers else 1.0
        miss, hit = self._measure_refurbish(slower)
        penstock = self._measure_penstock(slower)
        self._on_progress("timing operations one by one")
        operations = tuple(subject.operations())
        batch = subject.setup.batch
        setup = replace(subject.setup, accelerator=self._device.name)
        batch_times = subject.batch_times()
        costs = Costs(
            compute=_seconds(self._rate("replay")),
            prep=_seconds(one_worker),
            scaling=scaling or {1: 1.0},
            storage=storage,
            cache=0.0 if cached is None else cached.bytes_per_second,
            latency=latency,
            copy=copy,
            sizes=subject.sizes,
            shuttle=shuttle / batch,
            reading=reading,
            after_wait=after_wait,
            reuse_miss=miss,
            reuse_hit=hit,
            penstock=penstock,
        )
        measured = AnalysisReport(
            setup=setup,
            costs=costs,
            phases=tuple(self._phases),
            operations=operations,
            batch_times=tuple(batch_times or self._batch_gaps),
            waits=tuple(self._waits),
            device_reads=device_reads,
            made=time.strftime("%Y-%m-%d %H:%M:%S"),
            machine=f"{config.cores()} cores, {config.show_size(config.memory())}",
            host=socket.gethostname(),
            notes=(*self._slow_start_notes(), *subject.notes),
        )
        self.report = fit_cold_run(measured)
        subject.close()

    def _slow_start_notes(self) -> Iterator[str]:
        """A note if epochs begin with a long wait, which dominates short epochs."""
        setup = self._subject.setup
        epoch = setup.samples * _seconds(self._rate("as it is"))
        if not self._epoch_starts or not epoch:
            return
        start = median(self._epoch_starts)
        if start > SLOW_START * epoch:
            remedy = (
                " Give the DataLoader persistent_workers=True." if "torch" in setup.loader else ""
            )
            yield (
                f"every epoch began with a wait of {start:.2f} s, before {epoch:.2f} s of steps: "
                f"workers are started again, and have no batch ready.{remedy}"
            )

    # Phases with the training loop.

    def _in_loop(self, name: PhaseName, batches: Iterator[Any]) -> Iterator[Any]:
        self._on_progress(f"measuring in the training loop: {name}")
        timer = self._timer(name)
        last = self._clock()
        while True:
            asked = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                break
            if timer.seen + 1 == timer.warm_up:
                # Work queued on the accelerator before must not count.
                self._device.sync()
            now = self._clock()
            # The start of an epoch is not part of the rate: it has a note of its own.
            begins = name == "as it is" and getattr(batches, "begins", False)
            timer.step(now, now - asked if begins else 0.0)
            if begins and timer.seen > 1:
                self._epoch_starts.append(now - asked)
            if timer.seen <= MOST_WAITS:
                self._waits.append(Wait(asked - self._began, name, now - asked, asked - last))
            last = now
            # All ranks are at the same step, so all of them ask and all get the same answer.
            if timer.seen % AGREE_EVERY == 0 and self._device.agree(timer.done):
                self._device.sync()
                timer.end(self._clock())
                break
            self._handed_out += 1
            yield batch
            del batch
        self._phases.append(timer.phase())

    def _replay(self, batch: Any) -> Iterator[Any]:
        while True:
            yield self._device.replayed(batch)

    def _timer(self, name: PhaseName) -> PhaseTimer:
        setup = self._subject.setup
        ahead = 2 if name == "replay" else setup.ahead + 2
        warm_up = WARM_UP_AS_IT_IS if name == "as it is" else ahead
        period = 1 if name == "replay" else max(1, setup.workers)
        return PhaseTimer(name, setup.batch, warm_up, self._seconds, period=period)

    # Phases without the training loop.

    def _drain(self, name: PhaseName, batches: Iterator[Any], *, keep: bool = True) -> Phase:
        """Take batches as fast as they come. ``keep``: add the phase to the report."""
        self._on_progress(f"measuring the loader alone: {name}")
        timer = self._timer(name)
        moments = []
        while not timer.done:
            next(batches)
            now = self._clock()
            moments.append(now)
            timer.step(now)
        if keep:
            self._batch_gaps = [after - before for before, after in pairwise(moments)]
            self._phases.append(timer.phase())
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

    def _measure_delays(self, wait: float, reading: float) -> tuple[Curve, float]:
        """The loss of a worker by length of its wait, and its CPU seconds to fetch a sample."""
        subject = self._subject
        if not wait:
            return (), reading
        self._on_progress("measuring the loader alone: with delayed reads")
        after_wait, fetched = wait_losses(
            partial(subject.cached, min(1, subject.setup.workers)),
            wait,
            batch=subject.setup.batch,
            fetches=not subject.prep_includes_reading,
            seconds=self._seconds,
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
        self._on_progress(f"measuring reads: {name}, {threads} at a time")
        size = max(1.0, self._subject.setup.sample_bytes)
        limit = self._seconds / 4
        timer = PhaseTimer(name, 1, 2 * threads + 2, limit, min_steps=64, period=threads)
        try:
            return time_reads(reading, timer, size, self._clock, self._cpu)
        finally:
            _close(reading)

    def _measure_refurbish(self, slower: float) -> tuple[float | None, float | None]:
        """``prep`` with refurbish, of fresh samples and of kept ones."""
        refurbished = self._subject.with_refurbish()
        if refurbished is None:
            return None, None
        batches, fresh = refurbished
        self._on_progress("measuring the loader alone: with refurbish")
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
            timer = PhaseTimer("prep", batch, fresh + 2, self._seconds)
            while not timer.done:
                next(batches)
                timer.step(self._clock())
            hit = _seconds(timer.rate().value) / slower
        finally:
            _close(batches)
        return miss, hit

    def _measure_penstock(self, slower: float) -> float | None:
        """``prep`` with Penstock's loader in place of torch's."""
        batches = self._subject.with_penstock()
        if batches is None:
            return None
        phase = self._drain("prep", batches, keep=False)
        _close(batches)
        return _seconds(phase.rate.value) / slower

    def _rate(self, name: PhaseName) -> float:
        return next(phase.rate.value for phase in self._phases if phase.name == name)

    def _receive(self, batches: Iterator[Any]) -> tuple[Any, float]:
        """A batch, and the seconds it takes to receive one that is ready."""
        setup, times = self._subject.setup, []
        batch = next(batches)
        if setup.workers:
            for _ in range(RECEIVED):
                self._sleep(
                    min(1.0, (setup.ahead + 1) * setup.batch * _seconds(self._rate("prep")))
                )
                asked = self._clock()
                batch = next(batches)
                times.append(self._clock() - asked)
        return batch, min(times, default=0.0)

    def _device_share(self, bytes_before: int | None, handed_out_before: int) -> float | None:
        """Share of the bytes of the cold phase that came from the device; ``None`` if unknown."""
        bytes_now = device_bytes(child_processes())
        setup = self._subject.setup
        uncached = 1 - setup.cached_share(setup.cache)
        fetched = (self._handed_out - handed_out_before) * setup.batch * uncached
        wanted = fetched * setup.sample_bytes
        if not can_drop() or bytes_before is None or bytes_now is None or wanted <= 0:
            return None
        return min(1.0, (bytes_now - bytes_before) / wanted)


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


def _seconds(rate: float) -> float:
    """Seconds per sample; 0 for a rate of 0, which stands for a loop without any work."""
    return 1 / rate if rate > 0 else 0.0


def _close(batches: Iterator[Any] | None) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
