"""Packed rows of tokens: every token once, boundaries, resume, mixes, refusals."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PipelineError, SampleError
from tests.support.contract import noise


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def documents(sizes: list[int]) -> list[Any]:
    """Documents whose tokens are all different."""
    ends = np.cumsum(sizes)
    return [np.arange(end - n, end, dtype=np.int32) + 1 for end, n in zip(ends, sizes, strict=True)]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any),
    length=st.integers(1, 9),
    split=st.booleans(),
    seed=st.none() | st.integers(0, 3),
)
def test_every_token_comes_once_with_its_position_and_document(
    sizes: list[int], length: int, split: bool, seed: int | None
) -> None:
    texts = documents(sizes)
    pipeline = ps.pack_sequences(
        ps.from_dataset(texts), length, by=sizes, split=split, seed=seed, pad=-1
    )
    rows = pickle.loads(pickle.dumps(pipeline.source)).read(range(len(pipeline.source)))
    everything = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
    assert sorted(everything.tolist()) == list(range(1, sum(sizes) + 1))
    if split:
        assert len(rows) == -(-sum(sizes) // length)
        if seed is None:
            assert everything.tolist() == list(range(1, sum(sizes) + 1))
    for row in rows:
        tokens, segments = row["tokens"], row["segment_ids"]
        assert (tokens[segments == 0] == -1).all()
        ends, longest = ps.cu_seqlens(segments)
        assert longest == np.diff(ends).max()
        for start, end in pairwise(ends.tolist()):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            if segments[start]:
                whole = texts[int(np.searchsorted(np.cumsum(sizes), tokens[start], "left"))]
                assert set(tokens[start:end].tolist()) <= set(whole.tolist())
                if not split and len(whole) <= length:
                    assert tokens[start:end].tolist() == whole.tolist()


def test_whole_documents_leave_little_padding() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 2000).tolist()
    pipeline = ps.pack_sequences(ps.from_dataset(documents(sizes)), 128, by=sizes, split=False)
    assert sum(sizes) / (128 * len(pipeline.source)) > 0.97


def test_lengths_are_measured_and_maps_run_in_workers_of_any_kind() -> None:
    texts = ["a b c", "d", "e f g h i", "j k"]

    def tokenize(text: str) -> Any:
        return {"ids": [ord(word) for word in text.split()]}

    rows = ps.pack_sequences(ps.from_dataset(texts).map(tokenize, random=False), 4, on="ids")
    pipeline = rows.batch(2)
    with pipeline.loader(workers=0, seed=1) as loader:
        expected = [{k: v.tolist() for k, v in batch.items()} for batch in loader]
        state = loader.state_dict()
    assert sum(len(batch["tokens"]) for batch in expected) == 3
    with pipeline.loader(workers=2, kind="threads", seed=1) as loader:
        assert [{k: v.tolist() for k, v in batch.items()} for batch in loader] == expected
        loader.load_state_dict(state)
    assert len(ps.pack_sequences(ps.from_dataset([[1, 2, 3]]), 2, drop_last=True).source) == 1


def test_rows_mix_with_rows_of_other_documents() -> None:
    a = ps.pack_sequences(ps.from_dataset(documents([5, 9, 2])), 4)
    b = ps.pack_sequences(ps.from_dataset(documents([3, 3])), 4)
    for batch in ps.mix({"a": (a, 1), "b": (b, 1)}, samples=8).batch(4).loader(workers=0):
        assert batch["tokens"].shape == (4, 4)


def test_cu_seqlens_of_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    ends, longest = ps.cu_seqlens(torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]], dtype=torch.int32))
    assert ends.dtype == torch.int32
    assert (ends.tolist(), longest) == ([0, 2, 4, 7, 8], 3)


def test_mistakes_are_refused() -> None:
    data = ps.from_dataset(documents([3, 4]))
    small = ps.from_dataset([np.arange(3, dtype=np.uint8), np.arange(300, 305)])
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: ps.pack_sequences([1], 4), "got list. Give a pipeline of documents"),  # type: ignore[arg-type]
        (lambda: ps.pack_sequences(data, 0), "length is 0"),
        (lambda: ps.pack_sequences(data.map(noise), 4), "below noise, which is random"),
        (lambda: ps.pack_sequences(data.batch(2), 4), "stands below batch"),
        (lambda: ps.pack_sequences(data, 4, by=[1, 2, 3]), "there are 2 documents"),
        (lambda: ps.pack_sequences(small, 4, pad=-100), "pad is -100, .* into uint8"),
        (lambda: ps.pack_sequences(data, 9, by=[3, 4], drop_last=True), "makes no row of 9"),
        (lambda: ps.pack_sequences(ps.from_dataset([{"x": 1}]), 4, by=[1]), "is dict. pack_seq"),
    ]
    for make, message in cases:
        with pytest.raises(ps.PenstockError, match=message):
            make()
    for stated in (9, 2):  # with 2, the rest of the document would be lost
        wrong = ps.pack_sequences(data, 4, by=[3, stated]).batch(1)
        with pytest.raises(SampleError, match=f"has 4 tokens, but by its length {stated}"):
            list(wrong.loader(workers=0))
    larger = ps.pack_sequences(small, 4, seed=None).batch(1)
    with pytest.raises(SampleError, match=r"has tokens of type int64, and the first .* uint8"):
        list(larger.loader(workers=0))
    with pytest.raises(PipelineError, match="may be random"):
        ps.pack_sequences(ps.from_dataset(_Own()), 4)


class _Own:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        return [index]
