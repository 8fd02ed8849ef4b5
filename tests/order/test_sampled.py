"""A user's sampler: its batches, the same batches on a resume, and unchanged global generators."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError, StateError
from penstock.order import BatchKeys, Cursor, Deal, Sampled, Sequential

Shown = tuple[int, int, list[int], list[int]]


def shown(batch: BatchKeys) -> Shown:
    copies = [0] * len(batch.indices) if batch.replicas is None else batch.replicas.tolist()
    return batch.epoch, batch.number, batch.indices.tolist(), copies


def dealt(plan: Sampled, cursor: Cursor) -> list[Shown]:
    return [shown(batch) for batch in plan.batches(cursor)]


def cursor_after(plan: Sampled, cursor: Cursor, batches: int) -> Cursor:
    for batch in itertools.islice(plan.batches(cursor), batches):
        cursor = plan.after(cursor, batch)
    return cursor


class Drawing:
    """A user's sampler that draws from the global generators, one index at a time."""

    def __init__(self, n: int, count: int | None) -> None:
        self.n = n
        self.count = count

    def __iter__(self) -> Iterator[int]:
        for _ in itertools.count() if self.count is None else range(self.count):
            yield (random.randrange(self.n) + int(np.random.randint(self.n))) % self.n


class Bucketed:
    """A user's batch sampler, with batches of random sizes from the global generators."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(8):
            yield np.random.randint(0, 10, size=random.randint(1, 5)).tolist()


@settings(deadline=None)
@given(
    drawn=st.lists(st.integers(0, 9), max_size=40),
    batch_size=st.integers(1, 7),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_a_list_of_indices_is_cut_into_batches_numbered_and_resumed(
    drawn: list[int], batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    plan = Sampled(drawn, 10, 0, batch_size, drop_last)
    cut = [drawn[k : k + batch_size] for k in range(0, len(drawn), batch_size)]
    if drop_last and cut and len(cut[-1]) < batch_size:
        cut.pop()
    seen: list[int] = []
    expected = []
    for number, indices in enumerate(cut):
        copies = []
        for index in indices:
            copies.append(seen.count(index))
            seen.append(index)
        expected.append((3, number, indices, copies))
    assert dealt(plan, Cursor(3)) == expected
    assert plan.length(Cursor(3)) == len(expected)

    stop = data.draw(st.integers(0, len(expected)))
    cursor = cursor_after(plan, Cursor(3), stop)
    assert cursor == (3, sum(len(indices) for indices in cut[:stop]), stop)
    assert dealt(plan, cursor) == expected[stop:]
    assert plan.length(cursor) == len(expected) - stop

    other = data.draw(st.integers(1, 7))
    rest = [i for b in dealt(Sampled(drawn, 10, 0, other), cursor) for i in b[2]]
    assert rest == drawn[cursor.position :]


@settings(deadline=None)
@given(
    drawn=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=12),
    data=st.data(),
)
def test_lists_of_a_batch_sampler_are_the_batches(
    drawn: list[list[int]], data: st.DataObject
) -> None:
    plan = Sampled(drawn, 10, 0)
    whole = dealt(plan, Cursor())
    assert [b[2] for b in whole] == drawn
    stop = data.draw(st.integers(0, len(drawn)))
    cursor = cursor_after(plan, Cursor(), stop)
    assert dealt(plan, cursor) == whole[stop:]
    assert plan.length(cursor) == len(drawn) - stop


@pytest.mark.parametrize("kind", [tuple, np.array, iter])
def test_a_batch_may_be_any_iterable_of_indices(kind: Any) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter([kind([3, 1]), kind([2])])

    assert [b[2] for b in dealt(Sampled(Batches(), 4, 0), Cursor())] == [[3, 1], [2]]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64), epoch=st.integers(0, 9), stop=st.integers(0, 12))
def test_a_sampler_on_the_global_generators_yields_the_same_after_a_resume(
    seed: int, epoch: int, stop: int
) -> None:
    cursor = Cursor(epoch)
    for plan in (Sampled(Drawing(10, 50), 10, seed, 4), Sampled(Bucketed(), 10, seed)):
        random.seed(1)
        np.random.seed(1)
        whole = dealt(plan, cursor)
        resumed_at = cursor_after(plan, cursor, stop)
        random.seed(2)
        np.random.seed(2)
        assert dealt(plan, resumed_at) == whole[stop:]
        assert dealt(plan, Cursor(epoch + 1)) != whole


def test_two_epochs_or_seeds_of_a_sampler_differ() -> None:
    found = {
        str([b[2] for b in dealt(Sampled(Drawing(10, 30), 10, seed, 4), Cursor(epoch))])
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(found) == 9


def test_a_sampler_does_not_change_the_random_numbers_of_the_training_loop() -> None:
    random.seed(7)
    np.random.seed(7)
    undisturbed = [(random.random(), np.random.random()) for _ in range(4)]
    random.seed(7)
    np.random.seed(7)
    alone = [b[2] for b in dealt(Sampled(Drawing(10, 12), 10, 0, 3), Cursor())]
    found, among = [], []
    for batch in Sampled(Drawing(10, 12), 10, 0, 3).batches(Cursor()):
        among.append(batch.indices.tolist())
        found.append((random.random(), np.random.random()))
    assert found == undisturbed
    assert among == alone


def test_a_sampler_that_fails_does_not_change_the_global_generators() -> None:
    class Failing:
        def __iter__(self) -> Iterator[int]:
            yield random.randrange(2)
            raise RuntimeError("no more")

    random.seed(3)
    expected = random.random()
    random.seed(3)
    batches = Sampled(Failing(), 2, 0, 1).batches(Cursor())
    next(batches)
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)
    assert random.random() == expected


def test_an_infinite_sampler_is_drawn_one_batch_at_a_time() -> None:
    pulled = []

    class Endless:
        def __iter__(self) -> Iterator[int]:
            for k in itertools.count():
                pulled.append(k)
                yield k % 5

    plan = Sampled(Endless(), 5, 0, 4)
    assert plan.length(Cursor()) is None
    batches = plan.batches(Cursor())
    assert shown(next(batches)) == (0, 0, [0, 1, 2, 3], [0, 0, 0, 0])
    assert shown(next(batches)) == (0, 1, [4, 0, 1, 2], [0, 1, 1, 1])
    assert pulled == list(range(8))


def test_the_next_epoch_of_a_sampler_may_not_be_requested_early() -> None:
    assert Deal(Sequential(), 1, 0, 1).ahead
    assert not Sampled([0], 1, 0, 1).ahead


@pytest.mark.parametrize(
    ("sampler", "batch_size", "message"),
    [
        (
            [0, 1.0],
            2,
            r"sampler \(list\) yielded 1.0 as sample 1 of its epoch, which is not an index",
        ),
        ([0, True], 2, "yielded True"),
        (["a"], 2, "Yield whole numbers"),
        ([[0, 1]], 2, "Give it as a batch sampler, without a batch_size"),
        ([0, 1, 5], 2, r"yielded 5 as sample 2 of its epoch, but the source has 5 samples"),
        ([-1], 2, "yielded -1"),
        ([0, 1], None, r"batch sampler \(list\) yielded 0, but .* Give it as a sampler"),
        ([[0], []], None, "an empty batch, as number 1 of its epoch"),
        ([[0], [1, None]], None, "yielded None as sample 2 of its epoch"),
        ([np.array([0.5])], None, "yielded 0.5"),
    ],
)
def test_invalid_indices_of_a_sampler_are_an_error_that_names_them(
    sampler: Any, batch_size: int | None, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        list(Sampled(sampler, 5, 0, batch_size).batches(Cursor()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": 5}, "cannot be iterated"),
        ({"sampler": (k for k in range(3))}, "only once"),
        ({"sampler": itertools.cycle([1])}, "only once"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "4"}, "batch_size is '4'"),
        ({"n": -1}, "n is -1"),
        ({"batch_size": None, "drop_last": True}, "drop_last has no effect here"),
    ],
)
def test_invalid_arguments_are_an_error_when_the_plan_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        Sampled(**{"sampler": [0], "n": 3, "seed": 0, "batch_size": 1, **arguments})


@pytest.mark.parametrize(
    ("plan", "cursor"),
    [
        (Sampled([0, 1, 2], 3, 0, 2), Cursor(0, 4, 2)),
        (Sampled([[0, 1], [2]], 3, 0), Cursor(0, 5, 3)),
        (Sampled([[0, 1], [2]], 3, 0), Cursor(0, 1, 1)),
    ],
)
def test_resuming_a_sampler_that_does_not_replay_is_an_error(plan: Sampled, cursor: Cursor) -> None:
    with pytest.raises(StateError, match="It is another sampler, or"):
        list(plan.batches(cursor))


def test_a_sampler_without_a_generator_has_no_state_to_keep() -> None:
    plan = Sampled([0, 1], 2, 0, 1)
    assert plan.epoch_state() is None
    plan.restore(None)
    with pytest.raises(StateError, match="no generator of its own"):
        plan.restore(b"state")


def with_generator(torch: Any, seed: int, batched: bool) -> Sampled:
    data = torch.utils.data
    generator = torch.Generator().manual_seed(seed)
    sampler = data.RandomSampler(range(40), generator=generator)
    if batched:
        return Sampled(data.BatchSampler(sampler, 4, drop_last=False), 40, 0)
    return Sampled(sampler, 40, 0, 4)


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_with_a_torch_generator_of_its_own_is_resumed(batched: bool) -> None:
    torch = pytest.importorskip("torch")
    plan = with_generator(torch, 5, batched)
    first, second = dealt(plan, Cursor(0)), dealt(plan, Cursor(1))
    assert [b[2] for b in first] != [b[2] for b in second]

    state, begun = plan.epoch_state(), plan.epoch_state(0)
    assert state != begun
    for epoch, start, whole in ((0, begun, first), (1, state, second)):
        resumed = with_generator(torch, 99, batched)
        resumed.restore(start)
        assert dealt(resumed, Cursor(epoch, 12, 3)) == whole[3:]
        assert resumed.epoch_state() == start

    # The checkpoint of a run that is between two epochs.
    between = with_generator(torch, 99, batched)
    between.restore(plan.epoch_state(2))
    assert dealt(between, Cursor(2)) == dealt(plan, Cursor(2))


def test_an_epoch_repeated_in_the_same_process_is_the_same() -> None:
    torch = pytest.importorskip("torch")
    plan = with_generator(torch, 5, batched=False)
    fresh = plan.epoch_state()
    whole = dealt(plan, Cursor(0))
    assert plan.epoch_state() == fresh
    assert dealt(plan, Cursor(0, 8, 2)) == whole[2:]


def test_a_loaded_checkpoint_overrides_the_state_of_the_same_process() -> None:
    torch = pytest.importorskip("torch")
    plan, other = with_generator(torch, 5, batched=False), with_generator(torch, 6, batched=False)
    assert dealt(plan, Cursor(0)) != dealt(other, Cursor(0))
    plan.restore(other.epoch_state())
    assert dealt(plan, Cursor(0)) == dealt(other, Cursor(0))


def test_a_sampler_that_draws_from_torch_per_index_continues_its_stream() -> None:
    torch = pytest.importorskip("torch")

    class PerIndex:
        def __iter__(self) -> Iterator[int]:
            for _ in range(30):
                yield int(torch.randint(1000, ()))

    one = dealt(Sampled(PerIndex(), 1000, 0, 30), Cursor())
    cut = []
    for batch in Sampled(PerIndex(), 1000, 0, 4).batches(Cursor()):
        cut += batch.indices.tolist()
        torch.manual_seed(0)
    assert cut == one[0][2]


def test_an_invalid_generator_state_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(StateError, match="rejects the state"):
        with_generator(torch, 5, batched=False).restore(b"short")


def test_torch_samplers_on_the_global_generator_are_reproducible_and_leave_it_alone() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    plan = Sampled(data.RandomSampler(range(20), replacement=True, num_samples=90), 20, 3, 8)
    assert plan.length(Cursor()) == 12
    torch.manual_seed(1)
    expected = [torch.rand(1).item() for _ in range(13)]
    torch.manual_seed(1)
    found = [torch.rand(1).item()]
    whole = []
    for batch in plan.batches(Cursor(4)):
        whole.append(shown(batch))
        found.append(torch.rand(1).item())
    assert found == expected
    torch.manual_seed(2)
    assert dealt(plan, Cursor(4, 40, 5)) == whole[5:]
    assert dealt(plan, Cursor(5)) != whole


def test_a_sampler_may_yield_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert dealt(Sampled(torch.tensor([2, 0, 1]), 3, 0, 2), Cursor())[0][2] == [2, 0]
    assert dealt(Sampled([torch.tensor([2, 0, 1])], 3, 0), Cursor())[0][2] == [2, 0, 1]
