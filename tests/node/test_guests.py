"""Guests: tiny-batches that a node prepares for other machines, and what it refuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cluster.protocol import LARGEST_VALUE, READ, RemoteTask, integers
from penstock.cluster.recipes import CourierLate, RecipeContent, RecipeName, Recipes
from penstock.cluster.transport import PeerLost, Refuse, RemoteRows
from penstock.engine.build import Recipe
from penstock.engine.pools.wire import pack_integers
from penstock.node import guests
from penstock.node.guests import MOST_GUESTS, UNUSED, Guests
from penstock.node.staging import WorkerLimit
from penstock.options import Options
from penstock.serialize import pack
from penstock.stops.batch import stack
from penstock.store.plain import pack_sample, unpack_sample
from tests.support.fabric import VirtualClock

SAMPLES = 12


def kills_its_worker(number: int) -> int:
    if number == 5:
        os._exit(3)
    return number


class Machine:
    """A machine that lends two cores, and the recipe of a job on another one."""

    turn: Callable[[bytes], bytes] = bytes
    """What becomes of a sample between two caches."""

    def __init__(self, place: Path, pipeline: ps.Pipeline | None = None) -> None:
        self.files = [place / f"{number}.bin" for number in range(SAMPLES)]
        for number, file in enumerate(self.files):
            file.write_bytes(bytes([number]) * (number + 1))
        user_code = pipeline is not None
        pipeline = pipeline or files_of(place).batch(4)
        frame = bytes(pack(Recipe(pipeline, Options(seed=3), stack)).tobytes())
        path = tuple(sys.path) if user_code else ()
        content = RecipeContent(path, str(place), user_code, frame)
        self.name = Recipes(place / "recipes").publish("identity", content)
        self.clock = VirtualClock()
        self.limit = WorkerLimit(2)
        self.recipes = Recipes(place / "recipes")
        self.caches = Caches()
        self.guests = Guests(self.recipes, self.caches, self.limit, 2, self.clock)

    def run(
        self, *indices: int, recipe: RecipeName | None = None, held: Sequence[int] = ()
    ) -> RemoteRows:
        """``held``: by sample, 1 + the number of the cache that has it, or 0."""
        packed = pack_integers(np.array(indices, np.int64)) or b""
        caches = ["raw", "turned"] if held else []
        name = str(recipe or self.name)
        task = RemoteTask(name, 0, packed, None, LARGEST_VALUE, caches, bytes(held))
        [rows] = self.guests.run("trainer", task)
        return rows

    def refusal(
        self, *indices: int, recipe: RecipeName | None = None, held: Sequence[int] = ()
    ) -> Refuse:
        with pytest.raises(Refuse) as caught:
            self.run(*indices, recipe=recipe, held=held)
        return caught.value


class Caches:
    """The caches of the machine that lends, ``trainer``, and of this one, ``here``."""

    def __init__(self) -> None:
        self.trainer: dict[tuple[str, int], Any] = {}
        self.here: dict[tuple[str, int], Any] = {}
        self.asked: list[tuple[str, str, list[int]]] = []

    def lent_here(self, content: str, indices: Sequence[int]) -> list[Any]:
        return [self.here.get((content, index)) for index in indices]

    def ask_lent(self, machine: str, content: str, indices: Sequence[int]) -> list[Any]:
        self.asked.append((machine, content, list(indices)))
        if not self.trainer:
            raise PeerLost("the trainer is gone")
        return [self.trainer.get((content, index)) for index in indices]


def files_of(place: Path) -> ps.Pipeline:
    names = [str(place / f"{number}.bin") for number in range(SAMPLES)]
    return ps.from_files(names, list(range(SAMPLES)))


def sample(text: str, number: int) -> memoryview:
    return memoryview(pack_sample((text.encode(), number)).tobytes())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.guests.close()
    assert made.limit.busy == 0


def test_a_tiny_batch_comes_back_as_one_buffer_for_each_field(machine: Machine) -> None:
    rows = machine.run(7, 2, 11)
    assert (rows.first, rows.rows) == (0, 3)
    [labels] = rows.leaves
    assert np.frombuffer(labels, np.int64).tolist() == [7, 2, 11]
    assert rows.report["objects"] == {"0": [bytes([n]) * (n + 1) for n in (7, 2, 11)]}
    assert rows.report["layout"] == [[""], ["<i8"]]
    assert rows.report["busy"] >= 0
    assert rows.report["idle"] == 2
    [guest] = machine.guests.status()
    assert (guest["tiny_batches"], guest["samples"]) == (1, 3)


def test_samples_that_cannot_be_prepared_here_are_refused_and_others_go_on(
    machine: Machine,
) -> None:
    machine.files[5].unlink()
    refusal = machine.refusal(4, 5)
    assert refusal.kind == "sample"
    assert "5.bin" in refusal.reason
    assert machine.run(4, 6).rows == 2


def test_a_pipeline_that_this_machine_cannot_get_is_refused_with_the_remedy(
    machine: Machine,
) -> None:
    refusal = machine.refusal(1, recipe=RecipeName("other", "00"))
    assert refusal.kind == "recipe"
    assert "PENSTOCK_CLUSTER_RECIPES" in refusal.reason
    assert machine.run(1).rows == 1


def test_a_name_that_names_no_recipe_is_nonsense(machine: Machine) -> None:
    assert machine.refusal(1, recipe=RecipeName("../x", "y")).kind == "nonsense"


def test_a_machine_whose_own_jobs_use_its_cores_is_busy(machine: Machine) -> None:
    class Job:
        guest = limited = False
        load = 0.0

    machine.limit.add(Job())  # type: ignore[arg-type]
    [job] = machine.limit._taken
    assert machine.limit.begin(1.5, job)
    assert machine.refusal(1).kind == "busy"
    machine.limit.end(1.5, job)
    assert machine.run(1).rows == 1
    machine.limit._taken.pop(job)


def test_workers_that_nobody_needs_end(machine: Machine) -> None:
    machine.run(1)
    machine.guests.tick()
    assert len(machine.guests.status()) == 1
    machine.clock.advance(UNUSED + 1)
    machine.guests.tick()
    assert machine.guests.status() == []
    assert machine.run(2).rows == 1, "they start again when they are needed"


def test_a_machine_that_lends_other_cores_begins_anew(machine: Machine) -> None:
    machine.run(1)
    machine.guests.lend(5)
    assert machine.guests.status() == []
    assert machine.limit.size == 5
    assert machine.run(1).report["idle"] == 5
    machine.guests.lend(0)
    assert machine.refusal(1).kind == "busy"


def test_a_machine_serves_a_limited_number_of_pipelines(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MOST_GUESTS):
        assert machine.refusal(1, recipe=RecipeName(f"other{number}", "00")).kind == "recipe"
    assert machine.run(1).rows == 1, "pipelines that it does not have take no place"
    monkeypatch.setattr(guests, "MOST_GUESTS", 1)
    machine.guests.close()
    recipes = Recipes(machine.files[0].parent / "recipes")
    again = machine.guests = Guests(recipes, machine.caches, machine.limit, 2, machine.clock)
    assert machine.run(1).rows == 1
    assert machine.refusal(1, recipe=RecipeName("other", "00")).kind == "busy"
    assert len(again.status()) == 1


def test_a_sample_that_kills_workers_is_found_and_others_go_on(tmp_path: Path) -> None:
    numbers = ps.from_dataset(np.arange(SAMPLES)).map(kills_its_worker, random=False)
    machine = Machine(tmp_path, numbers.batch(4))
    try:
        refusal = machine.refusal(4, 5, 6)
        assert refusal.kind == "deadly"
        assert "index 5" in refusal.reason
        [values] = machine.run(4, 6).leaves
        assert np.frombuffer(values, np.int64).tolist() == [4, 6]
    finally:
        machine.guests.close()
    assert machine.limit.busy == 0


def turned(data: bytes) -> bytes:
    return data[::-1]


@pytest.fixture(params=["threads", "processes"])
def cached(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A pipeline with two caches. Code of users, here between the caches, runs in processes."""
    pipeline = files_of(tmp_path).cache("1MB")
    if request.param == "processes":
        pipeline = pipeline.map(turned, on=0, random=False)
    made = Machine(tmp_path, pipeline.cache("1MB").batch(4))
    made.turn = turned if request.param == "processes" else bytes
    yield made
    made.guests.close()
    assert made.limit.busy == 0


def read_values(rows: RemoteRows) -> dict[tuple[int, int], tuple[bytes, int]]:
    """The samples that go back, by number of the cache and place."""
    if "read" not in rows.report:
        return {}
    values, first, found = memoryview(rows.leaves[-1]), 0, {}
    for number, place, size in integers(rows.report["read"]).reshape(-1, 3).tolist():
        packed = values[first : first + size]
        found[number, place] = unpack_sample(packed, lambda: False)
        first += size
    assert first == len(values)
    return found


def test_what_the_caches_of_the_other_machine_have_is_not_read_and_the_rest_goes_back(
    cached: Machine,
) -> None:
    cached.caches.trainer = {("raw", 1): sample("lent raw", 1), ("turned", 2): sample("lent", 2)}
    cached.caches.here = {("turned", 4): sample("here", 4)}
    for number in (1, 2, 4):
        cached.files[number].unlink()  # so reading it would fail
    cached.files[3].write_bytes(b"file")
    rows = cached.run(1, 2, 3, 4, held=[1, 2, 0, 2])
    turn = cached.turn
    assert rows.report["objects"] == {"0": [turn(b"lent raw"), b"lent", turn(b"file"), b"here"]}
    assert read_values(rows) == {
        (0, 2): (b"file", 3),
        (1, 0): (turn(b"lent raw"), 1),
        (1, 2): (turn(b"file"), 3),
    }
    assert cached.caches.asked == [("trainer", "raw", [1]), ("trainer", "turned", [2])]
    assert rows.report["borrowed"] == sum(map(len, cached.caches.trainer.values()))
    # What no machine has room for is not sent back.
    assert read_values(cached.run(3, held=[READ])) == {}
    # Nothing stays: the next tiny-batch reads the file again.
    cached.files[3].write_bytes(b"other")
    assert cached.run(3, held=[0]).report["objects"] == {"0": [turn(b"other")]}


def test_a_sample_that_the_other_machine_has_and_does_not_send_is_not_read(
    cached: Machine,
) -> None:
    assert cached.refusal(3, held=[1]).kind == "busy"
    cached.caches.trainer = {("raw", 1): sample("lent", 1)}
    refusal = cached.refusal(1, 3, held=[1, 1])
    assert (refusal.kind, refusal.reason) == (
        "sample",
        "samples of the cache were not sent with it",
    )
    assert cached.refusal(1).kind == "failed", "the task does not know of the caches"
    assert cached.run(1, 3, held=[1, 0]).rows == 2


def test_nothing_is_prepared_after_the_end(machine: Machine) -> None:
    machine.guests.close()
    assert machine.refusal(1).kind == "busy"


class LateCourier:
    """Does not answer in time."""

    name = "Ray"

    def publish(self, digest: str, content: bytes) -> None: ...

    asked = 0

    def fetch(self, digest: str, *, timeout: float) -> bytes | None:
        self.asked += 1
        raise CourierLate("the keeper of this machine does not answer: timed out")

    def withdraw(self, digest: str) -> None: ...


def test_a_courier_that_is_late_is_asked_again_later(machine: Machine) -> None:
    courier = LateCourier()
    machine.recipes.add_courier(courier)
    for _ in range(4):  # the other machine asks again and again
        refusal = machine.refusal(1, recipe=RecipeName("other", "00"))
        assert refusal.kind == "busy"
        assert "timed out" in refusal.reason
        machine.clock.now += 20.0
        machine.guests.tick()
    assert courier.asked == 2
