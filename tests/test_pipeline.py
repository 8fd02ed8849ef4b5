"""A stop in a wrong place is an error when the pipeline is built, with the remedy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PipelineError

image = ps.image


def flip_a_coin(value: Any) -> Any:
    return value


def test_a_cache_below_a_random_map_is_refused_with_the_remedy() -> None:
    pipeline = ps.from_dataset([b"x"]).map(image.decode()).map(image.random_flip())
    with pytest.raises(PipelineError, match=r"below random_flip \(a random map\).*above"):
        pipeline.cache("1GB")


def test_a_callable_is_taken_as_random_without_random_false() -> None:
    pipeline = ps.from_dataset(np.arange(3))
    with pytest.raises(PipelineError, match=r"flip_a_coin.*random=False"):
        pipeline.map(flip_a_coin).cache("1GB")
    assert pipeline.map(flip_a_coin, random=False).cache("1GB") is not None


@pytest.mark.parametrize("stop", ["map", "cache", "batch"])
def test_nothing_stands_below_batch(stop: str) -> None:
    batched = ps.from_dataset(np.arange(3)).batch(2)
    arguments = {"map": (flip_a_coin,), "cache": ("1GB",), "batch": (2,)}
    with pytest.raises(PipelineError, match=rf"{stop}\(\) stands below batch"):
        getattr(batched, stop)(*arguments[stop])


def test_operations_that_cannot_follow_each_other_are_refused_when_built(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(b"not looked at")
    folder = ps.from_folder(tmp_path)
    with pytest.raises(PipelineError, match="decode"):
        folder.map(image.random_resized_crop(8))
    with pytest.raises(PipelineError):
        folder.map(image.decode()).map(image.normalize()).map(image.random_resized_crop(8))


@pytest.mark.parametrize(
    "build",
    [
        lambda p: p.cache("lots"),
        lambda p: p.cache(-1),
        lambda p: p.batch(0),
        lambda p: p.batch(True),
        lambda p: p.batch(2, pad=0, collate=list),
        lambda p: p.batch(2, collate=3),
        lambda p: p.map(3),
        lambda p: p.map(image.random_flip),
        lambda p: p.map(image.random_flip(), random=False),
        lambda p: p.loader(),
        lambda p: p.batch(2).loader(workers=-1),
        lambda p: p.batch(2).loader(lag="wait"),
        lambda p: p.batch(2).loader(join="start"),
        lambda p: p.batch(2).loader(workers=1.5),
        lambda p: p.batch(2).loader(kind="fibres"),
        lambda p: p.batch(2).loader(on_error="ignore"),
        lambda p: p.batch(2).loader(prefetch=0),
        lambda p: p.batch(2).loader(tiny_batch=0),
        lambda p: p.batch(2).loader(tiny_batch=1.5),
        lambda p: p.batch(2).loader(kind="crews"),
        lambda p: p.batch(2).loader(timeout=0),
        lambda p: p.batch(2).loader(seed=0.5),
        lambda p: p.batch(2).loader(order="random"),
        lambda p: p.batch(2).loader(rank=2, world=2),
        lambda p: p.batch(2).loader(memory="much"),
        lambda p: p.map(flip_a_coin).batch(2).loader(workers=2, kind="threads"),
    ],
)
def test_bad_arguments_are_refused_at_once(build: Any) -> None:
    with pytest.raises(PipelineError):
        build(ps.from_dataset(np.arange(4)))


def test_the_choice_of_workers_comes_with_its_reason() -> None:
    numbers = ps.from_dataset(np.arange(8.0))
    assert "every operation releases the GIL" in repr(numbers.batch(2).loader(workers=2))
    held = numbers.map(flip_a_coin, random=False).batch(2)
    assert "2 processes (flip_a_coin may hold the GIL)" in repr(held.loader(workers=2))
    drawn = numbers.map(flip_a_coin).batch(2)
    assert "flip_a_coin may draw from the global generators" in repr(drawn.loader(workers=2))
    assert "in this process (workers=0)" in repr(drawn.loader(workers=0))
    assert "1 thread " in repr(numbers.batch(2).loader(workers=1))


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    ("sample", "on", "expected"),
    [
        (3.0, None, 4.0),
        ((3.0, 5), 0, (4.0, 5)),
        ((3.0, 5), 1, (3.0, 6)),
        ((3.0, 5), -1, (3.0, 6)),
        ({"a": 3.0, "b": 5}, "b", {"a": 3.0, "b": 6}),
        (Pair(3.0, 5), "label", Pair(3.0, 6)),
        (Pair(3.0, 5), 0, Pair(4.0, 5)),
        ([3.0, 5], 1, [3.0, 6]),
    ],
)
def test_a_map_works_on_the_field_named_by_on(sample: Any, on: Any, expected: Any) -> None:
    pipeline = ps.from_dataset([sample]).map(lambda x: x + 1, on=on, random=False)
    collated = pipeline.batch(1, collate=lambda samples: samples[0])
    assert next(iter(collated.loader(workers=0))) == expected


@pytest.mark.parametrize("on", ["c", 7])
def test_the_error_about_a_missing_field_names_it_and_the_fields(on: Any) -> None:
    pipeline = ps.from_dataset([{"a": 1, "b": 2}]).map(lambda x: x, on=on, random=False).batch(1)
    with pytest.raises(ps.PenstockError, match=rf"looks for field {on!r}.*'a', 'b'"):
        next(iter(pipeline.loader(workers=0)))


def test_operations_find_the_image_in_a_dict_and_in_a_tuple() -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    for sample in ({"image": pixels, "label": 1}, (pixels, 1), pixels):
        pipeline = ps.from_dataset([sample]).map(image.center_crop(2)).batch(1)
        batch = next(iter(pipeline.loader(workers=0)))
        found = batch["image"] if isinstance(batch, dict) else batch
        found = found[0] if isinstance(found, tuple) else found
        assert found.shape == (1, 2, 2, 3)


def test_a_script_without_a_main_guard_works_with_lambdas_and_its_own_classes(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import numpy as np
            import penstock as ps

            print("started")

            class Numbers:
                def __init__(self, n):
                    self.n = n
                def __len__(self):
                    return self.n
                def __getitem__(self, i):
                    return Number(i)

            class Number:
                def __init__(self, i):
                    self.i = i

            k = 10
            pipeline = (ps.from_dataset(Numbers(6)).map(lambda s: Number(s.i * k))
                        .batch(3, collate=lambda samples: samples))
            with pipeline.loader(workers=2, shuffle=False) as loader:
                for batch in loader:
                    assert all(type(s) is Number for s in batch)
                    print([s.i for s in batch])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("started\n[0, 10, 20]\n[30, 40, 50]\n", "")


def test_memory_stays_flat_over_epochs() -> None:
    import gc

    pipeline = ps.from_dataset(np.arange(20_000)).batch(500)
    with pipeline.loader(workers=2, kind="threads") as loader:
        for _ in loader:
            pass
        ring = loader._feed.ring  # type: ignore[union-attr]
        slots = len(ring)
        gc.collect()
        objects = len(gc.get_objects())
        for _ in range(5):
            for _ in loader:
                pass
        gc.collect()
        assert len(ring) <= slots + 1
        assert len(gc.get_objects()) - objects < 500


@pytest.mark.parametrize("kind", ["none", "threads"])
def test_the_sample_that_shows_the_layout_is_prepared_once(kind: str) -> None:
    read: list[float] = []

    def look(value: float) -> float:
        read.append(float(value))
        return value

    pipeline = ps.from_dataset(np.arange(40.0)).map(look, random=False).batch(4)
    options: Any = {"workers": 0} if kind == "none" else {"workers": 2, "kind": kind}
    with pipeline.loader(**options, shuffle=False, prefetch=8) as loader:
        next(iter(loader))
    assert max(read.count(value) for value in read) == 1


def test_padding_leaves_numbers_beside_the_arrays_alone() -> None:
    pairs = [(np.arange(n + 1), n) for n in range(3)]
    ((arrays, labels),) = ps.from_dataset(pairs).batch(3, pad=-1).loader(workers=0, shuffle=False)
    assert arrays.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert labels.tolist() == [0, 1, 2]
