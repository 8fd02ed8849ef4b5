"""Where Ray's nodes are placed, which of them are seeds, and what the supervisor does about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from penstock.cluster.placing import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    UNUSED,
    ForgetKeeper,
    KeeperReport,
    NodePlacement,
    PlaceKeeper,
    PlacementOptions,
    RayMachine,
)
from penstock.cluster.ray import Supervisor
from penstock.cluster.secrets import Secrets
from penstock.errors import ClusterError

OPTIONS = PlacementOptions(0, 0, stay=True, secret="/secret", fingerprint="f")
FOR_JOBS = PlacementOptions(0, 0, stay=False, secret="/secret", fingerprint="f")
SECRETS = Secrets(b"t" * 32, b"certificate", b"key")


def machines(*names: str, cpus: float = 4.0) -> list[RayMachine]:
    return [RayMachine(name, f"host-{name}", cpus) for name in names]


def inside(name: str, members: int = 0, *, has_secrets: bool = True) -> KeeperReport:
    return KeeperReport("in", f"{name}:1", name, 7, members, has_secrets)


class FakeRay:
    """Machines and keepers without Ray. ``answers``: what the keeper of a machine says."""

    def __init__(self, *names: str, token: bool = True) -> None:
        self.names = list(names)
        self.token = token
        self.placed: list[str] = []
        self.removed: list[str] = []
        self.given: list[tuple[list[str], tuple[str, ...], Secrets | None]] = []
        self.answers: dict[str, KeeperReport | ClusterError | None] = {}
        self.refuses: set[str] = set()

    def machines(self) -> list[RayMachine]:
        return machines(*self.names)

    def place(self, decision: PlaceKeeper, options: PlacementOptions) -> None:
        self.placed.append(decision.machine.node)
        if decision.machine.node in self.refuses:
            raise ClusterError("no room")

    def tend(
        self, nodes: Sequence[str], seeds: tuple[str, ...], secrets: Secrets | None
    ) -> Mapping[str, KeeperReport | ClusterError | None]:
        self.given.append((list(nodes), seeds, secrets))
        return {node: self.answers.get(node, inside(node)) for node in nodes}

    def hand_over(self, node: str) -> Secrets | None:
        return SECRETS

    def remove(self, nodes: Sequence[str]) -> None:
        self.removed += nodes

    def carries_secrets(self) -> bool:
        return self.token


# ----------------------------------------------------------------- decisions


def test_every_machine_gets_one_keeper_and_a_new_machine_too() -> None:
    placement = NodePlacement(OPTIONS, 0.0)
    first, second = machines("a", "b")
    assert placement.look([first, second], 0.0) == [PlaceKeeper(first, 0), PlaceKeeper(second, 0)]
    assert placement.look(machines("a", "b"), 1.0) == []
    assert placement.look(machines("a", "b", "c"), 2.0) == [PlaceKeeper(machines("c")[0], 0)]


def test_a_machine_that_ray_removes_is_forgotten_and_is_no_seed_any_more() -> None:
    placement = NodePlacement(OPTIONS, 0.0)
    placement.look(machines("a", "b", "c", "d"), 0.0)
    for name in "abcd":
        placement.reported(name, inside(name), 1.0)
    before = placement.seeds
    assert placement.look(machines("b", "c", "d"), 2.0) == [ForgetKeeper("a")]
    # Those that stay keep their places: all nodes must agree on the order.
    assert (before, placement.seeds) == (("a:1", "b:1", "c:1"), ("b:1", "c:1", "d:1"))


def test_seeds_are_only_added_to_while_their_machines_are_there() -> None:
    placement = NodePlacement(OPTIONS, 0.0)
    placement.look(machines("a", "b"), 0.0)
    seeds = []
    for name in "ba":
        placement.reported(name, inside(name), 1.0)
        seeds.append(placement.seeds)
    placement.failed("b", "its actor has died", 2.0)
    seeds.append(placement.seeds)
    assert seeds == [("b:1",), ("b:1", "a:1"), ("b:1", "a:1")]


@pytest.mark.parametrize(("cores", "cpus", "taken"), [(0, 8.0, 0), (2, 8.0, 2), (16, 8.0, 8)])
def test_a_keeper_takes_the_cores_it_lends_and_never_more_than_the_machine_has(
    cores: int, cpus: float, taken: int
) -> None:
    placement = NodePlacement(PlacementOptions(cores, 0, True, "", ""), 0.0)
    assert placement.look(machines("a", cpus=cpus), 0.0) == [
        PlaceKeeper(machines("a", cpus=cpus)[0], taken)
    ]


def test_a_keeper_that_fails_is_placed_again_after_pauses_that_double() -> None:
    placement, now, pauses = NodePlacement(OPTIONS, 0.0), 0.0, []
    for _ in range(8):
        assert len(placement.look(machines("a"), now)) == 1
        placement.failed("a", "no room", now)
        begin = now
        while not placement.look(machines("a"), now):
            now += 0.5
        pauses.append(now - begin)
        placement.failed("a", "no room", now)
        now += LONGEST_PAUSE
    assert pauses[0] == FIRST_PAUSE
    assert max(pauses) == LONGEST_PAUSE


def test_a_keeper_that_waits_for_cpus_says_so() -> None:
    placement = NodePlacement(PlacementOptions(2, 0, True, "", ""), 0.0)
    placement.look(machines("a"), 0.0)
    placement.silent("a")
    assert placement.reports["a"][1].reason == "it waits for 2 CPUs of Ray"


def test_nodes_for_jobs_end_when_no_job_has_used_them_for_long() -> None:
    placement = NodePlacement(FOR_JOBS, 0.0)
    placement.look(machines("a", "b"), 0.0)
    placement.reported("a", inside("a"), UNUSED)
    placement.reported("b", inside("b", members=1), UNUSED)
    assert not placement.is_unused(2 * UNUSED)
    assert placement.is_unused(2 * UNUSED + 1)
    assert not NodePlacement(OPTIONS, 0.0).is_unused(1e9)


# ----------------------------------------------------------------- the supervisor


def test_the_supervisor_places_keepers_and_then_tells_them_the_seeds() -> None:
    ray = FakeRay("a", "b")
    supervisor = Supervisor(OPTIONS, ray, 0.0)
    supervisor.secrets = SECRETS
    assert supervisor.look(0.0)
    assert supervisor.look(1.0)
    assert ray.placed == ["a", "b"]
    assert ray.given[0] == (["a", "b"], (), SECRETS)
    assert ray.given[1] == (["a", "b"], ("a:1", "b:1"), SECRETS)


def test_secrets_do_not_go_through_a_ray_that_asks_for_no_token() -> None:
    ray = FakeRay("a", token=False)
    supervisor = Supervisor(OPTIONS, ray, 0.0)
    supervisor.secrets = SECRETS
    for now in range(3):
        supervisor.look(float(now))
    assert [secrets for _, _, secrets in ray.given] == [None, None, None]


def test_a_restarted_supervisor_gets_the_secrets_from_a_keeper() -> None:
    ray = FakeRay("a", "b")
    supervisor = Supervisor(OPTIONS, ray, 0.0)
    supervisor.look(0.0)
    assert ray.given[-1][2] is None
    supervisor.look(1.0)
    assert ray.given[-1][2] is SECRETS


def test_dead_keepers_are_placed_again_and_the_others_are_tended_meanwhile() -> None:
    ray = FakeRay("a", "b")
    ray.refuses = {"b"}
    supervisor = Supervisor(OPTIONS, ray, 0.0)
    supervisor.look(0.0)
    assert ray.given[-1][0] == ["a"]
    assert supervisor.placement.reports["b"][1].reason == "no room"
    ray.refuses, ray.answers = set(), {"a": ClusterError("the actor has died")}
    supervisor.look(FIRST_PAUSE)
    assert ray.given[-1][0] == ["a", "b"]
    ray.answers = {}
    supervisor.look(2 * FIRST_PAUSE)
    assert ray.placed == ["a", "b", "b", "a"]


def test_a_silent_keeper_is_neither_replaced_nor_forgotten() -> None:
    ray = FakeRay("a")
    supervisor = Supervisor(OPTIONS, ray, 0.0)
    supervisor.look(0.0)
    ray.answers = {"a": None}
    for now in range(1, 200):
        supervisor.look(float(now))
    assert ray.placed == ["a"]
    assert supervisor.placement.seeds == ("a:1",)


def test_unused_nodes_are_removed_by_the_supervisor() -> None:
    ray = FakeRay("a", "b")
    supervisor = Supervisor(FOR_JOBS, ray, 0.0)
    assert supervisor.look(0.0)
    assert not supervisor.look(UNUSED + 1)
    assert ray.removed == ["a", "b"]
