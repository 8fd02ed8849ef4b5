"""Placement: balanced owners on which all machines agree, and few keys that move."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.membership import Machine
from penstock.cluster.placement import NOBODY, FirstOwners, Placement
from penstock.errors import PipelineError
from penstock.order import Deal, Sequential, Shuffled
from tests.support import ROOT

ROOM = 1 << 30


def machines(*names: str, room: int = ROOM) -> list[Machine]:
    return [Machine(name, f"{name}:1", 1, cache_bytes=room) for name in names]


def named(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


def owners(placement: Placement, samples: int) -> list[str]:
    places = placement.owners(np.arange(samples))
    return [placement.names[place] for place in places]


def undealt(samples: int, fingerprint: str = "f") -> FirstOwners:
    """No sample has a first owner: all are placed by their scores."""
    return FirstOwners(fingerprint, (), np.full(samples, NOBODY, dtype=np.uint16))


def by_rank(deal: Deal) -> list[list[int]]:
    return [replace(deal, rank=rank).rank_samples(0)[0].tolist() for rank in range(deal.world)]


@given(
    n=st.integers(0, 80),
    world=st.integers(1, 9),
    on_machine=st.integers(1, 3),
    seed=st.integers(0, 99),
    tail=st.sampled_from(["pad", "drop"]),
)
@settings(deadline=None)
def test_the_owner_is_the_machine_that_meets_a_sample_first(
    n: int, world: int, on_machine: int, seed: int, tail: Literal["pad", "drop"]
) -> None:
    deal = Deal(Shuffled(), n, seed, batch_size=3, world=world, tail=tail)
    machine_of_rank = [f"m{rank // on_machine}" for rank in range(world)]
    layout = FirstOwners.first_epoch("f", deal, machine_of_rank)
    first: dict[int, str] = {}
    for dealt in zip(*by_rank(deal), strict=True):
        for rank, index in enumerate(dealt):
            first.setdefault(index, machine_of_rank[rank])
    found = {
        index: layout.names[owner]
        for index, owner in enumerate(layout.owner_of.tolist())
        if owner != NOBODY
    }
    assert found == first


@given(n=st.integers(1, 300), world=st.integers(1, 12), seed=st.integers(0, 99))
@settings(deadline=None)
def test_first_owners_are_balanced_to_one_sample(n: int, world: int, seed: int) -> None:
    deal = Deal(Shuffled(), n, seed, batch_size=4, world=world, tail="drop")
    layout = FirstOwners.first_epoch("f", deal, named(world))
    counts = np.bincount(layout.owner_of[layout.owner_of != NOBODY], minlength=world)
    assert counts.max() - counts.min() <= 1


def test_the_rank_of_the_machine_that_computes_the_layout_does_not_matter() -> None:
    deal = Deal(Shuffled(), 50, 3, batch_size=4, world=3)
    layouts = [FirstOwners.first_epoch("f", replace(deal, rank=r), named(3)) for r in range(3)]
    assert layouts[0].owner_of.tolist() == layouts[1].owner_of.tolist()
    assert layouts[0].owner_of.tolist() == layouts[2].owner_of.tolist()


def test_the_number_of_machines_must_be_that_of_the_ranks() -> None:
    deal = Deal(Sequential(), 8, 0, batch_size=2, world=2)
    with pytest.raises(PipelineError, match="2 ranks, but machines for 3"):
        FirstOwners.first_epoch("f", deal, named(3))
    with pytest.raises(PipelineError, match="at least one machine"):
        Placement(undealt(4), [])


def test_all_machines_agree_whatever_the_order_of_their_list_and_their_process() -> None:
    """Hashes of strings differ between processes; owners must not."""
    layout = undealt(200)
    listed = machines(*named(7))
    here = owners(Placement(layout, listed), 200)
    assert owners(Placement(layout, listed[::-1]), 200) == here
    code = (
        "from tests.cluster.test_placement import *\n"
        "print(','.join(owners(Placement(undealt(200), machines(*named(7))), 200)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().split(",") == here


def test_scores_share_samples_by_room() -> None:
    listed = [*machines("a", "b", "c"), *machines("wide", room=3 * ROOM), *machines("no", room=0)]
    counts = Counter(owners(Placement(undealt(60_000), listed), 60_000))
    assert "no" not in counts
    for name, share in (("a", 1 / 6), ("b", 1 / 6), ("c", 1 / 6), ("wide", 1 / 2)):
        expected = 60_000 * share
        # Five standard deviations of a binomial distribution.
        assert abs(counts[name] - expected) < 5 * (expected * (1 - share)) ** 0.5


def test_different_caches_are_placed_differently() -> None:
    one = owners(Placement(undealt(300, "f"), machines(*named(5))), 300)
    other = owners(Placement(undealt(300, "g"), machines(*named(5))), 300)
    same = sum(a == b for a, b in zip(one, other, strict=True))
    assert 20 < same < 110  # a fifth


@given(
    size=st.integers(2, 10),
    gone=st.integers(0, 9),
    dealt=st.booleans(),
    seed=st.integers(0, 30),
)
@settings(max_examples=50, deadline=None)
def test_a_machine_that_leaves_moves_its_samples_and_no_others(
    size: int, gone: int, dealt: bool, seed: int
) -> None:
    n, names = 400, named(size)
    leaver = names[gone % size]
    deal = Deal(Shuffled(), n, seed, batch_size=4, world=size, tail="drop")
    layout = FirstOwners.first_epoch("f", deal, names) if dealt else undealt(n)
    before = owners(Placement(layout, machines(*names)), n)
    after = owners(Placement(layout, machines(*(x for x in names if x != leaver))), n)
    moved = {index for index in range(n) if before[index] != after[index]}
    assert moved == {index for index in range(n) if before[index] == leaver}
    # About 1/n of all, and spread over the others.
    assert len(moved) <= 400 / size + 5 * (400 / size) ** 0.5
    if size > 2 and len(moved) > 60:
        assert len({after[index] for index in moved}) >= 2
    # It takes back exactly these when it returns.
    assert owners(Placement(layout, machines(*names)), n) == before


@given(size=st.integers(1, 10), room=st.integers(1, 100), seed=st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_a_machine_that_joins_takes_nothing_from_first_owners(
    size: int, room: int, seed: int
) -> None:
    n, names = 400, named(size)
    deal = Deal(Shuffled(), n, seed, batch_size=4, world=size, tail="drop")
    layout = FirstOwners.first_epoch("f", deal, names)
    joined = [*machines(*names), *machines("new", room=room * ROOM)]
    before = owners(Placement(layout, machines(*names)), n)
    after = owners(Placement(layout, joined), n)
    moved = [index for index in range(n) if before[index] != after[index]]
    assert all(layout.owner_of[index] == NOBODY for index in moved)


@given(size=st.integers(1, 10))
@settings(deadline=None)
def test_a_machine_that_joins_takes_its_share_of_samples_without_a_first_owner(size: int) -> None:
    n, names = 2000, named(size)
    before = owners(Placement(undealt(n), machines(*names)), n)
    after = owners(Placement(undealt(n), machines(*names, "new")), n)
    moved = [index for index in range(n) if before[index] != after[index]]
    assert {after[index] for index in moved} == {"new"}
    share = n / (size + 1)
    assert abs(len(moved) - share) < 5 * share**0.5


@given(size=st.integers(1, 9), index=st.integers(0, 99), without=st.integers(0, 8))
@settings(deadline=None)
def test_the_preference_begins_with_the_owner_and_keeps_its_order(
    size: int, index: int, without: int
) -> None:
    names = named(size)
    deal = Deal(Shuffled(), 100, 0, batch_size=4, world=size, tail="drop")
    layout = FirstOwners.first_epoch("f", deal, names)
    placement = Placement(layout, machines(*names))
    order = placement.preference(index)
    assert order[0] == placement.owner(index)
    assert sorted(order) == sorted(names)
    rest = [name for name in names if name != names[without % size]]
    if rest:
        smaller = Placement(layout, machines(*rest)).preference(index)
        assert smaller == [name for name in order if name in rest]


def test_a_machine_without_room_is_last_resort_only_as_owner() -> None:
    layout = FirstOwners("f", ("a", "b"), np.array([0, 1], dtype=np.uint16))
    listed = [*machines("a", room=0), *machines("b", "c")]
    placement = Placement(layout, listed)
    assert placement.preference(0)[0] == "a"
    assert "a" not in placement.preference(1)
    # If no machine has room, one must own the samples all the same.
    nowhere = Placement(undealt(50), machines("a", "b", room=0))
    assert set(owners(nowhere, 50)) == {"a", "b"}
