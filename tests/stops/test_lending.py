"""A store in memory lends samples without a copy only if nothing below can change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.operation import Operation
from penstock.stops.hold import from_stored, keeps_samples, to_stored
from penstock.store import HeapStore
from penstock.store.value import Lent

SIDE = 24


class Spoiler(Operation):
    """A user's operation that changes its input in place, which operations should not do."""

    def output(self, spec: Any) -> Any:
        return spec

    def apply(self, value: Any, params: Any) -> Any:
        value += 1
        return value


def images() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), i) for i in range(20)]


def source() -> ps.Pipeline:
    return ps.from_dataset(images(), random=False)


def keep(pipeline: ps.Pipeline, how: str) -> ps.Pipeline:
    """The pipeline with a stop that keeps samples."""
    if how == "cache":
        return pipeline.cache("10MB")
    if how == "echo":
        return pipeline.map(ps.image.rand_augment(2, 9), on=0).echo(2)
    return pipeline.map(ps.image.rand_augment(2, 9), on=0).refurbish(3)


def lends(pipeline: ps.Pipeline, **options: Any) -> list[bool]:
    with pipeline.loader(**options) as loader:
        stops = loader._assembly.keepers.road.stops
        return [stop.lends for stop in stops if keeps_samples(stop)]


HOLDS = ["cache", "refurbish", "echo"]
POOLS: list[dict[str, Any]] = [
    {"workers": 2, "kind": "threads"},
    {"workers": 1, "kind": "processes"},
]


@pytest.mark.parametrize("how", HOLDS)
def test_lending_changes_no_bit(how: str) -> None:
    road = keep(source(), how).map(ps.image.random_crop(16), on=0).map(ps.image.random_flip(), on=0)
    written = road.batch(4)
    assert lends(written, workers=2, kind="threads") == [True]
    assert lends(written, workers=1, kind="processes") == [False]
    found = []
    for options in POOLS:
        with written.loader(seed=3, **options) as loader:
            found.append([x.tolist() for _ in range(4) for x, _ in loader])
    assert found[0] == found[1]


@pytest.mark.parametrize("how", HOLDS)
def test_samples_that_a_stop_below_may_change_are_copied(how: str) -> None:
    kept = keep(source(), how)
    flip = ps.image.random_flip()
    spoilt = kept.map(Spoiler(), on=0).map(flip, on=0).batch(4)
    assert lends(spoilt, workers=2, kind="threads") == [False]
    assert lends(kept.map(flip, on=0).batch(4, collate=list), workers=2, kind="threads") == [False]
    function = kept.map(lambda image: image, on=0, random=False).map(flip, on=0).batch(4)
    assert lends(function, workers=2, kind="threads") == [False]
    found = []
    for options in POOLS:
        # Copy every sample first: otherwise the dataset itself would be changed.
        fresh = source().map(np.copy, on=0, random=False)
        road = keep(fresh, how).map(Spoiler(), on=0).map(flip, on=0)
        with road.batch(4).loader(seed=3, **options) as loader:
            found.append([x.tolist() for _ in range(3) for x, _ in loader])
    assert found[0] == found[1]


def test_a_cache_on_disk_does_not_lend(tmp_path: Path) -> None:
    on_disk = ps.from_files([__file__]).cache("10MB", where=str(tmp_path / "c")).batch(1)
    assert lends(on_disk, workers=1, kind="threads") == [False]


def test_objects_are_never_lent() -> None:
    plain = (np.zeros(3), 1, "a", b"b", {"x": [1.5, np.float32(2)]})
    assert from_stored(to_stored(plain, True), HeapStore(1000)) is plain
    objects: list[Any] = [object, [set()], np.array([{}], dtype=object), {"x": bytearray(b"x")}]
    for sample in objects:
        assert not isinstance(to_stored(sample, True), Lent)
    assert not isinstance(to_stored(plain, False), Lent)


def operations() -> list[Operation]:
    image = ps.image
    return [
        image.random_resized_crop(16),
        image.resize(16),
        image.center_crop(16),
        image.random_crop(16, padding=2),
        image.random_flip(1.0),
        image.normalize((0.5,) * 3, (0.2,) * 3),
        image.rand_augment(4, 15),
        image.trivial_augment(),
        image.auto_augment(),
        image.color_jitter(0.5, 0.5, 0.5, 0.2),
        image.erase(1.0),
    ]


@pytest.mark.parametrize("kernel", [True, False])
def test_no_operation_of_ours_changes_what_it_is_given(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setenv("PENSTOCK_NO_KERNEL", "1")
    given = images()[0][0]
    before = given.copy()
    for operation in operations():
        for seed in range(40):
            drawn = operation.draw(np.random.default_rng(seed), given.shape)
            operation.apply(given, drawn)
        np.testing.assert_array_equal(given, before, err_msg=operation.name)
