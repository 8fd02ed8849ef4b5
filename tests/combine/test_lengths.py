"""batch(tokens=..., by=...): where lengths come from, padding, resume, sharing, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PipelineError, StateError
from penstock.store.catalogue import on_disk
from tests.node.conftest import own_node
from tests.support.contract import noise

SIZES = [5, 1, 9, 3, 3, 8, 2, 7, 1, 4, 6, 9, 2]


def texts() -> list[Any]:
    return [{"ids": np.full(n, i), "n": n} for i, n in enumerate(SIZES)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_array_a_field_and_a_function_give_the_same_batches(own_cache: Path) -> None:
    data = ps.from_dataset(texts())

    def shapes(by: Any) -> list[Any]:
        pipeline = data.batch(tokens=20, by=by, pad=-1, lengths=True)
        with pipeline.loader(workers=0, seed=1) as loader:
            found = []
            for batch in loader:
                rows, longest = batch["ids"].shape
                assert rows * longest <= 20
                assert batch["lengths"].tolist() == batch["n"].tolist()
                assert (batch["ids"] >= 0).sum(axis=1).tolist() == batch["n"].tolist()
                found.append(batch["ids"].tolist())
            return found

    expected = shapes(SIZES)
    assert sum(len(batch) for batch in expected) == len(SIZES)
    for by in ("n", "ids", lambda sample: len(sample["ids"])):
        assert shapes(by) == expected
    assert len(list((own_cache / "lengths").iterdir())) == 3


def test_lengths_are_evaluated_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.combine import lengths

    measured: list[Any] = []
    really = lengths._measure

    def measure(pipeline: ps.Pipeline, by: Any) -> Any:
        measured.append(by)
        return really(pipeline, by)

    monkeypatch.setattr(lengths, "_measure", measure)
    for _ in range(2):
        ps.from_dataset(texts()).batch(tokens=20, by="n", pad=0)
    assert len(measured) == 1
    ps.from_dataset(texts()[1:]).batch(tokens=20, by="n", pad=0)  # other data
    ps.from_dataset(texts()).batch(tokens=20, by="ids", pad=0)
    assert len(measured) == 3


def test_kept_lengths_are_in_the_ledger(own_cache: Path) -> None:
    for _ in range(2):
        ps.from_dataset(texts()).batch(tokens=50, by=len, too_long="alone", collate=list)
    [info] = on_disk()
    assert info.record is not None
    assert (info.kind, info.place.parent) == ("lengths", own_cache / "lengths")
    assert (info.record.opened, info.record.hits) == (2, 1)
    assert info.record.made.made_by[-1] == "lengths by len"


def test_fixed_shapes_are_stacked_in_batches_of_any_size() -> None:
    pipeline = ps.from_dataset(np.arange(13.0)).map(noise).batch(tokens=20, by=SIZES)
    assert "at most 20 tokens, of similar length" in repr(pipeline.loader())
    expected = [batch.tolist() for batch in pipeline.loader(workers=0, seed=3)]
    assert len({len(batch) for batch in expected}) > 2
    with pipeline.loader(workers=2, kind="threads", seed=3) as loader:
        assert [batch.tolist() for batch in loader] == expected
        assert len(loader) == len(expected)


def test_a_resume_and_other_worlds_give_the_rest_exactly_once() -> None:
    pipeline = ps.from_dataset(np.arange(13)).batch(tokens=12, by=SIZES)
    with pipeline.loader(workers=0, seed=2) as loader:
        epoch = iter(loader)
        seen = [x for _ in range(2) for x in next(epoch).tolist()]
        state = loader.state_dict()
        rest = [batch.tolist() for batch in epoch]
    for world in (1, 2, 3):
        found: list[int] = []
        steps = set()
        for rank in range(world):
            with pipeline.loader(workers=0, seed=2, rank=rank, world=world, tail="drop") as part:
                part.load_state_dict(state)
                batches = [batch.tolist() for batch in part]
                steps.add(len(batches))
                found += [x for batch in batches for x in batch]
        assert len(steps) == 1
        # A last step of fewer samples than ranks cannot be divided, and is left out.
        assert len({*found, *seen}) == len(found + seen) > 13 - world
        if world == 1:
            assert batches == rest
    other = ps.from_dataset(np.arange(13)).batch(tokens=13, by=SIZES)
    with (
        other.loader(workers=0, seed=2) as loader,
        pytest.raises(StateError, match="batches by length has changed"),
    ):
        loader.load_state_dict(state)


def test_below_a_mix_a_cache_and_refurbish_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (ps.from_dataset(np.arange(float(start), start + 13.0)) for start in (0, 100))
    mixed = ps.mix({"a": (a, 1), "b": (b, 2)}, samples=30).cache("1MB").map(noise).refurbish(2)
    pipeline = mixed.map(noise).batch(tokens=25, by=SIZES * 2)

    def epochs(**options: Any) -> list[Any]:
        with pipeline.loader(seed=3, **options) as loader:
            return [[batch.tolist() for batch in loader] for _ in range(2)]

    expected = epochs(workers=0)
    assert sum(len(batch) for batch in expected[0]) == 30
    assert epochs(workers=2, kind="threads") == expected
    with own_node(tmp_path, monkeypatch):
        assert epochs(kind="threads", share="b") == expected


def test_mistakes_are_refused() -> None:
    data = ps.from_dataset(texts())
    with pytest.raises(PipelineError, match="got no size"):
        data.batch()
    with pytest.raises(PipelineError, match="tokens, window or too_long without by"):
        data.batch(4, tokens=5)
    with pytest.raises(PipelineError, match="drop_last and by"):
        data.batch(4, by=SIZES, drop_last=True)
    with pytest.raises(PipelineError, match="lengths=True without pad"):
        data.batch(4, lengths=True)
    taken = ps.from_dataset([{"ids": np.ones(2), "lengths": 7}]).batch(1, pad=0, lengths=True)
    with pytest.raises(ps.PenstockError, match="samples have one of that name"):
        list(taken.loader(workers=0))
    for tokens in (float("inf"), float("nan"), 0, "8k", True):
        with pytest.raises(PipelineError, match=r"tokens is .*; give a finite number above 0"):
            data.batch(tokens=tokens, by=SIZES, pad=0)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="3 lengths in by, but the source has 13"):
        data.batch(4, by=[1, 2, 3])
    with pytest.raises(PipelineError, match="below noise, which is random"):
        data.map(noise).batch(tokens=5, by="n")
    with pytest.raises(PipelineError, match=r"2 of 13 samples .* sample 2 of list \(index 2\)"):
        data.batch(tokens=8, by="n")
    with pytest.raises(ps.PenstockError, match="gave 'x' for a sample, which is not a number"):
        data.batch(tokens=8, by=lambda sample: "x")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"echo.. stands above batch\(by=...\)"):
        data.echo(2).batch(4, by=SIZES).loader()
    echoed = ps.from_dataset(np.arange(13)).batch(4, by=SIZES).echo(2)
    assert sum(1 for _ in echoed.loader(workers=0)) == 8
