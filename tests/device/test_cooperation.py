"""Cooperation of CPU and device: exactly once, close to the best, and quick to settle."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.device.cooperation import (
    BALANCED,
    PROBES,
    SETTLING,
    TRIAL,
    Assignment,
    Cooperation,
    Sharing,
    Threshold,
    Worth,
)
from penstock.errors import PipelineError, StateError

DECODING = 0.3
"""The CPU part of a device task, as a share of the whole work on a CPU worker."""

sizes_of_tiny_batches = st.lists(st.integers(20, 400), min_size=1, max_size=64)
device_speeds = st.floats(-1.0, 1.301).map(lambda exponent: 10.0**exponent)
"""Speed of the device as a multiple of one CPU worker: from a tenth to 20."""


@dataclass
class Machine:
    """CPU workers and a device with known costs: a byte takes a CPU worker one second."""

    cooperation: Cooperation
    speed: float
    now: float = 0.0
    batch: int = 0

    def prepare(self, sizes: Sequence[int]) -> float:
        """Prepare one mini-batch; return its seconds."""
        began = self.now
        self.cooperation.open(self.batch, sizes)
        idle, device_idle = self.cooperation.workers, True
        running: list[tuple[float, int, Assignment]] = []
        while self.cooperation.left(self.batch):
            # Handing something to the device may leave something to decode, and the reverse.
            for _ in range(2):
                while idle and (taken := self.cooperation.take_cpu(self.now)) is not None:
                    idle -= 1
                    share = 1.0 if taken.part == "whole" else DECODING
                    end = self.now + share * sizes[taken.tiny]
                    heapq.heappush(running, (end, taken.number, taken))
                if device_idle and (found := self.cooperation.take_device(self.now)) is not None:
                    device_idle = False
                    end = self.now + sizes[found.tiny] / self.speed
                    heapq.heappush(running, (end, found.number, found))
            self.now, _, finished = heapq.heappop(running)
            assert self.cooperation.done(finished, self.now)
            if finished.part == "device":
                device_idle = True
            else:
                idle += 1
        self.batch += 1
        return self.now - began

    def settle(self, sizes: Sequence[int], most: int = 200) -> int:
        """Prepare mini-batches until ``t`` stays; return how many it took."""
        took = 0
        for number in range(most):
            if self.cooperation.threshold.frozen:
                break
            before = self.cooperation.threshold.t
            self.prepare(sizes)
            if self.cooperation.threshold.t != before:
                took = number + 1
        return took


def least_seconds(sizes: Sequence[int], workers: int, speed: float, exact: bool) -> float:
    """No schedule is faster: work may be cut at will, but one tiny-batch is not cut."""
    part = DECODING if exact else 0.0
    total = sum(sizes)
    # The device takes a share of the bytes: either both end together, or it takes everything.
    together = total / (workers + speed * (1.0 - part))
    everything = max(total / speed, total * part / workers)
    fluid = together if together * speed <= total else everything
    return max(fluid, max(sizes) * min(1.0, 1.0 / speed + part))


# Who takes what.


def test_the_cpu_takes_from_the_small_end_and_the_device_from_the_large_end() -> None:
    cooperation = Cooperation(2)
    cooperation.open(0, [30, 10, 30, 10, 20])
    by_cpu = [cooperation.take_cpu(0.0) for _ in range(2)]
    by_device = [cooperation.take_device(0.0) for _ in range(2)]
    assert [one.tiny for one in by_cpu if one] == [1, 3]
    assert [one.tiny for one in by_device if one] == [2, 0]


@pytest.mark.parametrize(("t", "cpu", "device"), [(2, 4, 6), (0, 6, 6), (-2, 6, 4), (-6, 6, 0)])
def test_the_last_ones_are_kept_for_one_side(t: int, cpu: int, device: int) -> None:
    for take, most in (("take_cpu", cpu), ("take_device", device)):
        cooperation = Cooperation(2)
        cooperation.threshold.t = t
        cooperation.open(0, range(6))
        taken = [getattr(cooperation, take)(0.0) for _ in range(7)]
        assert sum(one is not None for one in taken) == most


def test_the_oldest_mini_batch_comes_first() -> None:
    cooperation = Cooperation(1)
    cooperation.open(7, [1])
    cooperation.open(8, [1, 2])
    taken = [cooperation.take_cpu(0.0) for _ in range(3)]
    assert [(one.batch, one.tiny) for one in taken if one] == [(7, 0), (8, 0), (8, 1)]


def test_the_cpu_decodes_ahead_for_the_device_and_this_is_counted() -> None:
    cooperation = Cooperation(2, exact=True)
    cooperation.open(0, [10, 20, 30])
    assert cooperation.take_device(0.0) is None
    decode, whole = cooperation.take_cpu(0.0), cooperation.take_cpu(0.0)
    assert decode is not None
    assert whole is not None
    assert (decode.tiny, decode.part, whole.tiny, whole.part) == (2, "decode", 0, "whole")
    assert cooperation.done(decode, 1.0)
    device = cooperation.take_device(1.0)
    assert device is not None
    assert (device.tiny, device.part) == (2, "device")
    following = cooperation.take_cpu(1.0)
    assert following is not None
    assert (following.tiny, following.part) == (1, "decode")
    for assignment in (whole, device, following):
        cooperation.done(assignment, 2.0)
    last = cooperation.take_device(2.0)
    assert last is not None
    assert cooperation.done(last, 3.0)
    assert cooperation.counts == (1, 2, 2, 0)


def test_a_starving_device_makes_the_cpu_decode_further_ahead() -> None:
    cooperation = Cooperation(4, exact=True)
    cooperation.open(0, [10] * 20)
    assert cooperation.ahead == 1
    first = cooperation.take_cpu(0.0)
    for _ in range(3):
        assert cooperation.take_device(0.0) is None
    assert cooperation.ahead == 2
    assert first is not None
    assert first.part == "decode"
    second, third = cooperation.take_cpu(0.0), cooperation.take_cpu(0.0)
    assert second is not None
    assert third is not None
    assert (second.part, third.part) == ("decode", "whole")


# Exactly once.


class Crowd:
    """Workers and a device that take, finish, die and stop answering in any interleaving."""

    def __init__(self, cooperation: Cooperation, batches: Sequence[Sequence[int]]) -> None:
        self.cooperation = cooperation
        self.held: list[Assignment] = []
        self.stale: list[Assignment] = []
        self.finished: Counter[tuple[int, int]] = Counter()
        self.everything = {
            (batch, tiny) for batch, sizes in enumerate(batches) for tiny in range(len(sizes))
        }
        for batch, sizes in enumerate(batches):
            cooperation.open(batch, sizes)
        self.now = 0.0

    def take(self, assignment: Assignment | None) -> bool:
        if assignment is None:
            return False
        key = assignment.batch, assignment.tiny
        assert key not in {(one.batch, one.tiny) for one in self.held}, "taken twice at once"
        assert key not in self.finished, "taken after it was finished"
        self.held.append(assignment)
        return True

    def finish(self, assignment: Assignment) -> None:
        self.held.remove(assignment)
        self.now += 1.0
        assert self.cooperation.done(assignment, self.now)
        if assignment.part != "decode":
            self.finished[assignment.batch, assignment.tiny] += 1
        self.stale.append(assignment)

    def act(self, act: str, choice: int) -> None:
        cooperation = self.cooperation
        if act == "cpu":
            self.take(cooperation.take_cpu(self.now))
        elif act == "device":
            self.take(cooperation.take_device(self.now))
        elif act == "done" and self.held:
            self.finish(self.held[choice % len(self.held)])
        elif act == "died" and self.held:
            assignment = self.held.pop(choice % len(self.held))
            cooperation.lost(assignment)
            self.stale.append(assignment)
        elif act == "late" and self.stale:
            # A worker that was given up reports after all.
            assert not cooperation.done(self.stale[choice % len(self.stale)], self.now)
        elif act == "lost":
            cooperation.device_lost()
            self.stale += [one for one in self.held if one.part == "device"]
            self.held = [one for one in self.held if one.part != "device"]
        elif act == "back":
            cooperation.device_back()
        elif act == "resize":
            cooperation.resize(1 + choice % 12)
        elif act == "loop":
            cooperation.loop_waits(choice % 2 == 0)

    def finish_everything(self, *, device: bool) -> None:
        while self.finished.keys() != self.everything:
            taken = self.take(self.cooperation.take_cpu(self.now))
            if device:
                taken |= self.take(self.cooperation.take_device(self.now))
            assert taken or self.held, "nobody may take what is left"
            while self.held:
                self.finish(self.held[-1])
        assert set(self.finished.values()) == {1}


acts = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "cpu",
                "cpu",
                "device",
                "device",
                "done",
                "done",
                "died",
                "late",
                "lost",
                "back",
                "resize",
                "loop",
            ]
        ),
        st.integers(0, 1000),
    ),
    max_size=80,
)
some_batches = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=4)


@settings(deadline=None)
@given(some_batches, acts, st.booleans(), st.booleans(), st.integers(-9, 9))
def test_every_tiny_batch_is_prepared_once_whatever_dies(
    batches: list[list[int]], events: list[tuple[str, int]], exact: bool, foresees: bool, t: int
) -> None:
    crowd = Crowd(Cooperation(3, exact=exact, foresees=foresees), batches)
    crowd.cooperation.threshold.t = t
    for act, choice in events:
        crowd.act(act, choice)
    crowd.cooperation.loop_waits(True)
    crowd.finish_everything(device=True)


@settings(deadline=None)
@given(some_batches, acts, st.booleans(), st.booleans(), st.integers(-9, 9))
def test_the_cpu_finishes_alone_after_the_device_stops_answering(
    batches: list[list[int]], events: list[tuple[str, int]], exact: bool, foresees: bool, t: int
) -> None:
    crowd = Crowd(Cooperation(3, exact=exact, foresees=foresees), batches)
    crowd.cooperation.threshold.t = t
    for act, choice in events:
        crowd.act(act, choice)
    crowd.act("lost", 0)
    assert crowd.cooperation.take_device(crowd.now) is None
    crowd.finish_everything(device=False)


def test_a_device_task_older_than_the_patience_means_that_the_device_is_lost() -> None:
    cooperation = Cooperation(1)
    cooperation.open(0, [10, 20])
    hung = cooperation.take_device(5.0)
    assert hung is not None
    assert cooperation.check_device(14.9, patience=10.0)
    assert not cooperation.check_device(15.1, patience=10.0)
    taken = [cooperation.take_cpu(15.1) for _ in range(3)]
    assert [one.tiny for one in taken if one] == [0, 1]
    assert not cooperation.done(hung, 16.0)
    assert cooperation.counts.again == 1


def test_the_same_events_give_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        machine = Machine(Cooperation(3, exact=True), speed=5.0)
        sizes = [7, 7, 9, 30, 30, 11] * 5
        runs.append([machine.prepare(sizes) for _ in range(20)])
        runs.append(list(machine.cooperation.counts))
    assert runs[:2] == runs[2:]


# How good it is.


@settings(deadline=None)
@given(sizes_of_tiny_batches, st.integers(1, 12), device_speeds, st.booleans())
def test_a_settled_mini_batch_takes_at_most_5_percent_or_one_task_more_than_the_best(
    sizes: list[int], workers: int, speed: float, exact: bool
) -> None:
    machine = Machine(Cooperation(workers, exact=exact), speed)
    machine.settle(sizes, most=len(sizes) + 20)
    seconds = machine.prepare(sizes)
    best = least_seconds(sizes, workers, speed, exact)
    task = max(sizes)
    assert best <= seconds * (1 + 1e-9)
    assert seconds <= max(1.05 * best, best + task) * (1 + 1e-9)
    alone = Machine(Cooperation(workers, device=False), speed).prepare(sizes)
    assert seconds <= (alone + task) * (1 + 1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(50, 200), min_size=24, max_size=64), device_speeds, st.booleans())
def test_the_threshold_settles_in_its_distance_and_four_mini_batches_after_each_change_of_capacity(
    sizes: list[int], speed: float, exact: bool
) -> None:
    machine = Machine(Cooperation(4, exact=exact), speed)
    machine.settle(sizes)
    for workers in (8, 12, 8, 4):
        before = machine.cooperation.threshold.t
        machine.cooperation.resize(workers)
        assert not machine.cooperation.threshold.frozen
        took = machine.settle(sizes)
        distance = abs(machine.cooperation.threshold.t - before)
        # With exact decoding the CPU also learns how far ahead to decode, which delays it.
        assert took <= (2 * len(sizes) if exact else distance + 4)


# The threshold.


def test_the_threshold_moves_by_one_to_the_side_that_was_idle() -> None:
    threshold = Threshold()
    threshold.learn(8, 1.0, 0.5)
    assert threshold.t == 1
    threshold.learn(8, 1.0, -0.5)
    threshold.learn(8, 1.0, -0.5)
    assert (threshold.t, threshold.frozen) == (-1, False)
    threshold.learn(8, 1.0, -BALANCED)
    assert threshold.t == -1


@pytest.mark.parametrize(("at_0", "at_1", "expected"), [(5.0, 4.0, 1), (4.0, 5.0, 0)])
def test_the_threshold_freezes_at_the_better_value_and_a_change_of_capacity_thaws_it(
    at_0: float, at_1: float, expected: int
) -> None:
    cooperation = Cooperation(4)
    threshold = cooperation.threshold
    for seconds, gap in ((at_0, 0.5), (at_1, -0.5), (at_0, 0.5)):
        threshold.learn(8, seconds, gap)
    assert (threshold.t, threshold.frozen) == (expected, True)
    threshold.learn(8, 1.0, 0.5)
    assert threshold.t == expected
    frozen = []
    for workers in (4, 5):
        cooperation.resize(workers)
        frozen.append(threshold.frozen)
    assert frozen == [True, False]
    threshold.learn(8, 1.0, 0.5)
    assert threshold.t == expected + 1


def test_the_threshold_stays_within_the_mini_batch() -> None:
    threshold = Threshold()
    for _ in range(9):
        threshold.learn(3, 1.0, -0.5)
    assert threshold.t == -3
    # A shorter mini-batch does not move it, and one towards 0 is allowed.
    threshold.learn(2, 1.0, -0.5)
    assert threshold.t == -3
    threshold.learn(2, 1.0, 0.5)
    assert threshold.t == -2


def test_a_slow_device_ends_up_without_work() -> None:
    machine = Machine(Cooperation(4), speed=0.05)
    machine.settle([100] * 16)
    before = machine.cooperation.counts.device
    assert machine.prepare([100] * 16) == 400
    assert machine.cooperation.counts.device == before


# Sharing the device with the training step.


def test_the_faster_sharing_mode_stays_after_the_trial() -> None:
    for temporal, spatial, expected in ((0.3, 0.2, "spatial"), (0.2, 0.3, "temporal")):
        sharing = Sharing()
        tried = []
        for number in range(2 * TRIAL):
            tried.append(sharing.mode)
            # The first of each mode contain work of the other mode, and must not count.
            settling = number % TRIAL < SETTLING
            sharing.record(9.0 if settling else temporal if sharing.mode == "temporal" else spatial)
        assert Counter(tried) == {"temporal": TRIAL, "spatial": TRIAL}
        assert (sharing.mode, sharing.decided) == (expected, True)


def test_temporal_is_chosen_without_a_trial_where_memory_is_short() -> None:
    sharing = Sharing()
    sharing.memory(prep_peak=3, training_peak=8, capacity=10)
    assert (sharing.mode, sharing.decided) == ("temporal", True)
    sharing.memory(prep_peak=2, training_peak=8, capacity=10)
    assert (sharing.mode, sharing.decided) == ("temporal", False)


def test_with_temporal_sharing_the_device_works_only_while_the_loop_waits() -> None:
    cooperation = Cooperation(1)
    cooperation.open(0, [1, 2, 3])
    cooperation.loop_waits(False)
    assert cooperation.take_device(0.0) is None
    cooperation.loop_waits(True)
    assert cooperation.take_device(0.0) is not None
    cooperation.loop_waits(False)
    cooperation.sharing = Sharing("spatial", decided=True)
    assert cooperation.take_device(0.0) is not None


# Checkpoints and bad input.


def test_what_was_learnt_survives_a_checkpoint() -> None:
    machine = Machine(Cooperation(4, exact=True), speed=15.0)
    machine.settle([100] * 40)
    cooperation = machine.cooperation
    cooperation.sharing = Sharing("spatial", decided=True)
    state = json.loads(json.dumps(cooperation.state_dict()))
    resumed = Cooperation(4, exact=True)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == cooperation.state_dict()
    assert (resumed.threshold.t, resumed.threshold.frozen) == (
        cooperation.threshold.t,
        cooperation.threshold.frozen,
    )
    assert resumed.sharing.mode == "spatial"


@pytest.mark.parametrize(
    ("key", "value"),
    [("t", "1"), ("t", True), ("frozen", 1), ("mode", "both"), ("decided", None), ("ahead", 0)],
)
def test_a_damaged_state_is_refused(key: str, value: object) -> None:
    cooperation = Cooperation(2)
    with pytest.raises(StateError, match="affects speed only"):
        cooperation.load_state_dict({**cooperation.state_dict(), key: value})


def test_bad_input_is_refused() -> None:
    with pytest.raises(PipelineError, match="at least one CPU worker"):
        Cooperation(0)
    cooperation = Cooperation(1)
    with pytest.raises(PipelineError, match="at least one CPU worker"):
        cooperation.resize(0)
    for sizes in ([], [3, -1]):
        with pytest.raises(PipelineError, match="at least one tiny-batch"):
            cooperation.open(0, sizes)
    cooperation.open(0, [1])
    with pytest.raises(PipelineError, match="open already"):
        cooperation.open(0, [1])
    with pytest.raises(StateError, match="no mini-batch is open"):
        cooperation.load_state_dict(cooperation.state_dict())


def test_a_device_that_saves_no_cpu_time_rests() -> None:
    cooperation = Cooperation(workers=1, exact=True, foresees=True)
    cooperation.sharing = Sharing("spatial", decided=True)
    seconds = {"whole": 1.0, "decode": 1.5, "device": 0.1}
    now = 0.0
    for batch in range(30):
        cooperation.open(batch, [100] * 8)
        while cooperation.left(batch):
            task = cooperation.take_device(now) or cooperation.take_cpu(now)
            assert task is not None
            now += seconds[task.part]
            assert cooperation.done(task, now)
    counts = cooperation.counts
    assert not cooperation.worth.positive
    assert counts.device == counts.decode <= 2 * PROBES
    assert counts.whole + counts.device == 30 * 8


@pytest.mark.parametrize(("workers", "rests"), [(2, False), (8, True)])
def test_a_device_that_saves_next_to_nothing_rests(workers: int, rests: bool) -> None:
    cooperation = Cooperation(workers, exact=True, foresees=True)
    # A device task takes five times what a whole one takes a CPU worker, and saves half of that.
    for _ in range(PROBES):
        for part, seconds in (("whole", 1.0), ("decode", 0.5), ("device", 5.0)):
            cooperation.worth.learn(part, seconds, 100, workers)  # type: ignore[arg-type]
    assert cooperation.worth.positive is not rests


def test_one_long_task_does_not_keep_the_device_from_work() -> None:
    cooperation = known(Cooperation(2, exact=True, foresees=True), 1.0, 0.5, 0.2)
    worth = cooperation.worth
    usual = worth.rate("device")
    worth.learn("device", 1e4, 100, 2)
    assert usual is not None
    assert worth.late <= 4 * usual * 100
    for batch in range(40):
        cooperation.open(batch, [100] * 32)
        now = 1e5 * batch
        while (task := cooperation.take_device(now) or cooperation.take_cpu(now)) is not None:
            seconds = {"whole": 100.0, "decode": 50.0, "device": 20.0}[task.part]
            now += seconds
            cooperation.done(task, now, seconds=None if task.part == "device" else seconds)
    assert worth.positive
    assert cooperation.counts.device > 40
    assert worth.rate("device") == pytest.approx(usual, rel=0.2)


def test_the_first_device_task_may_compile_kernels() -> None:
    worth = Worth()
    worth.learn("device", 5.0, 100)
    assert worth.rate("device") is None
    worth.learn("device", 0.1, 100)
    assert worth.rate("device") == pytest.approx(1e-3)


def known(cooperation: Cooperation, whole: float, decode: float, device: float) -> Cooperation:
    """It knows the seconds that a byte takes."""
    for part, seconds in (("whole", whole), ("decode", decode), ("device", device)):
        for _ in range(PROBES):
            cooperation.worth.learn(part, 100 * seconds, 100, cooperation.workers)  # type: ignore[arg-type]
    cooperation.sharing = Sharing("spatial", decided=True)
    return cooperation


def test_an_idle_device_gets_a_small_tiny_batch_first_and_small_ones_are_kept_for_the_end() -> None:
    cooperation = known(Cooperation(3, exact=True, foresees=True), 1.0, 0.5, 0.4)
    cooperation.open(0, [80, 100, 10, 90] + [100] * 8)
    first = cooperation.take_cpu(0.0)
    assert first is not None
    assert (first.tiny, first.part) == (2, "decode")
    # The others cannot keep the device busy either, so they begin with the smallest that are left.
    second = cooperation.take_cpu(0.0)
    assert second is not None
    assert (second.tiny, second.part) == (0, "decode")
    # Without the device the largest come first.
    cooperation.device_lost()
    third = cooperation.take_cpu(0.0)
    assert third is not None
    assert (cooperation._open[0].sizes[third.tiny], third.part) == (100, "whole")


def test_a_fast_device_gets_the_largest_first_because_it_waits_anyway() -> None:
    cooperation = known(Cooperation(2, exact=True, foresees=True), 1.0, 0.5, 0.01)
    cooperation.open(0, [80, 100, 10, 90])
    taken = [cooperation.take_cpu(0.0) for _ in range(4)]
    assert [(one.tiny, one.part) for one in taken if one] == [
        (1, "decode"),
        (3, "decode"),
        (0, "decode"),
        (2, "decode"),
    ]


def test_a_device_with_enough_to_do_gets_no_more_for_now() -> None:
    cooperation = known(Cooperation(2, exact=True, foresees=True), 1.0, 0.1, 1.0)
    cooperation.open(0, [100] * 20)
    parts = []
    for _ in range(3):
        task = cooperation.take_cpu(0.0)
        assert task is not None
        parts.append(task.part)
        if task.part == "decode":
            cooperation.done(task, 0.0, seconds=10.0)
    # It has work for ten times what decoding takes.
    assert parts == ["decode", "whole", "whole"]


def test_a_slow_device_takes_nothing_that_it_would_finish_late() -> None:
    cooperation = Cooperation(workers=1, exact=False, foresees=True)
    cooperation.sharing = Sharing("spatial", decided=True)
    cooperation.worth.learn("device", 9.0, 10)  # the first one does not count
    cooperation.open(0, [10, 10])
    learning = cooperation.take_device(0.0), cooperation.take_cpu(0.0)
    assert learning[0] is not None
    assert learning[1] is not None
    cooperation.done(learning[1], 1.0)
    cooperation.done(learning[0], 6.0)  # six times as long as the CPU
    cooperation.open(1, [10] * 4)
    # The CPU needs 4 seconds for all of them, and the device 6 for one.
    assert cooperation.take_device(6.0) is None
    cooperation.open(2, [10] * 8)
    assert cooperation.take_device(6.0) is not None
    # None is kept for the device either, whatever was learnt before.
    cooperation.threshold.t = 4
    taken = [cooperation.take_cpu(6.0) for _ in range(11)]
    assert None not in taken
    assert cooperation.take_cpu(6.0) is None
