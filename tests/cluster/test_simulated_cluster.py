"""Several machines that share a cache: samples are read once, and nothing is wrong or waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.partition import MOST_DELAY
from tests.cluster.simulated import Hosts

ROOMY = 1 << 30
SIZE = 1000


@given(
    samples=st.integers(1, 100),
    machines=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    ahead=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_in_the_first_epoch_nothing_crosses_the_network(
    samples: int, machines: int, batch_size: int, ahead: int, seed: int
) -> None:
    hosts = Hosts(samples, [ROOMY] * machines, batch_size=batch_size, ahead=ahead, seed=seed)
    dealt = samples // machines * machines
    assert hosts.epoch(0) == dealt
    assert hosts.sent_values == 0
    assert hosts.count("requests") == 0


@given(
    samples=st.integers(1, 100),
    machines=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    ahead=st.integers(1, 4),
    drop_last=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_each_sample_is_read_once_by_all_machines_together(
    samples: int, machines: int, batch_size: int, ahead: int, drop_last: bool, seed: int
) -> None:
    hosts = Hosts(
        samples,
        [ROOMY] * machines,
        batch_size=batch_size,
        ahead=ahead,
        drop_last=drop_last,
        seed=seed,
    )
    for epoch in range(4):
        hosts.epoch(epoch)
    assert set(hosts.reads.values()) <= {1}
    assert set(hosts.held().values()) <= {1}
    assert hosts.reads.keys() == hosts.held().keys()
    assert hosts.count("hedged") == 0
    remote = hosts.count("asked") - hosts.count("local") - hosts.count("storage")
    assert hosts.count("remote") == remote


@given(
    samples=st.integers(9, 80),
    layout=st.sampled_from([(1, 2), (1, 3), (2, 1), (3, 1)]),
    ahead=st.integers(1, 4),
    first=st.integers(0, 8),
    lead=st.integers(0, 400),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_each_sample_is_read_once_however_far_a_rank_runs_ahead(
    samples: int, layout: tuple[int, int], ahead: int, first: int, lead: int, seed: int
) -> None:
    """Other ranks of its machine read samples that it wants, and so do other machines.

    With several ranks on each of several machines, batches could wait for each other in a circle,
    until promises end; then a sample is read twice. So the same examples are tried each time.
    """
    machines, each = layout
    hosts = Hosts(samples, [ROOMY] * machines, each=each, ahead=ahead, seed=seed)
    ranks = set(range(machines * each))
    first %= len(ranks)
    hosts.begin_ranks([first], [0, 1, 2])
    hosts.run(lead / 1000)
    hosts.begin_ranks(ranks - {first}, [0, 1, 2])
    assert hosts.run(100.0, hosts.is_done)
    hosts.check()
    assert set(hosts.reads.values()) <= {1}
    assert hosts.count("storage") == len(hosts.reads)


@given(
    share=st.integers(1, 20),
    machines=st.integers(1, 4),
    reuse=st.integers(2, 4),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_each_version_of_a_sample_is_prepared_by_one_machine_and_sent_only_to_be_used(
    share: int, machines: int, reuse: int, batch_size: int, seed: int
) -> None:
    samples = share * machines
    hosts = Hosts(
        samples, [ROOMY] * machines, batch_size=batch_size, seed=seed, reuse=reuse, ahead=3
    )
    assert hosts.generations is not None
    for epoch in range(2 * reuse + 2):
        assert hosts.epoch(epoch) == hosts.generations.fresh(epoch)
        if epoch == 0:
            assert hosts.sent_values == 0
    assert set(hosts.reads.values()) == {1}
    # Nothing is sent to be kept: the machine that prepares a version keeps it.
    assert hosts.count("offered") == 0
    assert hosts.sent_values == hosts.count("remote")


@given(
    room=st.lists(st.integers(0, 40), min_size=2, max_size=5),
    spare=st.integers(-30, 30),
    helper=st.integers(0, 60),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40, deadline=None)
def test_room_is_used_to_the_last_sample(
    room: list[int], spare: int, helper: int, seed: int
) -> None:
    """Machines with any room, and a helper without a rank: what does not fit here is kept there."""
    in_all = sum(room) + helper
    samples = max(1, in_all - spare)
    budgets = [SIZE * count for count in (*room, helper)]
    hosts = Hosts(samples, budgets, seed=seed, ranks=len(room))
    for epoch in range(5):
        hosts.epoch(epoch)
    held = hosts.held()
    met = len(hosts.reads)
    assert set(held.values()) <= {1}
    assert len(held) == min(met, in_all)
    if met <= in_all:
        assert set(hosts.reads.values()) <= {1}


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=60, max_size=60),
    machines=st.integers(1, 4),
    room=st.integers(1000, 30_000),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=30, deadline=None)
def test_with_samples_of_different_sizes_all_are_kept_or_every_machine_is_full(
    sizes: list[int], machines: int, room: int, seed: int
) -> None:
    hosts = Hosts(60, [room] * machines, sizes=lambda key: sizes[key], seed=seed)
    for epoch in range(4):
        hosts.epoch(epoch)
    full = all(host.holdings.full for host in hosts.hosts.values())
    assert full or hosts.held().keys() == hosts.reads.keys()
    for host in hosts.hosts.values():
        assert sum(sizes[key] for key in host.store) <= room


@given(data=st.data(), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_machines_that_die_join_and_restart_cost_reads_and_nothing_else(
    data: st.DataObject, seed: int
) -> None:
    """Machines have stale views for up to half a second after each change."""
    hosts = Hosts(80, [ROOMY] * 4, seed=seed)
    hosts.epoch(0)
    hosts.epoch(1)
    killed = False
    for epoch in range(2, 4):
        hosts.begin_epoch(epoch)
        for number in range(data.draw(st.integers(0, 3), label="changes")):
            hosts.run(data.draw(st.sampled_from([0.0, 0.002, 0.01, 0.3, 0.8]), label="after"))
            running = sorted(hosts.hosts)
            change = data.draw(st.sampled_from(["kill", "restart", "join"]), label="change")
            if change == "join":
                hosts.start(f"x{epoch}{number}", ROOMY)
            elif len(running) > 2:
                name = data.draw(st.sampled_from(running), label="machine")
                hosts.kill(name)
                killed = True
                if change == "restart":
                    hosts.start(name, ROOMY)
        assert hosts.run(60.0, hosts.is_done)
        hosts.check()
        hosts.run(1.0)
    if not killed:
        assert set(hosts.reads.values()) == {1}
    # Once all is calm, no sample is read twice, whatever has happened before.
    calm = hosts.reads.copy()
    for epoch in range(4, 7):
        hosts.epoch(epoch)
    read = Counter(hosts.reads)
    read.subtract(calm)
    assert max(read.values()) <= 1


@given(joins=st.integers(1, 4), seed=st.integers(0, 10_000), after=st.floats(0.0, 0.1))
@settings(max_examples=30, deadline=None)
def test_a_join_causes_no_read(joins: int, seed: int, after: float) -> None:
    """New machines have huge caches, and take none of the samples that others hold."""
    hosts = Hosts(80, [ROOMY] * 3, seed=seed)
    hosts.epoch(0)
    hosts.epoch(1)
    hosts.begin_epoch(2)
    hosts.run(after)
    for number in range(joins):
        hosts.start(f"x{number}", 1000 * ROOMY)
    assert hosts.run(60.0, hosts.is_done)
    hosts.epoch(3)
    assert set(hosts.reads.values()) == {1}


def test_a_machine_that_joins_gives_room_for_samples_that_nobody_has() -> None:
    hosts = Hosts(100, [20 * SIZE, 20 * SIZE], seed=1)
    assert [hosts.epoch(epoch) for epoch in range(3)][1:] == [60, 60]
    hosts.start("new", 100 * SIZE)
    hosts.run(1.0)
    hosts.epoch(3)
    assert [hosts.epoch(epoch) for epoch in range(4, 6)] == [0, 0]
    assert len(hosts.held()) == 100


def test_what_was_read_while_a_machine_was_away_is_not_read_again_when_it_is_back() -> None:
    hosts = Hosts(60, [ROOMY] * 3, seed=2)
    hosts.epoch(0)
    hosts.kill("m0")
    hosts.run(1.0)
    hosts.epoch(1)
    hosts.epoch(2)
    read = hosts.reads.copy()
    assert read.total() > 60
    again = {key for key, count in read.items() if count == 2}
    hosts.start("m0", ROOMY)
    hosts.run(1.0)
    hosts.epoch(3)
    hosts.epoch(4)
    assert {key for key in again if hosts.reads[key] > 2} == set()
    # It has its own samples again, so that they are found with the first request.
    placement = hosts.hosts["m1"].partition._placement
    asked = {key for key in range(60) if placement.owner(key) == "m0"}
    assert asked <= hosts.hosts["m0"].store.keys()


@given(silent=st.integers(0, 3), seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_machine_that_never_answers_costs_reads_and_a_short_wait(silent: int, seed: int) -> None:
    """It is still in the view of all others, and no connection is reset."""
    hosts = Hosts(48, [ROOMY] * 4, seed=seed)
    hosts.epoch(0)
    started = hosts.now
    hosts.silent.add(f"m{silent}")
    hosts.begin_epoch(1)
    batches = 3
    assert hosts.run(batches * (2 * MOST_DELAY + 0.1), hosts.is_done)
    hosts.check()
    assert hosts.now > started
    others = [host for name, host in hosts.hosts.items() if name != f"m{silent}"]
    hedged = sum(host.partition.counts.hedged for host in others)
    assert hedged == hosts.reads.total() - 48


@pytest.mark.parametrize("total_bytes", [1, 5 * SIZE, 40 * SIZE])
def test_few_credits_slow_a_machine_down_and_do_not_stop_it(total_bytes: int) -> None:
    hosts = Hosts(96, [ROOMY] * 3, seed=4, total_bytes=total_bytes, ahead=4)
    for epoch in range(3):
        hosts.epoch(epoch)
    assert set(hosts.reads.values()) == {1}
