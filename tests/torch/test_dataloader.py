"""The drop-in delivers the same batches as torch's DataLoader, for every argument."""

from __future__ import annotations

import gc
import os
import random as python_random
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from penstock.errors import PipelineError, StateError
from penstock.torch import DataLoader

Point = namedtuple("Point", "x y")


class Samples(Dataset[Any]):  # type: ignore[misc]
    """A dataset of ``n`` samples; ``make`` turns an index into a sample."""

    def __init__(self, make: Any, n: int = 23) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


KINDS_OF_SAMPLES: dict[str, Callable[[int], Any]] = {
    "float": float,
    "int": int,
    "bool": lambda i: i % 2 == 0,
    "numpy scalar": lambda i: np.float32(i),
    "array": lambda i: np.full((2, 3), i, dtype=np.int16),
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "zero-dim tensor": lambda i: torch.tensor(i),
    "bfloat16": lambda i: torch.full((2,), float(i), dtype=torch.bfloat16),
    "tuple": lambda i: (torch.ones(2) * i, i),
    "list": lambda i: [torch.ones(2) * i, float(i)],
    "dict": lambda i: {"image": torch.ones(2, 2) * i, "label": i, "name": f"n{i}"},
    "nested": lambda i: {"a": (i, {"b": torch.tensor([i, i])}), "c": [float(i), "s"]},
    "namedtuple": lambda i: Point(torch.ones(3) * i, i),
    "text": lambda i: f"sample {i}",
    "bytes": lambda i: b"x" * i,
}


def same(a: Any, b: Any) -> None:
    if not (isinstance(a, list) and a and isinstance(a[0], str)):
        assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)) and a and isinstance(a[0], (str, bytes)):
        assert list(a) == list(b)  # torch gives text as a list, or as a tuple when nested
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


INLINE: dict[str, Any] = {"num_workers": 0}
# Forked workers start at once; a worker program has to import torch first. Most tests fork.
FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
PROGRAM: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize("workers", [INLINE, FORKED], ids=["inline", "fork"])
@pytest.mark.parametrize("kind", KINDS_OF_SAMPLES)
def test_batches_are_what_torch_delivers(kind: str, workers: Any) -> None:
    dataset = Samples(KINDS_OF_SAMPLES[kind])
    expected = list(TorchDataLoader(dataset, batch_size=5))
    with DataLoader(dataset, batch_size=5, **workers) as loader:
        got = list(loader)
        assert len(loader) == len(expected)
    same(got, expected)


@pytest.mark.usefixtures("real_programs")
def test_batches_are_what_torch_delivers_from_worker_programs() -> None:
    dataset = Samples(lambda i: {kind: make(i) for kind, make in KINDS_OF_SAMPLES.items()})
    expected = list(TorchDataLoader(dataset, batch_size=5))
    with DataLoader(dataset, batch_size=5, **PROGRAM) as loader:
        same(list(loader), expected)


def test_no_sample_is_prepared_in_the_training_process_while_workers_start() -> None:
    with DataLoader(Samples(lambda i: (i, os.getpid())), batch_size=5, **PROGRAM) as loader:
        first = next(iter(loader))
    assert os.getpid() not in first[1].tolist()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
def test_batch_size_and_drop_last_are_torchs(batch_size: int, drop_last: bool) -> None:
    dataset = Samples(float)
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    expected = list(TorchDataLoader(dataset, **options))
    with DataLoader(dataset, **FORKED, **options) as loader:
        same(list(loader), expected)
        assert len(loader) == len(expected)


def test_samplers_decide_the_order() -> None:
    dataset = Samples(float)
    for sampler in ([3, 1, 1, 22], SequentialSampler(dataset), [np.int64(4), np.int64(2)]):
        expected = list(TorchDataLoader(dataset, batch_size=2, sampler=sampler))
        with DataLoader(dataset, batch_size=2, sampler=sampler, **FORKED) as loader:
            same(list(loader), expected)
    buckets = [[0, 5, 7], [1], [2, 3]]
    with DataLoader(dataset, batch_sampler=buckets, **FORKED) as loader:
        same(list(loader), list(TorchDataLoader(dataset, batch_sampler=buckets)))
        assert loader.batch_size is None
    nested = BatchSampler(SequentialSampler(dataset), 4, drop_last=True)
    with DataLoader(dataset, batch_sampler=nested) as loader:
        same(list(loader), list(TorchDataLoader(dataset, batch_sampler=nested)))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: RandomSampler(d),
        lambda d: RandomSampler(d, generator=torch.Generator().manual_seed(3)),
        lambda d: SubsetRandomSampler(range(17)),
        lambda d: WeightedRandomSampler([1.0] * 23, 40),
    ],
    ids=["global", "generator", "subset", "weighted"],
)
def test_random_samplers_resume_exactly_and_leave_the_users_generators_alone(make: Any) -> None:
    dataset = Samples(float)

    def loader(workers: Any) -> DataLoader:
        return DataLoader(dataset, batch_size=4, sampler=make(dataset), seed=1, **workers)

    torch.manual_seed(11)
    with loader(INLINE) as first:
        list(first)
        epoch = iter(first)
        head = [next(epoch).tolist() for _ in range(2)]
        state = first.state_dict()
        rest = [batch.tolist() for batch in epoch]
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(11)))
    with loader(FORKED) as second:
        second.load_state_dict(state)
        assert [batch.tolist() for batch in second] == rest
    assert len(head) == 2


def test_a_distributed_sampler_gives_each_rank_its_part() -> None:
    dataset = Samples(float, 20)
    seen: list[float] = []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=4)
        sampler.set_epoch(3)
        with DataLoader(dataset, batch_size=3, sampler=sampler, **FORKED) as loader:
            got = list(loader)
        same(got, list(TorchDataLoader(dataset, batch_size=3, sampler=sampler)))
        seen += torch.cat(got).tolist()
    assert sorted(seen) == [float(i) for i in range(20)]


def test_shuffling_gives_every_sample_once_and_depends_on_the_generator() -> None:
    dataset = Samples(float)

    def epochs(seed: int, workers: Any) -> list[list[float]]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"batch_size": 4, "shuffle": True, **workers}
        with DataLoader(dataset, generator=generator, **options) as loader:
            return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first = epochs(1, INLINE)
    assert sorted(first[0]) == sorted(first[1]) == [float(i) for i in range(23)]
    assert first[0] != first[1]
    assert epochs(1, FORKED) == first
    assert epochs(2, INLINE) != first


def augmented(i: int) -> tuple[Any, Any, Any]:
    return torch.rand(2), np.random.rand(2), python_random.random()


def test_augmentation_inside_the_dataset_is_the_same_for_any_number_of_workers() -> None:
    dataset = Samples(augmented)
    results = []
    for workers in (INLINE, FORKED, PROGRAM, {**FORKED, "num_workers": 1}):
        with DataLoader(dataset, batch_size=4, seed=5, **workers) as loader:
            results.append([list(loader), list(loader)])
    for other in results[1:]:
        same(results[0], other)
    assert not torch.equal(results[0][0][0][0], results[0][1][0][0])


def test_a_collate_fn_gets_the_samples_and_its_result_is_not_changed() -> None:
    def collate(samples: list[Any]) -> Any:
        return Point(np.stack([s[0].numpy() for s in samples]), {"n": [s[1] for s in samples]})

    dataset = Samples(lambda i: (torch.ones(2) * i, i))
    expected = list(TorchDataLoader(dataset, batch_size=5, collate_fn=collate))
    with DataLoader(dataset, batch_size=5, collate_fn=collate, **PROGRAM) as loader:
        got = list(loader)
    assert [type(b) for b in got] == [Point] * 5
    assert all(type(b.x) is np.ndarray for b in got)
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a.x, b.x)
        assert a.y == b.y


def test_without_a_batch_size_samples_are_delivered() -> None:
    dataset = Samples(lambda i: {"x": np.ones(2) * i, "i": i})
    expected = list(TorchDataLoader(dataset, batch_size=None))
    for workers in (INLINE, FORKED):
        with DataLoader(dataset, batch_size=None, **workers) as loader:
            got = list(loader)
        for a, b in zip(got, expected, strict=True):
            same(a["x"], b["x"])
            assert a["i"] == b["i"]


class WorkerFacts(Dataset[Any]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return -1, -1, 0, 0
        return info.id, info.num_workers, int(type(info.dataset) is WorkerFacts), MARK["value"]


MARK = {"value": 0}


def mark(worker: int) -> None:
    MARK["value"] = 100 + worker


def test_get_worker_info_works_in_datasets() -> None:
    with DataLoader(WorkerFacts(), batch_size=1, num_workers=2, worker_init_fn=mark) as loader:
        rows = [[int(x) for x in batch] for batch in loader]
    assert {n for _, n, _, _ in rows} == {2}
    assert {d for _, _, d, _ in rows} == {1}
    assert all(marked == 100 + worker for worker, _, _, marked in rows)
    with DataLoader(WorkerFacts(), batch_size=8) as loader:
        assert next(iter(loader))[0].tolist() == [-1] * 8


class Stream(IterableDataset[int]):  # type: ignore[misc]
    """Divides its samples over the workers, as torch's documentation recommends."""

    def __init__(self, n: int, split: bool = True) -> None:
        self.n = n
        self.split = split

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or not self.split:
            return iter(range(self.n))
        return iter(range(info.id, self.n, info.num_workers))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_iterable_datasets_come_in_torchs_order(workers: int, split: bool) -> None:
    ways: list[dict[str, Any]] = [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
    ]
    for options in ways:
        expected = list(TorchDataLoader(Stream(21, split), num_workers=workers, **options))
        with DataLoader(
            Stream(21, split),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            **options,
        ) as loader:
            for _ in range(2):
                same(list(loader), expected)


class Noise(IterableDataset[Any]):  # type: ignore[misc]
    """Draws from all global generators."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(11):
            yield augmented(0)


class MoreNoise:
    """A map that draws from the global generators too."""

    def __call__(self, sample: Any) -> Any:
        return *sample, np.random.rand()


def global_states() -> tuple[Any, ...]:
    return python_random.random(), np.random.rand(), torch.rand(1).item()


def test_iterable_datasets_without_workers_draw_seeded_random_numbers() -> None:
    def epochs(seed: int, **options: Any) -> list[Any]:
        with DataLoader(Noise(), batch_size=4, seed=seed, **options) as loader:
            return [list(loader), list(loader)]

    first = epochs(1, **INLINE)
    python_random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = global_states()
    python_random.seed(3), np.random.seed(3), torch.manual_seed(3)
    same(epochs(1, **INLINE), first)
    assert global_states() == expected  # the script's own generators are not touched
    same(epochs(1, num_workers=1), first)
    assert not torch.equal(first[0][0][0], first[1][0][0])
    assert not torch.equal(first[0][0][0], epochs(2, **INLINE)[0][0][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_draws_resumes_with_the_same_numbers(workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        sums = [[float(np.sum(np.asarray(x))) for x in sample] for sample in samples]
        return [*sums, np.random.rand()]

    # The map and the collate function draw too, and must not change what the stream draws.
    pipeline = ps.from_dataset(Noise()).map(MoreNoise()).batch(2, collate=collate)
    with pipeline.loader(workers=workers, seed=4) as loader:
        epoch = iter(loader)
        next(epoch)
        next(epoch)
        state = loader.state_dict()
        rest = list(epoch)
    with pipeline.loader(workers=workers, seed=4) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


class CountedStream(Stream):
    """A stream that states a length, which may be wrong."""

    def __init__(self, n: int, stated: int) -> None:
        super().__init__(n)
        self.stated = stated

    def __len__(self) -> int:
        return self.stated


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}],
    ids=str,
)
def test_iterable_datasets_with_a_length_are_streams(options: Any, workers: int) -> None:
    data = CountedStream(21, 21)
    context = "fork" if workers else None
    torchs = TorchDataLoader(data, num_workers=workers, **options)
    with DataLoader(
        data, num_workers=workers, multiprocessing_context=context, **options
    ) as loader:
        assert len(loader) == len(torchs)
        with warnings.catch_warnings():
            # With workers there are more batches than stated, of fewer samples: both warn.
            warnings.simplefilter("ignore")
            same(list(loader), list(torchs))


def test_a_stream_longer_than_its_length_is_a_warning_as_in_torch() -> None:
    for kind in (TorchDataLoader, DataLoader):
        quiet = kind(CountedStream(9, 4), batch_size=2)
        assert len(list(quiet)) == 5  # nobody asked for the length
        loader = kind(CountedStream(9, 4), batch_size=2)
        assert len(loader) == 2
        # torch compares batches with the number of samples, and warns later.
        with pytest.warns(UserWarning, match="was reported to be"):
            assert len(list(loader)) == 5
    with DataLoader(CountedStream(9, 4), batch_size=2) as loader:
        assert len(loader) == 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
        assert len(caught) == 1
    with DataLoader(CountedStream(3, 4), batch_size=2) as loader:
        assert (len(loader), len(list(loader))) == (2, 2)


class Endless(Dataset[int]):  # type: ignore[misc]
    """Map-style, without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class AtOnce(Samples):
    """Reads several samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


def test_kinds_of_datasets_are_told_apart_as_in_torch() -> None:
    with DataLoader(Endless(), batch_size=2, sampler=[3, 4, 5]) as loader:
        assert [batch.tolist() for batch in loader] == [[3, 4], [5]]
        assert "by torch's own iterator (Endless has no length)" in repr(loader)
    with pytest.raises(PipelineError, match="Endless, has no __len__"):
        DataLoader(Endless(), batch_size=2, seed=1)
    with DataLoader(AtOnce(float), batch_size=4) as loader:
        assert len(loader) == len(TorchDataLoader(AtOnce(float), batch_size=4)) == 6
        assert [x for x, _ in loader for x in x.tolist()] == list(range(23))
    with DataLoader(Stream(5), batch_size=2) as loader, pytest.raises(TypeError, match="no length"):
        len(loader)


def test_iterable_datasets_resume() -> None:
    for workers in (INLINE, FORKED):
        with DataLoader(Stream(40), batch_size=3, **workers) as loader:
            epoch = iter(loader)
            for _ in range(5):
                next(epoch)
            state = loader.state_dict()
            rest = [batch.tolist() for batch in epoch]
        with DataLoader(Stream(40), batch_size=3, **workers) as again:
            again.load_state_dict(state)
            assert [batch.tolist() for batch in again] == rest
    with (
        DataLoader(Stream(40), batch_size=3, num_workers=1) as other,
        pytest.raises(StateError, match="2 streams"),
    ):
        other.load_state_dict(state)


def test_a_dataset_changed_between_epochs_is_seen_by_the_workers() -> None:
    dataset = Samples(float)
    with DataLoader(dataset, batch_size=23, num_workers=1) as loader:
        assert next(iter(loader))[0] == 0
        dataset.make = lambda i: float(i) + 50
        assert next(iter(loader))[0] == 50


def test_forked_workers_need_no_pickle() -> None:
    import threading

    lock = threading.Lock()  # cannot be pickled, and a fork does not need that

    def make(i: int) -> float:
        with lock:
            return float(i)

    for options in (FORKED, {"num_workers": 2}):
        with DataLoader(Samples(make), batch_size=5, **options) as loader:
            assert torch.cat(list(loader)).tolist() == [float(i) for i in range(23)]


def test_a_forked_worker_does_not_copy_the_memory_that_it_shares() -> None:
    def make(i: int) -> int:
        # A collection touches every object, so all their pages are copied.
        return int(gc.get_stats()[2]["collections"])

    gc.disable()
    try:
        before = make(0)
        with DataLoader(Samples(make), num_workers=1, multiprocessing_context="fork") as loader:
            assert {int(batch) for batch in loader} == {before}
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"sampler": [1], "shuffle": True}, "sampler and shuffle"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"persistent_workers": True}, "persistent_workers"),
        ({"timeout": -1, "num_workers": 1}, "timeout"),
        ({"multiprocessing_context": "teleport", "num_workers": 1}, "multiprocessing_context"),
        ({"num_workers": -1}, "num_workers is -1; give a whole number, 0 or more"),
        ({"num_workers": -1, "share": "search"}, "num_workers is -1; give"),
        ({"num_workers": "all"}, "num_workers is 'all'; give"),
        ({"num_workers": 1.5}, "num_workers is 1.5; give"),
        ({"num_workers": 2, "prefetch_factor": 1.5}, "prefetch_factor is 1.5; give"),
        ({"num_workers": 2, "prefetch_factor": -1}, "prefetch_factor is -1; give"),
        ({"batch_size": 0}, "batch_size is 0; give"),
        ({"batch_size": -2}, "batch_size is -2; give"),
        ({"cache": "8GB"}, "random=False"),
        ({"cache_where": "disk"}, "cache_where='disk' has no effect without cache"),
        ({"lag": "wait"}, "lag='wait' has no effect without share"),
        ({"join": "start"}, "join='start' has no effect without share"),
        ({"reuse": "auto", "split": 1}, 'split=1 has no effect with reuse="auto"'),
        ({"worker_init_fn": print, "num_workers": 1, "kind": "threads"}, "worker_init_fn"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(options: Any, names: str) -> None:
    with pytest.raises((ValueError, TypeError), match=names):
        DataLoader(Samples(float), **options)


def test_a_checkpoint_brings_its_seed_where_none_was_given() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    with DataLoader(Samples(float), seed=5, **options) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in epoch]
    torch.manual_seed(1)
    with DataLoader(Samples(float), **options) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == rest
    with (
        DataLoader(Samples(float), seed=6, **options) as loader,
        pytest.raises(StateError, match="seed was 5 and is 6"),
    ):
        loader.load_state_dict(state)


def test_a_refused_checkpoint_leaves_the_loader_as_it_was() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    with DataLoader(Samples(float), seed=5, **options) as loader:
        epoch = iter(loader)
        next(epoch)
        good = loader.state_dict()
        good_rest = [batch.tolist() for batch in epoch]
    with DataLoader(Samples(float, n=9), seed=5, **options) as other:
        of_other_data = other.state_dict()
    torch.manual_seed(1)
    with DataLoader(Samples(float), **options) as untouched:
        expected = [batch.tolist() for batch in untouched]
    torch.manual_seed(1)
    nothing: Any = None
    with DataLoader(Samples(float), **options) as loader:
        epoch = iter(loader)
        seen = [next(epoch).tolist()]
        for refused in (of_other_data, {"seed": 5}, {**good, "version": -1}, nothing):
            with pytest.raises(StateError):
                loader.load_state_dict(refused)
        seen += [batch.tolist() for batch in epoch]
        assert seen == expected
        # The refused seed was not taken for one that was given.
        loader.load_state_dict(good)
        assert [batch.tolist() for batch in loader] == good_rest


def test_shuffling_a_stream_is_refused() -> None:
    with pytest.raises(PipelineError, match="shuffle"):
        DataLoader(Stream(3), shuffle=True)


def test_the_cache_keeps_a_fixed_dataset() -> None:
    dataset = Samples(lambda i: torch.ones(100) * i)
    for workers in (INLINE, FORKED):
        options: dict[str, Any] = {"batch_size": 4, "cache": "1MB", "random": False, **workers}
        with DataLoader(dataset, **options) as loader:
            first, second = list(loader), list(loader)
            cache = loader.stats().caches[0]
        same(first, second)
        assert (cache.hits, cache.misses, cache.admitted) == (23, 23, 23)


def test_tensors_inside_a_dataset_are_shared_by_workers_not_copied() -> None:
    class Big(Dataset[Any]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.data = torch.arange(100_000)
            self.array = np.arange(100_000)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            shared = mapped_from(self.data.data_ptr()) + mapped_from(self.array.ctypes.data)
            return index, int(self.data.sum()), int(self.array.sum()), shared

    with DataLoader(Big(), batch_size=8, **PROGRAM) as loader:
        _, first, second, shared = next(iter(loader))
    assert first.tolist() == second.tolist() == [99_999 * 50_000] * 8
    assert [where.count("memfd:penstock") for where in shared] == [2] * 8, shared[0]


def mapped_from(address: int) -> str:
    """The file that is mapped at a memory address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return line.split(maxsplit=5)[-1]
    return ""


def test_pinning_without_a_cuda_device_warns_and_does_not_pin() -> None:
    with pytest.warns(UserWarning, match="no CUDA device"):
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, pin_memory=True)
    assert [b[0].tolist() for b in loader] == [[0, 1], [2, 3]]
    loader.close()
