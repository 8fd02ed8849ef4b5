"""Two nodes that divide one cache: every sample is read once, and faults cost time, not samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cluster import divided_cache, holdings, membership, partition, service
from penstock.cluster.flight import connect
from penstock.cluster.placement import pack_ranks
from penstock.cluster.protocol import WantedValues
from penstock.cluster.secrets import Secrets, make_secrets
from penstock.cluster.service import ClusterService
from penstock.cluster.transport import Link
from penstock.store import HeapStore, SampleStore, memory_store
from penstock.store.admission import Admission
from penstock.store.partitioned import Division
from penstock.store.plain import pack_sample, unpack_sample
from penstock.store.value import Lent
from tests.support.ports import free_port

SAMPLES = 64
LIMIT = 60.0
"""Seconds after which something that must happen counts as not happening."""


def sample(index: int) -> tuple[Any, int]:
    return np.full(1000, index, np.uint8), index


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class TrainingMachine:
    """A node with one rank of a job, which prepares batches as an engine does."""

    service: ClusterService
    rank: int
    budget: int = 1 << 20
    lends: bool = True
    make: Callable[[int], Any] = sample
    persistent: bool = False
    read: list[int] = field(default_factory=list)
    batches: int = 0

    def open(self, world: int) -> None:
        def make() -> SampleStore:
            if self.lends:
                store = HeapStore(self.budget, overshoot=1 << 20)
                store.persistent = self.persistent
                return store
            return memory_store(self.budget, 1 << 20, shared=True)

        stores = self.service.stores
        self.store = stores.store("content", "form", make, lends=self.lends, samples=SAMPLES)
        division = stores.division(self.store)
        assert division is not None
        self.division: Division = division
        self.store.open()
        self.division.open(Admission(self.budget))
        dealt = np.arange(SAMPLES, dtype=np.int32) % world
        self.division.host(pack_ranks(dealt), {self.rank})

    def prepare(self, indices: list[int]) -> list[Any]:
        """The samples of a batch, from the cache, from other machines, or from storage."""
        self.batches += 1
        fetched = threading.Event()
        if not self.division.fetch(self.batches, indices, fetched.set):
            assert fetched.wait(LIMIT)
        samples = []
        offers = []
        for index, found in zip(indices, self.store.get_many(indices), strict=True):
            if found is not None:
                taken = found.sample if isinstance(found, Lent) else unpack_sample(found, bool)
                samples.append(taken)
                continue
            self.read.append(index)
            samples.append(self.make(index))
            packed = pack_sample(samples[-1])
            value: Any = Lent(samples[-1], packed.nbytes) if self.lends else packed
            if self.store.put_many([(index, value)])[0]:
                offers.append((index, self.store.cost(packed.nbytes)))
        refused = self.division.admit(offers)
        self.store.delete_many(refused)
        self.division.release(self.batches)
        return samples

    @property
    def arrivals(self) -> SampleStore:
        store: Any = self.store
        arrivals: SampleStore = store.arrivals
        return arrivals

    @property
    def counts(self) -> dict[str, Any]:
        [cache] = self.service.status()["caches"]
        return dict(cache)


def check(samples: list[Any], indices: list[int]) -> None:
    assert [number for _, number in samples] == indices
    for pixels, number in samples:
        assert pixels.tolist() == [number % 256] * 1000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take seconds; that must not count as a slow machine.

    Machines tell each other about themselves often, so that the tests need not wait for it.
    """
    monkeypatch.setattr(membership, "BEAT", 0.05)
    for name in ("FIRST_DELAY", "LEAST_DELAY", "MOST_DELAY"):
        monkeypatch.setattr(partition, name, LIMIT)
    for module in (holdings, partition, divided_cache):
        monkeypatch.setattr(module, "PROMISE", LIMIT)
    for name in ("CALL", "TRANSFER"):
        monkeypatch.setattr(service, name, LIMIT)
    monkeypatch.setattr(membership, "LIMIT", LIMIT)


@pytest.fixture
def services(secrets: Secrets) -> Iterator[list[ClusterService]]:
    # The address of the first machine must be known before it starts.
    port = free_port()
    seeds = [f"127.0.0.1:{port}"]
    made = [
        ClusterService(seeds, secrets, host="127.0.0.1", port=port, name="m0"),
        ClusterService(seeds, secrets, host="127.0.0.1", port=0, name="m1"),
    ]
    for one in made:
        one.begin()
    wait_until(lambda: all(len(one.status()["machines"]) == 2 for one in made))
    yield made
    for one in made:
        one.close()


def test_a_machine_with_other_secrets_says_so_once_in_its_log_and_in_its_status(
    services: list[ClusterService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connections: list[str] = []

    def counted(address: str, *rest: Any, **more: Any) -> Link:
        connections.append(address)
        return connect(address, *rest, **more)

    monkeypatch.setattr(service, "connect", counted)
    monkeypatch.setattr(service, "AGAIN", 0.2)  # beats find that it was not tried again
    others = make_secrets(tmp_path / "others")
    seed = services[0].address
    stranger = ClusterService([seed], others, host="127.0.0.1", port=0, name="stranger")
    try:
        stranger.begin()
        wait_until(lambda: len(connections) >= 3)
        [refused] = stranger.status()["refused"]
    finally:
        stranger.close()
    assert seed in refused
    assert "another certificate" in refused
    said = [record.getMessage() for record in caplog.records if seed in record.getMessage()]
    assert [text for text in said if "Peer" in text] == [f"PeerRefused: {refused}"]
    assert len(services[0].status()["machines"]) == 2


def machines_of(services: list[ClusterService], **more: Any) -> list[TrainingMachine]:
    machines = [TrainingMachine(one, rank, **more) for rank, one in enumerate(services)]
    for machine in machines:
        machine.open(len(machines))
    # Each machine must know which ranks the other trains.
    wait_until(lambda: all(map(_knows_all, services)))
    return machines


def _knows_all(one: ClusterService) -> bool:
    with one._lock:
        known = [machine.ranks for machine in one._membership.view.machines]
    return len(known) == 2 and all(known)


def own_samples(rank: int) -> list[int]:
    return list(range(rank, SAMPLES, 2))


@pytest.mark.parametrize("lends", [True, False])
def test_each_sample_is_read_from_storage_by_one_machine(
    services: list[ClusterService], lends: bool
) -> None:
    machines = machines_of(services, lends=lends)
    for machine in machines:
        check(machine.prepare(own_samples(machine.rank)), own_samples(machine.rank))
    assert all(sum(one.sent.values()) == 0 for one in services)
    for machine in machines:
        check(machine.prepare(list(range(SAMPLES))), list(range(SAMPLES)))
    assert sorted(machines[0].read + machines[1].read) == list(range(SAMPLES))
    for machine in machines:
        counts = machine.counts
        assert counts["storage"] == counts["remote"] == counts["local"] == SAMPLES // 2


def test_machines_with_the_same_rank_divide_its_samples(services: list[ClusterService]) -> None:
    machines = [TrainingMachine(one, 0) for one in services]
    for machine in machines:
        machine.open(1)
    wait_until(lambda: all(map(_knows_all, services)))
    everything = list(range(SAMPLES))
    for machine in machines:
        check(machine.prepare(everything), everything)
        wait_until(lambda: sum(len(one.store) for one in machines) == SAMPLES)
    assert sorted(machines[0].read + machines[1].read) == everything
    assert min(len(machine.store) for machine in machines) > 0


def test_what_does_not_fit_on_its_machine_is_kept_by_another(
    services: list[ClusterService],
) -> None:
    small = HeapStore(0).cost(pack_sample(sample(0)).nbytes) * 8
    machines = [TrainingMachine(services[0], 0, small), TrainingMachine(services[1], 1)]
    for machine in machines:
        machine.open(2)
    wait_until(lambda: all(map(_knows_all, services)))
    for machine in machines:
        machine.prepare(own_samples(machine.rank))
    spilled = SAMPLES // 2 - 8
    wait_until(lambda: machines[0].counts["spilled"] == spilled)
    assert len(machines[0].store) == 8
    assert len(machines[1].store) == SAMPLES // 2 + spilled
    for machine in machines:
        check(machine.prepare(list(range(SAMPLES))), list(range(SAMPLES)))
    assert sorted(machines[0].read + machines[1].read) == list(range(SAMPLES))


def test_a_sample_that_its_owner_lacks_is_read_once_and_given_to_it(
    services: list[ClusterService],
) -> None:
    machines = machines_of(services)
    check(machines[0].prepare(own_samples(1)), own_samples(1))
    wait_until(lambda: len(machines[1].store) == SAMPLES // 2)
    check(machines[1].prepare(own_samples(1)), own_samples(1))
    assert machines[0].read == own_samples(1)
    assert machines[1].read == []


def test_a_machine_that_dies_costs_storage_reads_only(services: list[ClusterService]) -> None:
    machines = machines_of(services)
    for machine in machines:
        machine.prepare(own_samples(machine.rank))
    # No goodbye, as if it was killed.
    services[1]._server.close()
    services[1]._closing.set()
    for _ in range(3):
        check(machines[0].prepare(list(range(SAMPLES))), list(range(SAMPLES)))
    assert set(machines[0].read) == set(range(SAMPLES))


def test_samples_that_need_a_pickle_stay_on_their_machine(services: list[ClusterService]) -> None:
    machines = machines_of(services, make=lambda index: {index, "a set is not plain"})
    machines[1].prepare(own_samples(1))
    assert machines[0].prepare([1, 3]) == [{1, "a set is not plain"}, {3, "a set is not plain"}]
    assert machines[0].read == [1, 3]
    assert sum(services[1].sent.values()) == 0
    # Each machine that reads them keeps them.
    machines[0].prepare([1, 3])
    assert machines[0].read == [1, 3]
    unsent = [service.status()["caches"][0]["unsent"] > 0 for service in services]
    assert unsent == [True, True]


def test_a_machine_without_jobs_keeps_what_others_have_no_room_for(
    services: list[ClusterService], secrets: Secrets
) -> None:
    address = services[0].address
    helper = ClusterService(
        [address], secrets, host="127.0.0.1", port=0, name="m2", cache_bytes=1 << 20
    )
    helper.begin()
    try:
        wait_until(lambda: len(services[0].status()["machines"]) == 3)
        small = HeapStore(0).cost(pack_sample(sample(0)).nbytes) * 8
        machine = TrainingMachine(services[0], 0, small)
        machine.open(1)
        everything = list(range(SAMPLES))
        machine.prepare(everything)
        wait_until(lambda: machine.counts["spilled"] == SAMPLES - 8)
        [guest] = helper.status()["caches"]
        assert guest["guest"]
        assert guest["samples"] == SAMPLES - 8
        check(machine.prepare(everything), everything)
        assert machine.read == everything
    finally:
        helper.close()


def bytes_of(samples: int) -> int:
    """Room that this many samples need in a store."""
    return HeapStore(0).cost(pack_sample(sample(0)).nbytes) * samples


@pytest.mark.parametrize("lends", [True, False])
def test_a_machine_with_room_keeps_copies_of_the_samples_of_others(
    services: list[ClusterService], lends: bool
) -> None:
    machines = machines_of(services, lends=lends)
    everything = list(range(SAMPLES))
    for machine in machines:
        machine.prepare(own_samples(machine.rank))
    check(machines[0].prepare(everything), everything)
    sent = sum(services[1].sent.values())
    assert machines[0].counts["copies"] == SAMPLES // 2
    for _ in range(2):
        check(machines[0].prepare(everything), everything)
    assert sum(services[1].sent.values()) == sent > 0
    assert machines[0].read == own_samples(0)
    counts = machines[0].counts
    assert counts["remote"] == SAMPLES // 2
    assert counts["local"] == 2 * SAMPLES + SAMPLES // 2


@pytest.mark.parametrize("lends", [True, False])
def test_copies_leave_when_the_samples_of_the_machine_need_the_room(
    services: list[ClusterService], lends: bool
) -> None:
    budget = bytes_of(SAMPLES // 2 + 8)
    machines = machines_of(services, lends=lends, budget=budget)
    machines[1].prepare(own_samples(1))
    mine, others, everything = own_samples(0), own_samples(1), list(range(SAMPLES))
    # First nothing of its own is here, so there is room for all copies.
    check(machines[0].prepare(others), others)
    assert machines[0].counts["copies"] == len(others)
    check(machines[0].prepare(mine), mine)
    for _ in range(3):
        check(machines[0].prepare(everything), everything)
        counts = machines[0].counts
        assert counts["samples"] == len(mine)
        assert counts["bytes"] + counts["copies_bytes"] <= budget
        # LMDB counts the pages of its tree, too.
        assert 0 < counts["copies"] <= 8
        assert len(machines[0].arrivals) == counts["copies"]
    assert machines[0].read == mine
    assert machines[1].read == others


def test_a_copy_that_a_worker_does_not_find_is_asked_for_again(
    services: list[ClusterService],
) -> None:
    machines = machines_of(services)
    machines[1].prepare(own_samples(1))
    machines[0].prepare(own_samples(1))
    machines[0].arrivals.delete_many([5])
    check(machines[0].prepare([5, 7]), [5, 7])
    assert machines[0].read == [5]
    for _ in range(2):
        check(machines[0].prepare([5, 7]), [5, 7])
    assert machines[0].read == [5]


def test_a_cache_on_disk_keeps_no_copies_in_memory(services: list[ClusterService]) -> None:
    machines = machines_of(services, persistent=True)
    machines[1].prepare(own_samples(1))
    machines[0].prepare(own_samples(1))
    assert machines[0].counts["copies"] == len(machines[0].arrivals) == 0


def test_a_batch_that_is_cancelled_leaves_nothing_behind(services: list[ClusterService]) -> None:
    machines = machines_of(services, budget=bytes_of(SAMPLES // 2))
    for machine in machines:
        machine.prepare(own_samples(machine.rank))
    fetched = threading.Event()
    if not machines[0].division.fetch("cancelled", own_samples(1), fetched.set):
        assert fetched.wait(LIMIT)
    machines[0].division.release("cancelled")
    assert len(machines[0].arrivals) == 0


def test_a_look_at_the_cluster_has_reports_and_times_of_the_other_machines(
    services: list[ClusterService],
) -> None:
    machines = machines_of(services)
    for machine in (*machines, *machines):
        check(machine.prepare(list(range(SAMPLES))), list(range(SAMPLES)))

    def other() -> dict[str, Any]:
        [found] = [one for one in services[0].status()["machines"] if one["name"] == "m1"]
        return dict(found)

    def samples() -> int:
        caches = (other()["report"] or {}).get("caches", ())
        return sum(cache["local"] + cache["remote"] + cache["storage"] for cache in caches)

    # A look asks for the report, and a later one has it.
    wait_until(lambda: samples() == 2 * SAMPLES)
    found = other()
    assert (found["role"], found["state"]) == ("trains", "alive")
    assert found["report"]["cores"] >= 1
    assert found["requests"] == sum(found["times"]) > 0
    [here] = [one for one in services[0].status()["machines"] if one["name"] == "m0"]
    assert here["report"]["received"] == found["received"] > 0


def test_a_machine_that_has_left_is_shown_as_gone(services: list[ClusterService]) -> None:
    services[1].close()

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in services[0].status()["machines"]}

    wait_until(lambda: states() == {"m0": "alive", "m1": "gone"})


def test_names_that_a_caller_invents_are_counted_together(services: list[ClusterService]) -> None:
    """Whoever has the token may call itself anything, any number of times."""
    machines = machines_of(services)
    machines[0].prepare(own_samples(0))
    wanted = WantedValues.of("content", np.arange(0, SAMPLES, 2))
    one = services[0]
    before = sum(one.sent.values())
    for number in range(100):
        for _ in one.get(f"invented-{number}", wanted):
            pass
    assert {*one.sent} <= {"", services[1].machine}
    assert one.sent[""] >= SAMPLES // 2 * 1000 * 100
    assert sum(one.sent.values()) - before == one.sent[""]


def test_a_machine_that_prepares_for_another_gets_what_that_one_has_and_claims_nothing(
    services: list[ClusterService],
) -> None:
    machines = machines_of(services)
    for machine in machines:
        machine.prepare(own_samples(machine.rank))
    here, there = services
    # Sample 1 is not here, and is not asked for from the machine that has it.
    values = there.ask_lent(here.machine, "content", [0, 1, 2])
    assert [value is None for value in values] == [False, True, False]
    check([unpack_sample(values[0], bool), unpack_sample(values[2], bool)], [0, 2])
    assert [value is None for value in there.lent_here("content", [0, 1])] == [True, False]
    assert there.lent_here("unknown", [0]) == [None]
    assert there.ask_lent(here.machine, "unknown", [0]) == [None]
    # A sample that is read by nobody is not promised to the one that asked.
    assert here.ask_lent(there.machine, "content", [SAMPLES - 2]) == [None]
    assert machines[1].division.holds([0, 1]) == [False, True]
