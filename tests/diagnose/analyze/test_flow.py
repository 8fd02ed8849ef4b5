"""The simulation agrees with arithmetic in the cases that arithmetic can solve."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.diagnose.analyze.flow import Flow, _SimulatedWorker, _Simulation, seconds_a_batch
from penstock.engine.schedule import HANDING

PLAIN = Flow(
    workers=2,
    cores=2,
    batch=32,
    piece=4,
    ahead=4,
    prep=1e-3,
    hit_rate=0.0,
    service=0.0,
    latency=0.0,
    step=1e-3,
)


def rate(**changed: object) -> float:
    flow = replace(PLAIN, **changed)  # type: ignore[arg-type]
    return flow.batch / seconds_a_batch(flow)


def test_equal_flows_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    class Counted(_Simulation):
        def __init__(self, flow: Flow) -> None:
            simulated.append(flow.step)
            super().__init__(flow)

    monkeypatch.setattr("penstock.diagnose.analyze.flow._Simulation", Counted)
    seconds_a_batch.cache_clear()
    assert rate(step=2e-3) == rate(step=2e-3) > rate(step=1.0)
    assert simulated == [2e-3, 1.0]


def test_workers_that_only_prepare_reach_their_full_rate() -> None:
    assert rate() == pytest.approx(2_000, rel=0.01)
    assert rate(workers=1) == pytest.approx(1_000, rel=0.01)


def test_more_workers_than_cores_add_nothing_if_nothing_is_fetched() -> None:
    assert rate(workers=8) == pytest.approx(2_000, rel=0.01)


def test_a_step_that_is_slower_than_the_workers_sets_the_speed() -> None:
    assert rate(step=0.064) == pytest.approx(500, rel=0.001)
    assert rate(step=0.064, shuttle=0.064) == pytest.approx(250, rel=0.001)


def test_a_single_worker_reads_and_then_prepares() -> None:
    found = rate(workers=1, service=1e-3, latency=1e-3)
    assert found == pytest.approx(500, rel=0.01)


def test_two_workers_share_the_storage_and_overlap_the_rest() -> None:
    # While one prepares for 1 ms the other reads for half of one: a sample each 0.75 ms.
    found = rate(service=0.5e-3, latency=0.5e-3)
    assert found == pytest.approx(2 / 1.5e-3, rel=0.02)
    # Storage that is slower than both sets the speed.
    assert rate(service=2e-3, latency=2e-3) == pytest.approx(500, rel=0.01)


def test_many_workers_hide_the_latency_of_storage() -> None:
    one = rate(workers=2, service=0.1e-3, latency=4e-3)
    many = rate(workers=16, service=0.1e-3, latency=4e-3)
    assert one == pytest.approx(2 / 5e-3, rel=0.02)
    assert many == pytest.approx(2_000, rel=0.02)


def test_cache_hits_are_not_fetched() -> None:
    assert rate(hit_rate=1.0, service=1.0, latency=1.0) == pytest.approx(2_000, rel=0.01)
    half = rate(workers=8, hit_rate=0.5, service=4e-3, latency=4e-3)
    assert half == pytest.approx(500, rel=0.06)


def test_without_workers_all_times_add_up() -> None:
    found = rate(workers=0, service=1e-3, latency=2e-3, shuttle=0.032)
    assert found == pytest.approx(32 / (0.001 + 0.032 + 32 * 3e-3))


def test_a_worker_is_slower_after_a_wait() -> None:
    lost = ((1e-3, 0.5e-3),)
    # Its core idles for one millisecond per fetch, and then for half a millisecond.
    assert rate(workers=1, service=1e-3, latency=1e-3, after_wait=lost) == pytest.approx(400, 0.01)
    found = rate(workers=1, service=0.5e-3, latency=0.5e-3, after_wait=lost)
    assert found == pytest.approx(1 / 1.75e-3, rel=0.01)
    # With four on one core another one works meanwhile, and fills the CPU caches with its data.
    many = rate(workers=4, cores=1, service=0.1e-3, latency=1e-3, after_wait=lost)
    assert many == pytest.approx(1 / 1.5e-3, rel=0.01)
    assert rate(after_wait=lost) == pytest.approx(2_000, rel=0.01)
    alone = rate(workers=0, service=1e-3, latency=1e-3, after_wait=lost)
    assert alone == pytest.approx(32 / (0.001 + 32 * 2.5e-3))


def test_the_loss_after_a_wait_carries_over_to_the_next_sample() -> None:
    lost = ((1e-3, 0.5e-3),)
    # Every other sample is fetched. Each loses half a millisecond, and the next one a part of it.
    found = rate(workers=1, service=1e-3, latency=1e-3, after_wait=lost, hit_rate=0.5)
    assert 1 / 1.9e-3 < found < 1 / 1.76e-3


class Counted(_Simulation):
    """Notes how many samples the pieces have that workers finish."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.counts: list[int] = []

    def finish(self, now: float, worker: _SimulatedWorker) -> None:
        assert worker.piece is not None
        self.counts.append(worker.piece.count)
        super().finish(now, worker)


def pieces(batches: int = 16, **changed: object) -> list[int]:
    simulation = Counted(replace(PLAIN, piece=None, **changed))  # type: ignore[arg-type]
    simulation.run(batches)
    return simulation.counts[len(simulation.counts) // 2 :]


def test_threads_take_pieces_of_four_milliseconds() -> None:
    # A sample takes 1 ms, or 4 ms with reading: then two share the cost of handing out.
    assert set(pieces(workers=1)) == {4}
    assert set(pieces(workers=1, service=3e-3, latency=3e-3)) == {2}


def test_worker_processes_take_sixteen_samples_that_share_the_cost_of_handing_out() -> None:
    # Finished batches wait for a slow loop.
    assert set(pieces(workers=1, step=1.0, handing=HANDING)) == {16}
    assert set(pieces(workers=2, step=1.0, handing=HANDING)) == {16}
    assert set(pieces(workers=2, step=1.0)) == {4}


def test_pieces_are_shorter_where_little_is_open_and_the_loop_waits() -> None:
    # One batch of 32 is open: three pieces for each of two workers.
    assert max(pieces(workers=2, handing=HANDING, step=0.0, ahead=1)) == 5
    assert rate(piece=None, handing=HANDING) == pytest.approx(2_000, rel=0.01)


@pytest.mark.parametrize(
    ("workers", "nbytes", "ahead"),
    [(16, 1 << 20, 64), (2, 1 << 20, 4), (16, 16 << 20, 32), (16, 64 << 20, 8), (16, 0, 4)],
)
def test_many_worker_processes_have_more_batches_open(
    workers: int, nbytes: int, ahead: int
) -> None:
    flow = replace(PLAIN, workers=workers, cores=workers, piece=None, handing=HANDING)
    simulation = _Simulation(replace(flow, batch_bytes=nbytes))
    simulation.run(8)
    assert simulation.opened == 8 + ahead


def test_the_loop_is_given_batches_only_when_it_is_free() -> None:
    simulation = _Simulation(replace(PLAIN, step=0.1, ahead=2))
    ends = simulation.run(4)
    assert ends == pytest.approx([0.116, 0.216, 0.316, 0.416])
    assert simulation.opened == 4 + 2


def test_all_samples_of_a_group_are_fetched_before_any_is_prepared() -> None:
    events: list[str] = []

    class Recorded(_Simulation):
        def fetch(self, now: float, size: float) -> float:
            events.append("fetch")
            return super().fetch(now, size)

        def prepare(self, now: float, worker: _SimulatedWorker) -> float:
            events.append("prepare")
            return super().prepare(now, worker)

    flow = replace(PLAIN, workers=1, batch=8, service=1e-3, latency=1e-3)
    Recorded(replace(flow, piece=8, together=3)).run(1)
    # Two of eight samples remain for the last group.
    assert events[:11] == [*["fetch"] * 3, "prepare"] * 2 + ["fetch"] * 2 + ["prepare"]
    events.clear()
    # Samples that take long to arrive are not grouped, whatever group size a stop prefers.
    Recorded(replace(flow, piece=None, together=3, service=2e-3, latency=2e-3)).run(4)
    assert events[-8:] == ["fetch", "prepare"] * 4


def test_unequal_sizes_cost_speed_if_workers_compete_for_the_storage() -> None:
    even = rate(service=1e-3, latency=1e-3)
    uneven = rate(service=1e-3, latency=1e-3, sizes=(0.5, 0.6, 0.7, 0.8, 2.4))
    assert uneven < 0.97 * even


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 6),
    cores=st.integers(1, 6),
    batch=st.integers(1, 24),
    piece=st.integers(1, 24),
    ahead=st.integers(1, 6),
    prep=st.floats(1e-4, 1e-2),
    hit_rate=st.floats(0, 1),
    service=st.floats(0, 1e-2),
    extra=st.floats(0, 1e-2),
    step=st.floats(0, 0.2),
)
def test_no_loader_is_faster_than_its_slowest_part(
    workers: int,
    cores: int,
    batch: int,
    piece: int,
    ahead: int,
    prep: float,
    hit_rate: float,
    service: float,
    extra: float,
    step: float,
) -> None:
    flow = Flow(
        workers, cores, batch, min(piece, batch), ahead, prep, hit_rate, service,
        service + extra, step,
    )  # fmt: skip
    found = seconds_a_batch(flow)
    assert math.isfinite(found)
    # Some samples of the first batch may be prepared before the timed batches begin.
    slack = (1 + (ahead + 1) / 96) * found
    assert slack >= step
    assert slack >= batch * prep / min(workers, cores)
