"""Runs the phases: the script's own loop is given batches that are replayed, cached or cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from penstock import config
from penstock.diagnose.analyze.course import Course
from penstock.diagnose.analyze.delayed_reads import losses
from penstock.diagnose.analyze.flow import between
from penstock.diagnose.analyze.model import fitted
from penstock.diagnose.analyze.pagecache import can_drop, device_bytes
from penstock.diagnose.analyze.reading import Reads, of_storage, timed
from penstock.diagnose.analyze.report import Costs, Curve, Phase, PhaseName, Report, Wait
from penstock.diagnose.analyze.subject import Device, Host, Subject, children
from penstock.diagnose.analyze.worker_sweep import rates_of, worth_trying

PARTS = 10
"""The time is for so many phases; most are exact long before theirs is over."""

LEAST_AS_IT_IS = 8
"""Steps of the script as it is, before anything is replaced: they load and compile what is needed,
and show what the loop does with its batches."""

AGREE_EVERY = 4
"""After so many steps ranks tell each other whether they have seen enough."""

READERS = 4
"""Threads that find out what storage gives, at least: fewer leave it idle between two requests."""

MOST_WAITS = 2_000

SLOW_START = 0.05
"""The part of an epoch from which on its first wait is worth a remark."""

LEAST_READING, MOST_READING = 0.5, 1.25
"""What reading may cost a worker, as parts of what it costs one who does nothing else."""

RECEIVED = 3
"""Batches that are waited for until they are there, to see what receiving one takes."""


class Probe:
    """One analysis. ``run`` gives the loop its batches, and at its end there is a ``report``."""

    def __init__(
        self,
        subject: Subject,
        device: Device | None = None,
        *,
        seconds: float = 60.0,
        told: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._sleep = sleep
        self._cpu = cpu
        self.report: Report | None = None
        self._subject = subject
        self._device = device or Host()
        self._seconds = seconds / PARTS
        self._told = told or (lambda _: None)
        self._clock = clock
        self._phases: list[Phase] = []
        self._waits: list[Wait] = []
        self._began = clock()
        self._gaps: list[float] = []
        self._starts: list[float] = []
        self._handed = 0

    def run(self, as_it_is: Iterator[Any]) -> Iterator[Any]:
        """What the loop is given instead of its loader's batches."""
        subject = self._subject
        yield from self._in_loop("as it is", as_it_is)
        _close(as_it_is)
        self._told("reading samples that are used from here on")
        subject.learn()
        cached = subject.cached()
        yield from self._in_loop("cached", cached)
        self._drained("prep", cached)
        sample, shuttle = self._received(cached)
        _close(cached)
        yield from self._in_loop("replay", self._replayed(self._device.to_device(sample)))
        copy = self._device.copying(sample) / max(1, subject.setup.batch)
        cold, device_reads = subject.cold(), None
        if cold is not None:
            before = self._read_so_far()
            yield from self._in_loop("cold", cold)
            device_reads = self._came_from_device(before)
            _close(cold)
        self._finish(shuttle, copy, device_reads)

    def _finish(self, shuttle: float, copy: float, device_reads: float | None) -> None:
        """Measure what needs no loop, and put all of it together."""
        subject = self._subject
        workers = subject.setup.workers
        numbers = worth_trying(subject.setup)
        if numbers:
            self._told(f"measuring the loader alone: {', '.join(map(str, numbers))} workers")
        rates = rates_of(subject, numbers, self._seconds, self._clock)
        alone = rates[1] if workers else self._rate("prep")
        scaling = {number: rate * _seconds(alone) for number, rate in rates.items()}
        storage, latency, reading = self._reading(max(1, workers))
        after_wait, reading = self._waiting(latency, reading)
        cached = self._read("cache", max(1, workers), cold=False)
        if cached is not None:
            self._phases.append(cached.phase)
        slower = _seconds(scaling[workers]) if workers else 1.0
        miss, hit = self._reuse(slower)
        penstock = self._replaced(slower)
        self._told("timing operations one by one")
        operations = tuple(subject.operations())
        batch = subject.setup.batch
        setup = replace(subject.setup, accelerator=self._device.name)
        spread = subject.batch_times()
        costs = Costs(
            compute=_seconds(self._rate("replay")),
            prep=_seconds(alone),
            scaling=scaling or {1: 1.0},
            storage=storage,
            cache=0.0 if cached is None else cached.rate,
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
        found = Report(
            setup=setup,
            costs=costs,
            phases=tuple(self._phases),
            operations=operations,
            batch_times=tuple(spread or self._gaps),
            waits=tuple(self._waits),
            device_reads=device_reads,
            made=time.strftime("%Y-%m-%d %H:%M:%S"),
            machine=f"{config.cores()} cores, {config.show_size(config.memory())}",
            notes=(*self._slow_starts(), *subject.notes),
        )
        self.report = fitted(found)
        subject.close()

    def _slow_starts(self) -> Iterator[str]:
        """Epochs that begin with a wait: short ones consist of little else."""
        setup = self._subject.setup
        epoch = setup.samples * _seconds(self._rate("as it is"))
        if not self._starts or not epoch:
            return
        start = median(self._starts)
        if start > SLOW_START * epoch:
            remedy = (
                " Give the DataLoader persistent_workers=True." if "torch" in setup.loader else ""
            )
            yield (
                f"every epoch began with a wait of {start:.2f} s, for {epoch:.2f} s of steps: "
                f"workers are started anew, and have nothing ready.{remedy}"
            )

    # In the loop.

    def _in_loop(self, name: PhaseName, batches: Iterator[Any]) -> Iterator[Any]:
        self._told(f"measuring in the training loop: {name}")
        course = self._course(name)
        last = self._clock()
        while True:
            asked = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                break
            if course.seen + 1 == course.warm_up:
                # What the accelerator was told before must not fall into what is counted.
                self._device.sync()
            now = self._clock()
            # The start of an epoch is a cost of its own, and told as such.
            begins = name == "as it is" and getattr(batches, "begins", False)
            course.step(now, now - asked if begins else 0.0)
            if begins and course.seen > 1:
                self._starts.append(now - asked)
            if len(self._waits) < MOST_WAITS:
                self._waits.append(Wait(asked - self._began, name, now - asked, asked - last))
            last = now
            # All ranks are at the same step, so all of them ask and all get the same answer.
            over = course.seen % AGREE_EVERY == 0 and self._device.agree(course.over)
            if over:
                self._device.sync()
                course.end(self._clock())
                break
            self._handed += 1
            yield batch
            del batch
        self._phases.append(course.phase())

    def _replayed(self, batch: Any) -> Iterator[Any]:
        while True:
            yield self._device.again(batch)

    def _course(self, name: PhaseName) -> Course:
        setup = self._subject.setup
        ahead = 2 if name == "replay" else setup.ahead + 2
        warm_up = LEAST_AS_IT_IS if name == "as it is" else ahead
        period = 1 if name == "replay" else max(1, setup.workers)
        return Course(name, setup.batch, warm_up, self._seconds, period=period)

    # Without the loop.

    def _drained(self, name: PhaseName, batches: Iterator[Any], *, keep: bool = True) -> Phase:
        """How fast they come when nobody does anything with them."""
        self._told(f"measuring the loader alone: {name}")
        course = self._course(name)
        moments = []
        while not course.over:
            next(batches)
            now = self._clock()
            moments.append(now)
            course.step(now)
        if keep:
            self._gaps = [after - before for before, after in pairwise(moments)]
            self._phases.append(course.phase())
        return course.phase()

    def _reading(self, threads: int) -> tuple[float, float, float]:
        """Bytes a second from storage; what one reader waits for one sample, and what of that it
        works."""
        alone = self._read("storage", 1, cold=True)
        many = self._read("storage", max(READERS, 2 * threads), cold=True)
        size = self._subject.setup.sample_bytes
        if alone is None or many is None or not (size and alone.rate and many.rate):
            return 0.0, 0.0, 0.0
        took = size / alone.rate
        each = 0.0 if self._subject.reads_to_prepare else min(took, size * alone.worked)
        storage = of_storage(many, size / max(1e-9, took - each))
        faster = many.phase.rate.times(storage / many.rate)
        self._phases.append(replace(many.phase, rate=faster))
        return storage, took - each, each

    def _waiting(self, wait: float, reading: float) -> tuple[Curve, float]:
        """What a worker loses by waiting, and what fetching a sample costs it beside that."""
        subject = self._subject
        if not wait:
            return (), reading
        self._told("measuring the loader alone: with data that comes late")
        after_wait, fetched = losses(
            partial(subject.cached, min(1, subject.setup.workers)),
            wait,
            batch=subject.setup.batch,
            fetches=not subject.reads_to_prepare,
            seconds=self._seconds,
            clock=self._clock,
            sleep=self._sleep,
        )
        if fetched is not None:
            # Where preparing takes long this is a small difference of large numbers: not too far
            # from what reading alone has taken of a core.
            found = fetched - wait - between(after_wait, wait)
            reading = max(LEAST_READING * reading, min(MOST_READING * reading, found))
        return after_wait, reading

    def _read(self, name: PhaseName, threads: int, *, cold: bool) -> Reads | None:
        reading = self._subject.reading(threads, cold=cold)
        if reading is None:
            return None
        self._told(f"measuring reads: {name}, {threads} at a time")
        size = max(1.0, self._subject.setup.sample_bytes)
        course = Course(name, 1, 2 * threads + 2, self._seconds / 4, least=64, period=threads)
        try:
            return timed(reading, course, size, self._clock, self._cpu)
        finally:
            _close(reading)

    def _reuse(self, slower: float) -> tuple[float | None, float | None]:
        """``prep`` with refurbish: of fresh samples, and of kept ones."""
        made = self._subject.reused()
        if made is None:
            return None, None
        batches, fresh = made
        self._told("measuring the loader alone: with refurbish")
        batch, began = self._subject.setup.batch, self._clock()
        try:
            for _ in range(max(1, fresh // 4)):
                next(batches)
            began = self._clock()
            left = max(1, fresh - fresh // 4)
            for _ in range(left):
                next(batches)
            # All workers together; ``prep`` is what one would take.
            miss = (self._clock() - began) / (left * batch) / slower
            course = Course("prep", batch, fresh + 2, self._seconds)
            while not course.over:
                next(batches)
                course.step(self._clock())
            hit = _seconds(course.rate().value) / slower
        finally:
            _close(batches)
        return miss, hit

    def _replaced(self, slower: float) -> float | None:
        """``prep`` with Penstock's loader in the place of torch's."""
        batches = self._subject.replaced()
        if batches is None:
            return None
        found = self._drained("prep", batches, keep=False)
        _close(batches)
        return _seconds(found.rate.value) / slower

    # What follows.

    def _rate(self, name: PhaseName) -> float:
        return next(one.rate.value for one in self._phases if one.name == name)

    def _received(self, batches: Iterator[Any]) -> tuple[Any, float]:
        """A batch, and the seconds that it takes the loop to receive one that is there."""
        setup, found = self._subject.setup, []
        batch = next(batches)
        if setup.workers:
            for _ in range(RECEIVED):
                self._sleep(
                    min(1.0, (setup.ahead + 1) * setup.batch * _seconds(self._rate("prep")))
                )
                asked = self._clock()
                batch = next(batches)
                found.append(self._clock() - asked)
        return batch, min(found, default=0.0)

    def _read_so_far(self) -> tuple[int | None, int]:
        return device_bytes(children()), self._handed

    def _came_from_device(self, before: tuple[int | None, int]) -> float | None:
        was, handed = before
        now = device_bytes(children())
        setup = self._subject.setup
        fetched = (self._handed - handed) * setup.batch * (1 - setup.held(setup.cache))
        wanted = fetched * setup.sample_bytes
        if not can_drop() or was is None or now is None or wanted <= 0:
            return None
        return min(1.0, (now - was) / wanted)


class Epochs(Iterator[Any]):
    """Epoch after epoch of a loader; ``begins`` says that the last batch was the first of one."""

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
    """Of a sample; none where a loop does nothing at all."""
    return 1 / rate if rate > 0 else 0.0


def _close(batches: Iterator[Any] | None) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
