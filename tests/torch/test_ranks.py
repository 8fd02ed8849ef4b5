"""Where a loader takes its rank from, in one process; ``test_distributed`` has real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import penstock as ps
import penstock.torch
from penstock import config
from penstock.errors import PipelineError, StateError
from penstock.torch import DataLoader, ranks

DATA = TensorDataset(torch.arange(12))
NUMBERS = ps.from_dataset(np.arange(12)).batch(2)

Group = Callable[[int, int], None]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (*config.LAUNCHERS, ("LOCAL_RANK", "NODE_RANK")):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Pretends that this process is a rank of a group; world 0 destroys the group."""

    def pretend(rank: int, world: int) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world > 0)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)

    return pretend


def drop_in(**options: Any) -> Any:
    return DataLoader(DATA, batch_size=2, **options)


def pipeline(**options: Any) -> Any:
    return penstock.torch.loader(NUMBERS, workers=0, shuffle=False, **options)


def seen(loader: Any) -> list[int]:
    return [x for batch in loader for x in (batch[0] if type(batch) is list else batch).tolist()]


EVEN, ODD = [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]

LOADERS = pytest.mark.parametrize("make", [drop_in, pipeline])


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4, "RANK=1, WORLD_SIZE=4")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, "RANK=0, WORLD_SIZE=1")),
        ({"WORLD_SIZE": "4"}, (None, 4, "WORLD_SIZE=4")),
        # Lightning's own launcher.
        (
            {"WORLD_SIZE": "4", "NODE_RANK": "0", "LOCAL_RANK": "2"},
            (2, 4, "LOCAL_RANK=2, WORLD_SIZE=4"),
        ),
        ({"WORLD_SIZE": "4", "NODE_RANK": "1", "LOCAL_RANK": "0"}, (None, 4, "WORLD_SIZE=4")),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_PROCID": "0"},
            (3, 8, "OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=8"),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            (1, 2, "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2"),
        ),
        # A batch script: one process, whatever the number of tasks that it may start.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        # torchrun decides, started by srun or not.
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
            },
            (0, 1, "RANK=0, WORLD_SIZE=1"),
        ),
    ],
)
def test_launchers_say_the_rank_in_the_environment(
    variables: dict[str, str], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config.launched_rank() == found


@LOADERS
@pytest.mark.parametrize(
    ("rank", "world", "says"),
    [
        ("4", "4", "RANK=4, WORLD_SIZE=4, and ranks go from 0 to 3"),
        ("one", "4", "RANK is 'one'; a launcher sets it to a whole number"),
    ],
)
def test_a_wrong_environment_is_an_error(
    make: Any, rank: str, world: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with make() as loader, pytest.raises(PipelineError, match=says):
        iter(loader)


@LOADERS
def test_arguments_come_first_then_the_group_then_the_environment(
    make: Any, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with make() as loader:
        with pytest.warns(UserWarning, match="the part of rank 2 of 3"):
            assert seen(loader) == [2, 5, 8, 11]
        assert "rank 2 of 3" in repr(loader)
    group(1, 2)
    with make() as loader:
        assert "rank not known yet" in repr(loader)
        assert (len(loader), seen(loader)) == (3, ODD)
        assert "rank 1 of 2" in repr(loader)
    with make(rank=0, world=4) as loader:
        assert "rank 0 of 4" in repr(loader)
        assert seen(loader) == [0, 4, 8]
    with make(rank=0, world=1) as loader:
        assert seen(loader) == list(range(12))


@LOADERS
def test_one_process_needs_no_warning(make: Any) -> None:
    with make() as loader:
        assert (len(loader), seen(loader), seen(loader)) == (6, [*range(12)], [*range(12)])
        assert "rank 0 of 1" in repr(loader)


@LOADERS
def test_a_launcher_that_gives_no_rank_is_a_warning(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with make() as loader:
        with pytest.warns(UserWarning, match="WORLD_SIZE=3, but not which rank"):
            assert seen(loader) == list(range(12))
        assert seen(loader) == list(range(12))  # warned once


@LOADERS
def test_a_group_that_appears_or_grows_counts_from_the_next_epoch_on(
    make: Any, group: Group
) -> None:
    with make() as loader:
        assert len(loader) == 6
        group(1, 2)
        with pytest.warns(UserWarning, match="used as rank 0 of 1, and this process is now rank 1"):
            epoch = iter(loader)
        first = next(epoch)
        group(1, 3)
        assert len(loader) == 3  # of the epoch that is under way
        assert seen([first, *epoch]) == ODD
        with pytest.warns(UserWarning, match="as rank 1 of 2, and this process is now rank 1 of 3"):
            assert seen(loader) == [1, 4, 7, 10]
        # A group that was destroyed says nothing.
        group(0, 0)
        assert seen(loader) == [1, 4, 7, 10]


@LOADERS
def test_checkpoints_work_before_the_rank_is_known(make: Any, group: Group) -> None:
    with make() as loader:
        before = loader.state_dict()
    with make(rank=0, world=1) as loader:
        epoch = iter(loader)
        next(epoch)
        next(epoch)
        within = loader.state_dict()
    for state, rest in ((before, ODD), (within, [5, 7, 9, 11])):
        with make() as loader:
            loader.load_state_dict(state)
            group(1, 2)
            assert seen(loader) == rest
            group(0, 0)
        with make() as loader:
            group(1, 2)
            loader.load_state_dict(state)
            assert loader.state_dict()["dealing"]["world"] == 2
            assert seen(loader) == rest
            group(0, 0)


def test_an_echoed_epoch_is_resumed_by_as_many_ranks(group: Group) -> None:
    echoed = ps.from_dataset(np.arange(12)).echo(2).batch(2)

    def make(**options: Any) -> Any:
        return penstock.torch.loader(echoed, workers=0, seed=4, **options)

    with make(rank=1, world=2) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        rest = seen(epoch)
    for when in ("before", "after"):
        with make() as loader:
            if when == "before":
                loader.load_state_dict(state)
            group(1, 2)
            if when == "after":
                loader.load_state_dict(state)
            assert seen(loader) == rest
            group(0, 0)
    with make() as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()
        assert again == state
    for saved in (state, again):
        with make() as loader:
            loader.load_state_dict(saved)
            for _ in range(2):
                with pytest.raises(StateError, match="the number of ranks"):
                    iter(loader)


def test_ranks_without_a_seed_agree_on_the_order(group: Group) -> None:
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        group(0, 0)
        with drop_in(shuffle=True) as loader:
            state = loader.state_dict()
            loader.load_state_dict(state)
            group(rank, 2)
            loader.load_state_dict(state)
            parts += seen(loader)
    assert sorted(parts) == list(range(12))
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        with drop_in(shuffle=True, rank=rank, world=2) as loader:
            parts += seen(loader)
    assert sorted(parts) == list(range(12))


def test_seed_everything_decides_the_order_of_ranks(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def orders(seed: str) -> list[list[int]]:
        # Lightning's seed_everything sets this variable in every rank.
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        found = []
        for rank in (0, 1):
            group(rank, 2)
            found.append(seen(drop_in(shuffle=True)))
        return found

    three = orders("3")
    assert sorted(three[0] + three[1]) == list(range(12))
    assert three == orders("3") != orders("4")
    group(0, 2)
    assert seen(drop_in(shuffle=True, seed=4)) == orders("4")[0]
    group(0, 2)
    generator = torch.Generator().manual_seed(4)
    assert seen(drop_in(shuffle=True, generator=generator)) == orders("4")[0]
    monkeypatch.delenv("PL_GLOBAL_SEED")
    group(0, 2)
    assert seen(drop_in(shuffle=True)) == orders("0")[0]


@pytest.mark.parametrize("known", [True, False])
def test_ranks_agree_on_an_epoch_that_their_checkpoints_have_not_begun(
    group: Group, known: bool
) -> None:
    parts = []
    for rank in range(2):
        group(0, 0)
        torch.manual_seed(rank)
        with drop_in(shuffle=True) as loader:
            loader.set_epoch(1)
            state = loader.state_dict()
        with drop_in(shuffle=True) as loader:
            if known:
                group(rank, 2)
            loader.load_state_dict(state)
            group(rank, 2)
            parts += seen(loader)
    assert sorted(parts) == list(range(12))


def test_one_process_resumes_between_epochs_with_the_seed_of_the_checkpoint() -> None:
    torch.manual_seed(7)
    with drop_in(shuffle=True, seed=3) as loader:
        seen(loader)
        state = loader.state_dict()
        rest = seen(loader)
    torch.manual_seed(8)
    with drop_in(shuffle=True) as loader:
        loader.load_state_dict(state)
        assert seen(loader) == rest


def test_an_epoch_that_torch_has_ordered_is_dealt_to_ranks_only_from_its_start(
    group: Group,
) -> None:
    with drop_in(shuffle=True) as loader:
        seen(loader)
        between = loader.state_dict()
        next(iter(loader))
        within = loader.state_dict()
    parts = []
    for rank in range(2):
        group(rank, 2)
        with drop_in(shuffle=True) as loader:
            with pytest.raises(StateError, match="torch's sampler has ordered"):
                loader.load_state_dict(within)
            loader.load_state_dict(between)
            parts += seen(loader)
        group(0, 0)
    assert sorted(parts) == list(range(12))
    with drop_in(shuffle=True) as loader:
        loader.load_state_dict(within)
        group(0, 2)
        with pytest.raises(StateError, match="this loader has 2 ranks"):
            iter(loader)


def test_a_checkpoint_of_one_process_brings_its_seed_to_ranks(group: Group) -> None:
    with drop_in(shuffle=True, seed=7) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        rest = seen(epoch)
    parts = []
    for rank in range(2):
        group(0, 0)
        with drop_in(shuffle=True) as loader:
            loader.load_state_dict(state)
            group(rank, 2)
            parts += seen(loader)
    assert sorted(parts) == sorted(rest)


@LOADERS
@pytest.mark.parametrize("given", [{"rank": 0}, {"world": 2}])
def test_rank_and_world_are_given_together(make: Any, given: dict[str, int]) -> None:
    with pytest.raises(PipelineError, match=r"without (rank|world)\. Give both, or neither"):
        make(**given)


@LOADERS
def test_a_rank_outside_its_world_is_refused(make: Any) -> None:
    with pytest.raises(PipelineError, match="ranks go from 0 to 1"):
        make(rank=2, world=2)


# Samplers and streams, which are not divided.


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA),
        WeightedRandomSampler([1.0] * 12, 12),
        BatchSampler(RandomSampler(DATA), 2, False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_for_one_process_is_a_warning_in_several(sampler: Any, group: Group) -> None:
    batched = isinstance(sampler, BatchSampler)
    options = {"batch_sampler": sampler} if batched else {"batch_size": 2, "sampler": sampler}
    with DataLoader(DATA, **options) as loader:
        assert len(seen(loader)) == 12
        group(1, 2)
        with pytest.warns(UserWarning, match="RandomSampler draws from all samples.* 2 ranks"):
            assert len(seen(loader)) == 12
        assert len(seen(loader)) == 12  # warned once
        assert f"ranks left to {type(sampler).__name__}" in repr(loader)
    with DataLoader(DATA, **options, rank=0, world=1) as loader:
        assert len(seen(loader)) == 12
    with pytest.raises(PipelineError, match="world=2 with a sampler"):
        DataLoader(DATA, **options, rank=0, world=2)


@pytest.mark.parametrize(
    "sampler",
    [
        DistributedSampler(DATA, 2, 1, shuffle=False),
        SubsetRandomSampler(ODD),
        ODD,
        BatchSampler(DistributedSampler(DATA, 2, 1, shuffle=False), 2, False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_may_divide_is_never_divided_again(sampler: Any, group: Group) -> None:
    group(1, 2)
    batched = isinstance(sampler, BatchSampler)
    options = {"batch_sampler": sampler} if batched else {"batch_size": 2, "sampler": sampler}
    with DataLoader(DATA, **options) as loader:
        assert (len(loader), sorted(seen(loader))) == (3, ODD)


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_stream_is_a_warning_in_several_ranks(group: Group) -> None:
    def make(**options: Any) -> list[Any]:
        of_pipeline = ps.from_dataset(Stream()).batch(2)
        return [
            DataLoader(Stream(), batch_size=2, **options),
            penstock.torch.loader(of_pipeline, workers=0, **options),
        ]

    for loader in make():
        assert seen(loader) == [0, 1, 2, 3]
    group(1, 2)
    for loader in make():
        with pytest.warns(UserWarning, match=r"samples of a stream \(Stream\), so each of the 2"):
            assert seen(loader) == [0, 1, 2, 3]
        assert seen(loader) == [0, 1, 2, 3]  # warned once
        assert "ranks left to the stream" in repr(loader)
    for loader in make(rank=0, world=1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert seen(loader) == [0, 1, 2, 3]


def test_the_drop_in_says_once_that_it_divides_what_torch_would_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = ranks.FoundRank(1, 2, ranks.Origin.GROUP, "")
    monkeypatch.setattr(ranks, "find_rank", lambda: found)
    with DataLoader(list(range(8)), batch_size=2) as loader:
        with caplog.at_level("WARNING", "penstock.torch"):
            for _ in range(2):
                assert sum(len(batch) for batch in loader) == 4
        [message] = caplog.messages
    assert "rank 1 of 2" in message
    assert "rank=0, world=1" in message
