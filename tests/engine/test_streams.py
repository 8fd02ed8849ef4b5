"""Streams: samples without an index, one stream for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import penstock as ps
from penstock.engine.pools.runner import Runner, WorkerInfo
from penstock.errors import PipelineError, SampleError
from penstock.source.stream import StreamSource
from tests.support.contract import noise, plain


def numbers() -> Iterator[float]:
    return iter(map(float, range(23)))


def bad_seven(value: float) -> float:
    if value == 7:
        raise ValueError("seven is bad")
    return value


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_returns_an_iterator_is_a_stream(workers: int) -> None:
    pipeline = ps.from_dataset(numbers).map(noise).batch(5)
    with pipeline.loader(workers=workers, seed=1) as loader:
        first = [plain(batch) for batch in loader]
        second = [plain(batch) for batch in loader]
    assert [shape for _, shape, _ in first] == [(5,)] * 4 + [(3,)]
    assert first != second
    with pipeline.loader(workers=1 - workers, seed=1) as loader:
        assert [plain(batch) for batch in loader] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_of_a_stream_are_skipped_and_counted(workers: int) -> None:
    pipeline = ps.from_dataset(numbers).map(bad_seven, random=False).batch(1)
    with pipeline.loader(workers=workers, on_error="skip") as loader:
        seen = [x for batch in loader for x in batch.tolist()]
        assert loader.stats().bad == max(1, workers)
    streams = max(1, workers)  # a function does not split itself, so each worker reads all of it
    assert sorted(seen) == sorted([float(i) for i in range(23) if i != 7] * streams)
    with pipeline.loader(workers=workers) as loader, pytest.raises(SampleError, match="seven"):
        list(loader)


class Outage:
    """Numbers that a stream reads, or a map passes on; number 9 fails as long as ``lasts``."""

    def __init__(self) -> None:
        self.lasts = True

    def pass_on(self, value: int) -> int:
        if value == 9 and self.lasts:
            raise OSError("the server does not answer")
        return value

    def stream(self) -> Iterator[int]:
        return map(self.pass_on, range(23))


@pytest.mark.parametrize("place", ["stream", "map"])
@pytest.mark.parametrize("resumed", [True, False])
def test_a_stream_that_failed_goes_on_with_the_batch_that_failed(place: str, resumed: bool) -> None:
    outage = Outage()
    if place == "stream":
        pipeline = ps.from_dataset(outage.stream)
    else:
        pipeline = ps.from_dataset(lambda: iter(range(23))).map(outage.pass_on, random=False)
    with pipeline.batch(4).loader(workers=0) as loader:
        epoch = iter(loader)
        seen = [*next(epoch).tolist(), *next(epoch).tolist()]
        state = loader.state_dict()
        with pytest.raises((SampleError, OSError), match="does not answer"):
            next(epoch)
        outage.lasts = False
        if resumed:
            loader.load_state_dict(state)
            epoch = iter(loader)
        for batch in epoch:
            seen += batch.tolist()
    assert seen == list(range(23))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"on_error": "substitute"}, "substitute"),
        ({"rank": 1, "world": 2}, "world=2"),
        ({"order": ps.Weighted([1.0])}, "order"),
        ({"workers": 2, "kind": "threads"}, "threads"),
    ],
)
def test_options_that_a_stream_cannot_have_are_refused(options: Any, names: str) -> None:
    with pytest.raises(PipelineError, match=names):
        ps.from_dataset(numbers).batch(2).loader(**options)
    with pytest.raises(PipelineError, match="cache"):
        ps.from_dataset(numbers).cache("1GB")


def test_a_stream_without_a_length_makes_a_loader_without_one() -> None:
    with (
        ps.from_dataset(numbers).batch(2).loader(workers=0) as loader,
        pytest.raises(TypeError, match="no length"),
    ):
        len(loader)


def test_loaders_of_one_stream_pipeline_do_not_mix_their_samples() -> None:
    pipeline = ps.from_dataset(numbers).batch(3)
    with pipeline.loader(workers=0) as one, pipeline.loader(workers=0) as other:
        sources = {
            id(runner.work.road.source)
            for runner in (
                Runner(loader._assembly.work, WorkerInfo(0, 1, 0, process=False))
                for loader in (one, other)
            )
        }
        assert len(sources) == 2
        assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]
    # The pipeline that the user wrote holds no sample.
    assert isinstance(pipeline.source, StreamSource)
    assert pipeline.source.value is None
