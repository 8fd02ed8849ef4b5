"""Decides which tiny-batches of a mini-batch the CPU prepares and which the device: pure policy.

This is FusionFlow's affinity scheduling. The tiny-batches of a mini-batch are sorted by bytes. CPU
workers take from the small end and the device from the large end. A learnt ``Threshold`` says who
gets the last ones. Events come in with their time; decisions go out. There is no clock, no I/O and
no randomness here, so the simulator in ``benchmarks/simulate/fusionflow.py`` runs this same code.

>>> cooperation = Cooperation(workers=2)
>>> cooperation.open(0, [30, 10, 20, 40])
>>> small, large = cooperation.take_cpu(0.0), cooperation.take_device(0.0)
>>> small.tiny, large.tiny
(1, 3)
>>> cooperation.done(small, 1.0), cooperation.done(small, 1.0)
(True, False)
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from penstock.errors import PipelineError, StateError

Part = Literal["whole", "decode", "device"]
"""Part of the work on a tiny-batch: all of it on the CPU, the CPU part of a device task (reading
the entropy-coded bits), or the device part."""

SharingMode = Literal["temporal", "spatial"]
"""``temporal``: the device prepares only while the training loop waits for a batch. ``spatial``: it
prepares beside the training step, on a stream of its own."""

BALANCED = 0.02
"""CPU and device count as equally busy where their ends differ by at most this share of the time of
the mini-batch. A tiny-batch is a larger share of any mini-batch with fewer than 50 of them."""

TURNS = 2
"""Changes of direction after which the threshold freezes: it went there, back and there again."""

WORTH, GAIN, PROBES, PROBE_AGAIN = 0.97, 0.03, 8, 100
"""The device takes part while the CPU's part of its tasks costs the CPU less than ``WORTH`` of what
the whole tasks would, and the device saves more than the share ``GAIN`` of all work: less is lost
when one of its tasks takes longer than expected. That is judged after ``PROBES`` of each, and tried
again after ``PROBE_AGAIN`` mini-batches."""

FIRST = 3
"""Small tiny-batches for the device at the beginning of a mini-batch at most, for each worker. The
others are needed at its end."""

PAUSE = 4
"""No task counts as longer than this number of times what the largest usually takes."""

EARLY = 2
"""The CPU decodes for the device while the device has work for less than this number of times what
decoding takes."""

TRIAL, SETTLING = 8, 2
"""Mini-batches of the trial of each sharing mode, and how many of them are not counted because they
were partly prepared in the other mode."""


@dataclass(slots=True)
class Threshold:
    """How many of the last tiny-batches are the device's alone: ``t``, learnt.

    A negative ``t`` keeps the last ``-t`` for the CPU. After each mini-batch ``t`` moves by one to
    the side that was idle at the end. If it swings to and fro, it freezes at the best value of the
    swing.

    >>> threshold = Threshold()
    >>> for seconds, cpu_last in ((5.0, True), (4.0, False), (5.0, True)):
    ...     threshold.learn(10, seconds, 1.0 if cpu_last else -1.0)
    >>> threshold.t, threshold.frozen
    (1, True)
    """

    t: int = 0
    frozen: bool = False
    _direction: int = 0
    _turns: int = 0
    _seconds: dict[int, list[float]] = field(default_factory=dict)

    def learn(self, tiny_batches: int, seconds: float, cpu_over_device: float) -> None:
        """Move after a mini-batch.

        ``seconds`` is its time, per byte if mini-batches differ. ``cpu_over_device`` is how much
        later the CPU ended than the device, as a share of the time of the mini-batch.
        """
        if self.frozen:
            return
        self._seconds.setdefault(self.t, []).append(seconds)
        if abs(cpu_over_device) <= BALANCED:
            return
        move = 1 if cpu_over_device > 0 else -1
        target = self.t + move
        if abs(target) > max(tiny_batches, abs(self.t)):
            return
        if move == -self._direction:
            self._turns += 1
            if self._turns == 1:
                # Values on the way here were no part of a swing.
                self._seconds = {self.t: self._seconds[self.t]}
        self._direction = move
        if self._turns == TURNS:
            self.frozen = True
            self.t = min(self._seconds, key=lambda t: (fmean(self._seconds[t]), abs(t), t))
        else:
            self.t = target

    def thaw(self) -> None:
        """Learn again, from the current value."""
        self.frozen = False
        self._direction = self._turns = 0
        self._seconds.clear()


@dataclass(slots=True)
class Sharing:
    """How training and preparation share the device, chosen by a short measured trial.

    Memory comes first: if the peaks of both do not fit together, the mode is temporal. Otherwise
    each mode is tried for ``TRIAL`` mini-batches and the faster one stays.

    >>> sharing = Sharing()
    >>> sharing.mode
    'temporal'
    >>> for _ in range(TRIAL):
    ...     sharing.record(0.30)
    >>> sharing.mode
    'spatial'
    >>> for _ in range(TRIAL):
    ...     sharing.record(0.25)
    >>> sharing.mode, sharing.decided
    ('spatial', True)
    >>> sharing.memory(prep_peak=6 << 30, training_peak=14 << 30, capacity=16 << 30)
    >>> sharing.mode
    'temporal'
    """

    mode: SharingMode = "temporal"
    decided: bool = False
    fits: bool = True
    _seconds: dict[SharingMode, list[float]] = field(
        default_factory=lambda: {"temporal": [], "spatial": []}
    )

    def memory(self, prep_peak: int, training_peak: int, capacity: int) -> None:
        """Check the memory condition. A change of its outcome restarts the trial."""
        fits = prep_peak + training_peak <= capacity
        if fits != self.fits:
            self.fits = fits
            self.retry()
        self.decided |= not fits

    def record(self, seconds: float) -> None:
        """Note the seconds from one mini-batch to the next in the current mode."""
        if self.decided:
            return
        self._seconds[self.mode].append(seconds)
        if len(self._seconds["temporal"]) < TRIAL:
            self.mode = "temporal"
        elif len(self._seconds["spatial"]) < TRIAL:
            self.mode = "spatial"
        else:
            temporal, spatial = (
                median(self._seconds[mode][SETTLING:]) for mode in ("temporal", "spatial")
            )
            # A tie goes to the mode that cannot slow the training step.
            self.mode = "spatial" if spatial < temporal else "temporal"
            self.decided = True

    def retry(self) -> None:
        """Try both modes again, for example because the training step changed."""
        self.mode = "temporal"
        self.decided = not self.fits
        self._seconds = {"temporal": [], "spatial": []}


class Assignment(NamedTuple):
    """One part of the work on one tiny-batch, handed out once. No two have the same ``number``."""

    batch: int
    tiny: int
    part: Part
    number: int


class CooperationCounts(NamedTuple):
    """Finished parts by kind, and how often a part was handed out again after a loss."""

    whole: int
    decode: int
    device: int
    again: int


@dataclass(slots=True)
class Worth:
    """Whether the device saves CPU time: compares its tasks' CPU part with whole tasks.

    >>> worth = Worth()
    >>> for _ in range(PROBES):
    ...     worth.learn("whole", 1.0, 100)
    ...     worth.learn("decode", 1.2, 100)
    >>> worth.positive
    False
    """

    positive: bool = True
    late: float = 0.0
    """Seconds that the device took at most longer than its speed says: tiny-batches of the same
    bytes differ in cost, and each costs the device some time however small it is."""
    _largest: int = 1
    _seconds: dict[str, float] = field(default_factory=dict)
    _bytes: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def learn(self, part: Part, seconds: float, nbytes: int, workers: int = 1) -> None:
        """Note the time of a part of a tiny-batch of ``nbytes`` bytes, beside ``workers``."""
        count = self._count[part] = self._count.get(part, 0) + 1
        if part == "device" and count == 1:
            return  # it may have compiled kernels
        nbytes = max(1, nbytes)
        rate = self.rate(part)
        if rate is not None:
            # A pause of the machine must not keep the device from work for ever.
            seconds = min(seconds, PAUSE * rate * max(nbytes, self._largest))
        self._largest = max(self._largest, nbytes)
        # Old ones fade, because caches fill and machines become busy. Many small ones must not
        # drive out the large ones, which cost less for each byte.
        fade = 1.0 - 0.02 * nbytes / self._largest
        self._seconds[part] = fade * self._seconds.get(part, 0.0) + seconds
        self._bytes[part] = fade * self._bytes.get(part, 0.0) + nbytes
        if part == "device":
            usual = self._seconds[part] / self._bytes[part]
            self.late = max(seconds - usual * nbytes, 0.995 * self.late)
        if min(self._count.get("whole", 0), self._count.get("decode", 0)) >= PROBES:
            decode, whole = (self._seconds[one] / self._bytes[one] for one in ("decode", "whole"))
            device = self.rate("device") or 0.0
            self.positive = decode < WORTH * whole and whole - decode > GAIN * workers * device

    @property
    def lacks_whole(self) -> bool:
        """Whether too few whole tasks were done to judge by."""
        counts = self._count
        return counts.get("whole", 0) < PROBES <= counts.get("decode", 0)

    def rate(self, part: Part) -> float | None:
        """Seconds for each byte of a part; ``None`` if not known yet."""
        return self._seconds[part] / self._bytes[part] if self._bytes.get(part) else None

    def probe(self) -> None:
        """Try again with a few tasks."""
        for known in (self._count, self._seconds, self._bytes):
            known.clear()
        self.late = 0.0
        self.positive = True


@dataclass(slots=True)
class _MiniBatch:
    """A mini-batch in preparation. ``waiting`` is sorted by bytes, then by position."""

    sizes: tuple[int, ...]
    waiting: list[tuple[int, int]]
    decoded: deque[int] = field(default_factory=deque)
    finished: set[int] = field(default_factory=set)
    by_device: set[int] = field(default_factory=set)
    """Tiny-batches that the device has finished."""
    began: float | None = None
    cpu_end: float | None = None
    device_end: float | None = None
    bytes: int = 0
    """Of the tiny-batches that are waiting."""
    smaller: int = 0
    """Tiny-batches that the device gets in place of larger ones, to begin earlier."""

    def __post_init__(self) -> None:
        self.bytes = sum(size for size, _ in self.waiting)

    def take(self, place: int) -> int:
        """Take the tiny-batch at a place of ``waiting``."""
        size, tiny = self.waiting.pop(place)
        self.bytes -= size
        return tiny

    def give_back(self, tiny: int) -> None:
        insort(self.waiting, (self.sizes[tiny], tiny))
        self.bytes += self.sizes[tiny]


class _ByteSeconds(NamedTuple):
    """Seconds for each byte of a tiny-batch, by the part of the work."""

    whole: float
    decode: float
    device: float


class Cooperation:
    """Hands out the tiny-batches of open mini-batches to CPU workers and to one device.

    - ``workers``: CPU workers; ``resize`` changes their number.
    - ``exact``: the CPU reads the entropy-coded bits of what the device prepares, as a task of its
      own. Without it the device needs no CPU.
    - ``device``: whether there is a device now.
    - ``most_begun``: mini-batches that may have rows on the device before they are handed out
      (``end``), apart from the oldest; this bounds its memory. ``None``: any number.
    - ``alone``: the device prepares all tiny-batches, and the CPU only its part of them. Who
      prepares a sample then never depends on time, as long as there is a device.
    - ``foresees``: the device takes no task that it would finish after the CPU could have done it,
      and none at all while it saves too little CPU time (``Worth``).

    Older mini-batches come first. ``take_cpu`` and ``take_device`` return ``None`` if there is
    nothing to do for the caller until the next event.
    """

    def __init__(
        self,
        workers: int,
        *,
        exact: bool = False,
        device: bool = True,
        most_begun: int | None = None,
        alone: bool = False,
        foresees: bool = False,
    ) -> None:
        if workers < 1:
            raise PipelineError(f"workers={workers}: at least one CPU worker must take part")
        self.workers = workers
        self.exact = exact
        self.alone = alone
        self.foresees = foresees and not alone
        self.threshold = Threshold()
        self.sharing = Sharing()
        self.worth = Worth()
        self._ended = 0
        self._device_free: float | None = None
        self._device = device
        self._most_begun = most_begun
        self._begun: set[int] = set()
        self._loop_waits = True
        self._open: dict[int, _MiniBatch] = {}
        self._running: dict[int, tuple[Assignment, float]] = {}
        self._number = 0
        self._ahead = 1
        self._starved = False
        self._last_end: float | None = None
        self._counts = {"whole": 0, "decode": 0, "device": 0}
        self._again = 0

    # What there is to do.

    def open(self, batch: int, sizes: Sequence[int]) -> None:
        """Add a mini-batch: the bytes of each of its tiny-batches."""
        if batch in self._open:
            raise PipelineError(f"mini-batch {batch} is open already")
        if not sizes or min(sizes) < 0:
            raise PipelineError(
                f"mini-batch {batch} needs the bytes of at least one tiny-batch, none negative; "
                f"got {list(sizes)}"
            )
        waiting = sorted((size, tiny) for tiny, size in enumerate(sizes))
        self._open[batch] = _MiniBatch(tuple(sizes), waiting)

    def left(self, batch: int) -> int:
        """Tiny-batches of a mini-batch that are not finished; 0 if it is complete."""
        opened = self._open.get(batch)
        return 0 if opened is None else len(opened.sizes) - len(opened.finished)

    @property
    def device(self) -> bool:
        """Whether the device takes part."""
        return self._device

    @property
    def ahead(self) -> int:
        """Tiny-batches that the CPU decodes before the device needs them (only with ``exact``)."""
        return self._ahead

    @property
    def counts(self) -> CooperationCounts:
        return CooperationCounts(**self._counts, again=self._again)

    # Who takes it.

    def take_cpu(self, now: float) -> Assignment | None:
        """Work for a CPU worker: what the device needs soon, else a whole tiny-batch."""
        rates = self._rates()
        measures = self.foresees and self.worth.lacks_whole
        most = self._ahead if rates is None else 2 * self.workers + 1
        if self._device and self.exact and self._staged() < most and not measures:
            for batch, opened in self._open.items():
                place = self._device_choice(batch, opened, now, rates)
                if place is not None and rates is not None:
                    place = self._soon(batch, opened, now, rates, place)
                if place is not None:
                    return self._hand_out(batch, opened, opened.take(place), "decode", now)
        for batch, opened in self._open.items():
            reserved = self._reserved()
            choice = self._device_choice(batch, opened, now, rates) if self.foresees else None
            if self.foresees and choice is None:
                reserved = 0  # what the device would not finish in time is not kept for it
            if len(opened.waiting) > reserved:
                # The small ones are kept for the end, where they fill the time of workers that
                # would be idle, unless the speed of a device is still to be learnt.
                last = len(opened.waiting) - 1
                large = self.foresees and (rates is not None or choice != last)
                return self._hand_out(
                    batch, opened, opened.take(last if large else 0), "whole", now
                )
        return None

    def _rates(self) -> _ByteSeconds | None:
        """The speeds of CPU and device, if they are to be used and known."""
        if not self.foresees:
            return None
        whole, device = self.worth.rate("whole"), self.worth.rate("device")
        decode = self.worth.rate("decode") if self.exact else 0.0
        if whole is None or device is None or decode is None:
            return None
        return _ByteSeconds(whole, decode, device)

    def _reserved(self) -> int:
        """How many of the last tiny-batches of a mini-batch are the device's alone."""
        if not self._device or (self.foresees and self.worth.lacks_whole):
            return 0
        if self.alone:
            return sys.maxsize
        reserved = max(0, self.threshold.t)
        rates = self._rates()
        if reserved and rates is not None and rates.device:
            # No more than it does while a CPU worker does one.
            reserved = min(reserved, int(rates.whole / rates.device))
        return reserved

    def take_device(self, now: float) -> Assignment | None:
        """Work for the device: the largest tiny-batch, decoded first if ``exact``."""
        if not self._device or (self.sharing.mode == "temporal" and not self._loop_waits):
            return None
        for batch, opened in self._open.items():
            if self.exact and opened.decoded:
                tiny = opened.decoded.popleft()
                self._starved = False
                # More than one is ready: the CPU was earlier than needed.
                if sum(len(one.decoded) for one in self._open.values()) > 1:
                    self._ahead = max(1, self._ahead - 1)
                return self._hand_out(batch, opened, tiny, "device", now)
            if not self.exact:
                place = self._device_choice(batch, opened, now, self._rates())
                if place is not None:
                    return self._hand_out(batch, opened, opened.take(place), "device", now)
        if self.exact and not self._starved and self._staged() >= self._ahead:
            # All that may be decoded ahead is still with CPU workers: too late for the device.
            self._starved = True
            self._ahead = min(self._ahead + 1, self.workers + 1)
        return None

    def _device_choice(
        self, batch: int, opened: _MiniBatch, now: float, rates: _ByteSeconds | None
    ) -> int | None:
        """The place in ``waiting`` of the tiny-batch that the device should take next, if any.

        The largest that the device finishes, by what is known of its speed, before the CPU would
        finish this mini-batch without it. A slow device must not hold the end of a mini-batch.
        """
        if not self._device_may_take(batch, opened):
            return None
        last = len(opened.waiting) - 1
        if rates is None:
            return last
        backlog = 0.0
        for one, since in self._running.values():
            if one.part != "whole":
                size = self._open[one.batch].sizes[one.tiny]
                done = now - since if one.part == "device" else 0.0
                backlog += max(0.0, rates.device * size - done)
        for other in self._open.values():
            backlog += rates.device * sum(other.sizes[tiny] for tiny in other.decoded)
        cpu = self._cpu_seconds(batch, now, rates)
        for place in range(last, -1, -1):
            size = opened.waiting[place][0]
            ends = max(backlog, rates.decode * size) + rates.device * size + self.worth.late
            if ends <= max(cpu, rates.whole * size):
                return place
        return None

    def _cpu_seconds(self, batch: int, now: float, rates: _ByteSeconds) -> float:
        """When the CPU would have finished a mini-batch if the device took no more of it."""
        seconds = 0.0
        for one, since in self._running.values():
            if one.part != "device" and one.batch <= batch:
                rate = rates.whole if one.part == "whole" else rates.decode
                seconds += max(0.0, rate * self._open[one.batch].sizes[one.tiny] - (now - since))
        waiting = sum(other.bytes for number, other in self._open.items() if number <= batch)
        return (seconds + rates.whole * waiting) / self.workers

    def _soon(
        self, batch: int, opened: _MiniBatch, now: float, rates: _ByteSeconds, place: int
    ) -> int | None:
        """``place``, or that of a smaller tiny-batch if the device would be idle before ``place``
        is decoded; ``None``: the device has enough to do.

        An idle device costs time only where the CPU can keep it busy to the end.
        """
        size = opened.waiting[place][0]
        idle = self._idle_at(now, rates)
        if idle > EARLY * rates.decode * size:
            return None  # later more is known of what the device has
        if rates.device * self.workers <= rates.decode or opened.smaller >= FIRST * self.workers:
            return place
        if (rates.decode + rates.device) * size > self._cpu_seconds(batch, now, rates) / 2:
            return place  # so large that it must begin now
        opened.smaller += rates.decode * size > idle
        while place > 0 and rates.decode * opened.waiting[place][0] > idle:
            place -= 1
        return place

    def _idle_at(self, now: float, rates: _ByteSeconds) -> float:
        """The seconds until the device has nothing to do."""
        idle, decoding = 0.0, []
        for one, since in self._running.values():
            size = self._open[one.batch].sizes[one.tiny]
            if one.part == "device":
                idle += max(0.0, rates.device * size - (now - since))
            elif one.part == "decode":
                decoding.append((rates.decode * size - (now - since), rates.device * size))
        for opened in self._open.values():
            idle += rates.device * sum(opened.sizes[tiny] for tiny in opened.decoded)
        for ready, seconds in sorted(decoding):
            if ready > idle:
                break
            idle += seconds
        return idle

    def _device_may_take(self, batch: int, opened: _MiniBatch) -> bool:
        # The oldest mini-batch always may have rows there: its last ones can be the device's alone.
        if self.foresees and not self.worth.positive:
            return False
        full = self._most_begun is not None and len(self._begun) >= self._most_begun
        if full and batch not in self._begun and batch != next(iter(self._open)):
            return False
        return len(opened.waiting) > (0 if self.alone else max(0, -self.threshold.t))

    def _staged(self) -> int:
        """Tiny-batches on their way to the device: being decoded, or decoded."""
        decoding = sum(one.part == "decode" for one, _ in self._running.values())
        return decoding + sum(len(opened.decoded) for opened in self._open.values())

    def _hand_out(
        self, batch: int, opened: _MiniBatch, tiny: int, part: Part, now: float
    ) -> Assignment:
        if opened.began is None:
            opened.began = now
        if part != "whole":
            self._begun.add(batch)
        assignment = Assignment(batch, tiny, part, self._number)
        self._running[self._number] = assignment, now
        self._number += 1
        return assignment

    # What became of it.

    def done(
        self,
        assignment: Assignment,
        now: float,
        *,
        whole: bool = False,
        seconds: float | None = None,
    ) -> bool:
        """A part is finished. Returns false if the caller must drop the result: the part was lost
        meanwhile, and handed out again.

        ``whole``: the CPU did not only its part of a device task, but all of it. ``seconds``: the
        time it took, if not all since it was handed out.
        """
        found = self._running.pop(assignment.number, None)
        if found is None:
            return False
        batch, tiny, part, _ = assignment
        opened = self._open[batch]
        if whole:
            part = "whole"
        self._counts[part] += 1
        if part == "device":
            opened.device_end = now
            opened.by_device.add(tiny)
            # The device works on one task after the other.
            began = found[1] if self._device_free is None else max(found[1], self._device_free)
            self._device_free = now
            self.worth.learn("device", now - began, opened.sizes[tiny], self.workers)
        else:
            opened.cpu_end = now
            if not whole:
                taken = now - found[1] if seconds is None else seconds
                self.worth.learn(part, taken, opened.sizes[tiny], self.workers)
        if part == "decode":
            if self._device:
                opened.decoded.append(tiny)
            else:
                opened.give_back(tiny)
            return True
        opened.finished.add(tiny)
        if len(opened.finished) == len(opened.sizes):
            del self._open[batch]
            self._learn(opened, now)
        return True

    def lost(self, assignment: Assignment) -> None:
        """The worker that had it died: hand it out again."""
        if self._running.pop(assignment.number, None) is not None:
            self._open[assignment.batch].give_back(assignment.tiny)
            self._again += 1

    def put_back(self, assignment: Assignment) -> None:
        """The worker that took it cannot begin yet."""
        if self._running.pop(assignment.number, None) is not None:
            opened = self._open[assignment.batch]
            if assignment.part == "device":
                opened.decoded.appendleft(assignment.tiny)
            else:
                opened.give_back(assignment.tiny)

    def drop(self, batch: int) -> None:
        """A mini-batch is not wanted any more."""
        self._open.pop(batch, None)
        self._begun.discard(batch)
        for number in [n for n, (one, _) in self._running.items() if one.batch == batch]:
            del self._running[number]

    def end(self, batch: int) -> None:
        """A complete mini-batch was handed out."""
        self._begun.discard(batch)

    def _learn(self, opened: _MiniBatch, now: float) -> None:
        began = now if opened.began is None else opened.began
        last_end, self._last_end = self._last_end, now
        if not self._device or self.alone:
            return
        if self.foresees and not self.worth.positive:
            self._ended += 1
            if self._ended % PROBE_AGAIN == 0:
                self.worth.probe()
            return
        cpu_end = began if opened.cpu_end is None else opened.cpu_end
        device_end = began if opened.device_end is None else opened.device_end
        # Mini-batches overlap, so the time of one starts where the one before it ended.
        seconds = now - (began if last_end is None else max(began, last_end))
        whole = now - began
        gap = (cpu_end - device_end) / whole if whole > 0 else 0.0
        self.threshold.learn(len(opened.sizes), seconds / max(1, sum(opened.sizes)), gap)

    # What changes around it.

    def loop_waits(self, waits: bool) -> None:
        """The training loop began or ended to wait for a batch."""
        self._loop_waits = waits

    def resize(self, workers: int) -> None:
        """The number of CPU workers changed."""
        if workers < 1:
            raise PipelineError(f"workers={workers}: at least one CPU worker must take part")
        if workers != self.workers:
            self.workers = workers
            self._ahead = min(self._ahead, workers + 1)
            self.threshold.thaw()

    def device_lost(self, *, finished_too: bool = False) -> dict[int, set[int]]:
        """The device is gone or does not answer: the CPU prepares what it had.

        ``finished_too``: also what it has finished of mini-batches that are not complete. Returns
        that, by mini-batch.
        """
        again: dict[int, set[int]] = {}
        if not self._device:
            return again
        self._device = False
        for assignment, _ in list(self._running.values()):
            if assignment.part == "device":
                self.lost(assignment)
        for opened in self._open.values():
            while opened.decoded:
                opened.give_back(opened.decoded.popleft())
                self._again += 1
        for batch, opened in self._open.items():
            if finished_too and opened.by_device:
                again[batch], opened.by_device = opened.by_device, set()
                opened.finished -= again[batch]
                for tiny in again[batch]:
                    opened.give_back(tiny)
                    self._again += 1
        return again

    def device_back(self) -> None:
        """There is a device again, or for the first time."""
        if not self._device:
            self._device = True
            self._ahead = 1
            self._starved = False
            self.threshold.thaw()

    def check_device(self, now: float, patience: float) -> bool:
        """Whether the device answers. If one of its tasks is older than ``patience`` seconds, the
        device is lost."""
        taken = (at for one, at in self._running.values() if one.part == "device")
        if self._device and now - min(taken, default=now) > patience:
            self.device_lost()
        return self._device

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint. Plain numbers and words."""
        return {
            "t": self.threshold.t,
            "frozen": self.threshold.frozen,
            "mode": self.sharing.mode,
            "decided": self.sharing.decided,
            "ahead": self._ahead,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what ``state_dict`` returned, before any mini-batch is open."""
        if self._open:
            raise StateError("a state can be loaded only while no mini-batch is open")
        t, frozen, mode = state.get("t"), state.get("frozen"), state.get("mode")
        decided, ahead = state.get("decided"), state.get("ahead")
        if (
            type(t) is not int
            or type(frozen) is not bool
            or mode not in ("temporal", "spatial")
            or type(decided) is not bool
            or type(ahead) is not int
            or ahead < 1
        ):
            raise StateError(
                "the state of CPU and device in this checkpoint is damaged or of another version: "
                f"{dict(state)!r}. Start without it: it affects speed only."
            )
        self.threshold = Threshold(t, frozen)
        self.sharing = Sharing(mode, decided)
        self._ahead = min(ahead, self.workers + 1)
