"""Roads that the compiled kernel runs by itself give the same batches as Python, bit by bit."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import penstock as ps
from penstock import native
from penstock.engine.engine import Engine
from penstock.engine.pools import native_threads
from penstock.engine.pools.native_threads import NativePool
from penstock.engine.pools.threads import ThreadPool
from penstock.errors import SampleError, WorkerError
from penstock.loader import Loader
from penstock.order import Weighted
from penstock.pipeline import Pipeline
from tests.support.contract import epochs, plain
from tests.support.jpegs import KINDS, encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

COUNT = 41


def save(place: Path, number: int) -> None:
    """A JPEG of any kind and size; some are large enough for the JPEG index."""
    height, width = 40 + 7 * (number % 9), 60 + 5 * (number % 11)
    if number % 8 == 3:
        height, width = 260, 340
    place.write_bytes(encode(picture(height, width, number), KINDS[number % len(KINDS)]))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of all kinds and sizes in two classes, and a nested folder."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        folder = root / ("cat", "dog", "dog/more")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / f"{number:03}.jpg", number)
    return root


@pytest.fixture
def odd(photos: Path, tmp_path: Path) -> Path:
    """The same with two PNGs, a CMYK picture, a small picture and three broken files."""
    root = tmp_path / "odd"
    shutil.copytree(photos, root)
    for name, number in (("a.png", 1), ("b.png", 2)):
        cv2.imwrite(str(root / "cat" / name), picture(50, 70, number))
    (root / "cat" / "c.jpg").write_bytes(encode(picture(64, 64), "cmyk"))
    (root / "cat" / "d.jpg").write_bytes(encode(picture(5, 5)))
    data = encode(picture(90, 90))
    (root / "cat" / "broken1.jpg").write_bytes(data[: len(data) // 2])
    (root / "dog" / "broken2.jpg").write_bytes(b"no picture")
    (root / "dog" / "broken3.jpg").write_bytes(b"")
    return root


def decoded(root: Path, **options: Any) -> Pipeline:
    return ps.from_folder(root, **options).map(ps.image.decode())


def roads(root: Path) -> dict[str, Pipeline]:
    """Every kind of road that the kernel runs by itself."""
    crop, flip = ps.image.random_resized_crop(32), ps.image.random_flip()
    normalize = ps.image.normalize()
    augments = {
        "rand": ps.image.rand_augment(3, 9, fill=(10, 20, 30)),
        "auto": ps.image.auto_augment("cifar10"),
        "trivial": ps.image.trivial_augment(),
    }
    out = {
        "crop": decoded(root).map(crop),
        "crop and flip": decoded(root).map(crop).map(flip),
        "normalised": decoded(root).map(crop).map(flip).map(normalize),
        "no classes": decoded(root, classes=False).map(crop).map(flip),
        "evaluation": decoded(root).map(ps.image.resize(40)).map(ps.image.center_crop(32)),
        "random crop": decoded(root).map(ps.image.random_crop(32)).map(flip).map(normalize),
        "exact size": decoded(root).map(ps.image.resize((24, 30))),
        "cached files": ps.from_folder(root)
        .cache("60KB")
        .map(ps.image.decode())
        .map(crop)
        .map(normalize),
        "cached pixels": decoded(root).cache("200KB").map(crop).map(flip),
        "refurbished": decoded(root).map(augments["rand"]).refurbish(3).map(crop).map(flip),
        "refurbished and cached": ps.from_folder(root)
        .cache("60KB")
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(40))
        .refurbish(2)
        .map(ps.image.random_crop(32))
        .map(normalize),
    }
    for name, augment in augments.items():
        out[f"{name} augment"] = decoded(root).map(crop).map(flip).map(augment)
        out[f"{name} augment, normalised"] = (
            decoded(root).map(crop).map(flip).map(augment).map(normalize)
        )
    return {name: pipeline.batch(8) for name, pipeline in out.items()}


NAMES = [
    "crop",
    "crop and flip",
    "normalised",
    "no classes",
    "evaluation",
    "random crop",
    "exact size",
    "cached files",
    "cached pixels",
    "refurbished",
    "refurbished and cached",
    *(f"{a} augment{b}" for a in ("rand", "auto", "trivial") for b in ("", ", normalised")),
]


def pool_of(loader: Loader) -> Any:
    feed = loader._feed
    assert isinstance(feed, Engine)
    return feed.pool


def is_native(pipeline: Pipeline) -> bool:
    with pipeline.loader(workers=2, kind="threads") as loader:
        next(iter(loader))
        return isinstance(pool_of(loader), NativePool)


def test_the_list_of_names_is_complete(photos: Path) -> None:
    assert sorted(NAMES) == sorted(roads(photos))


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_gives_the_batches_of_python(photos: Path, name: str) -> None:
    pipeline = roads(photos)[name]
    assert is_native(pipeline)
    by_python = epochs(pipeline, 4, workers=0, seed=3)
    for workers in (1, 3):
        assert epochs(pipeline, 4, workers=workers, kind="threads", seed=3) == by_python


@pytest.mark.parametrize("policy", ["skip", "substitute"])
@pytest.mark.parametrize("name", ["normalised", "cached files", "refurbished", "cached pixels"])
def test_odd_and_broken_files_are_left_to_python(odd: Path, name: str, policy: str) -> None:
    pipeline = roads(odd)[name]
    by_python = epochs(pipeline, 3, workers=0, seed=1, on_error=policy)
    assert epochs(pipeline, 3, workers=3, kind="threads", seed=1, on_error=policy) == by_python


def counts(pipeline: Pipeline, workers: int, **options: Any) -> Any:
    """All counters of three epochs."""
    with pipeline.loader(workers=workers, kind="threads", **options) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        stats = loader.stats()
    stages = [(stage.name, stage.samples) for stage in stats.stages]
    caches = [(cache.hits, cache.misses, cache.admitted) for cache in stats.caches]
    reuse = stats.refurbish and (stats.refurbish.fresh, stats.refurbish.reused)
    bad = sorted(bad.name for bad in stats.bad_samples)
    return stats.samples, stages, stats.bytes_read, caches, reuse, bad


@pytest.mark.parametrize(
    "name", ["normalised", "rand augment", "cached files", "refurbished and cached"]
)
def test_counts_are_those_of_python(photos: Path, odd: Path, name: str) -> None:
    pipeline = roads(photos)[name]
    assert counts(pipeline, 3) == counts(pipeline, 0)
    broken = roads(odd)[name]
    native, python = (counts(broken, workers, on_error="skip") for workers in (3, 0))
    # Python asks again for the samples beside a bad one, and counts them twice.
    assert [admitted for _, _, admitted in native[3]] == [admitted for _, _, admitted in python[3]]
    for count in (0, 4, 5):
        assert native[count] == python[count]


def test_a_bad_file_is_named(odd: Path) -> None:
    pipeline = roads(odd)["crop"]
    with pytest.raises(SampleError, match=r"(broken|\.jpg|\.png).*decode"):
        epochs(pipeline, 1, workers=2, kind="threads")


def test_the_first_bad_file_of_a_batch_is_reported(photos: Path) -> None:
    paths = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    paths[5], paths[3] = "/nowhere/five.jpg", "/nowhere/three.jpg"
    pipeline = ps.from_files(paths).map(ps.image.decode()).map(ps.image.resize((8, 8))).batch(16)
    for _ in range(5):
        with pytest.raises(SampleError, match=r"three|five"):
            epochs(pipeline, 1, workers=3, kind="threads", shuffle=False)


def test_pictures_of_another_size_than_the_rows_are_collated_by_python(odd: Path) -> None:
    # The shorter side is 6, so widths differ: batches do not stack, and Python says so.
    pipeline = decoded(odd).map(ps.image.resize(6)).batch(4)
    with pytest.raises(SampleError):
        epochs(pipeline, 1, workers=2, kind="threads", on_error="skip")


def test_user_code_stops_and_other_sources_are_not_native(photos: Path) -> None:
    crop = ps.image.random_resized_crop(16)
    paths = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    named = ps.from_files(paths, [f"label {n}" for n in range(len(paths))])
    for pipeline in (
        decoded(photos).map(crop).map(ps.image.color_jitter(0.2)).batch(4),
        decoded(photos).echo(2).map(crop).batch(4),
        decoded(photos).map(ps.image.random_crop(32, padding=2)).batch(4),
        decoded(photos).map(crop).batch(4, pad=0),
        named.map(ps.image.decode()).map(crop).batch(4),
    ):
        with pipeline.loader(workers=2, kind="threads") as loader:
            next(iter(loader))
            assert type(pool_of(loader)) is ThreadPool


def test_python_runs_once_for_a_batch(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = 0
    real = native.kernel().Queue

    class Counting:
        def __init__(self, workers: int) -> None:
            self._queue = real(workers)

        def work(self, number: int, patience: float) -> Any:
            nonlocal visits
            came = self._queue.work(number, patience)
            visits += 1
            return came

        def __getattr__(self, name: str) -> Any:
            return getattr(self._queue, name)

    class Kernel:
        Queue = Counting

        def __getattr__(self, name: str) -> Any:
            return getattr(native.kernel(), name)

    class Native:
        kernel = staticmethod(Kernel)

    monkeypatch.setattr(native_threads, "native", Native)
    pipeline = decoded(photos).map(ps.image.random_resized_crop(16)).batch(COUNT)
    with pipeline.loader(workers=4, kind="threads") as loader:
        batches = sum(1 for _ in range(6) for _ in loader)
        assert batches == 6
        # Each finished batch, and each request for more tasks; not each sample.
        assert batches <= visits <= 4 * batches + 4 * loader.choice.workers < 6 * COUNT


def test_a_size_of_tiny_batches_that_was_given_is_kept(photos: Path) -> None:
    pipeline = roads(photos)["crop and flip"]
    sizes = []
    with pipeline.loader(workers=2, kind="threads", tiny_batch=3, seed=3) as loader:
        iterator = iter(loader)
        first = next(iterator)
        pool = pool_of(loader)
        submit = pool._submit

        def record(desk: Any, task: Any) -> None:
            sizes.append(len(task.keys))
            submit(desk, task)

        pool._submit = record
        found = [plain(first), *(plain(batch) for batch in iterator)]
    assert found == epochs(pipeline, 1, workers=0, seed=3)[0]
    assert sizes
    assert max(sizes) == 3


def test_a_dropped_epoch_is_not_finished(photos: Path) -> None:
    pipeline = roads(photos)["normalised"]
    with pipeline.loader(workers=2, kind="threads", prefetch=6, seed=3) as loader:
        whole = epochs(pipeline, 3, workers=0, seed=3)
        for _ in range(2):
            next(iter(loader))  # a new loop is a new epoch
        assert [plain(batch) for batch in loader] == whole[2]
        assert loader.stats().samples < 2 * COUNT


def running() -> int:
    """How many workers run. Other threads of Penstock, such as that which looks at the files, end
    when they are ready."""
    return sum(bool(re.fullmatch(r"penstock-\d+", one.name)) for one in threading.enumerate())


def test_closing_ends_the_threads(photos: Path) -> None:
    loader = roads(photos)["crop"].loader(workers=3, kind="threads")
    next(iter(loader))
    assert running() == 3
    loader.close()
    assert running() == 0


def test_a_forgotten_loader_ends_its_threads(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_threads, "IDLE_WAIT", 0.05)
    loader = roads(photos)["crop"].loader(workers=2, kind="threads")
    next(iter(loader))
    assert running() == 2
    del loader
    give_up = time.monotonic() + 60
    while running() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert running() == 0


@pytest.fixture
def hanging(photos: Path, tmp_path: Path) -> Iterator[list[str]]:
    """Paths of which the seventh is a pipe that nothing is written to."""
    pipe = tmp_path / "hanging.jpg"
    os.mkfifo(pipe)
    paths = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    paths[7] = str(pipe)
    yield paths
    with open(os.open(pipe, os.O_RDWR), "wb") as end:  # lets a thread that waits go on
        end.write(b"x")


def test_a_file_that_hangs_is_an_error_after_the_timeout(
    hanging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "_may_begin_early", lambda _: False)
    resized = ps.from_files(hanging[:8]).map(ps.image.decode()).map(ps.image.resize((8, 8)))
    loader = resized.batch(1).loader(workers=2, kind="threads", timeout=60.0, shuffle=False)
    epoch = iter(loader)
    for _ in range(7):
        next(epoch)
    engine = loader._feed
    assert isinstance(engine, Engine)
    # Now no other sample can be late, however busy the machine is.
    engine._timeout = 0.2
    with pytest.raises(WorkerError, match=r"sample 7 .*timeout"):
        next(epoch)
    loader.close()


def test_an_order_may_repeat_samples(photos: Path) -> None:
    weights = np.ones(COUNT)
    weights[0] = 50.0
    order = Weighted(weights)
    pipeline = roads(photos)["crop and flip"]
    by_python = epochs(pipeline, 2, workers=0, seed=3, order=order)
    assert epochs(pipeline, 2, workers=3, kind="threads", seed=3, order=order) == by_python


def test_batches_that_renew_the_same_samples_wait_for_each_other(photos: Path) -> None:
    """Epochs are as short as what is prepared ahead, so that most batches meet such another."""
    pipeline = roads(photos)["refurbished"]
    expected = epochs(pipeline, 12, workers=0, seed=2)
    for _ in range(3):
        found = epochs(pipeline, 12, workers=4, kind="threads", seed=2, prefetch=8)
        assert found == expected


def test_resume_within_an_epoch_gives_the_same_batches(photos: Path) -> None:
    pipeline = roads(photos)["refurbished"]
    whole = epochs(pipeline, 3, workers=0, seed=9)
    with pipeline.loader(workers=3, kind="threads", seed=9) as loader:
        list(loader)
        epoch = iter(loader)
        next(epoch)
        next(epoch)
        state = loader.state_dict()
    with pipeline.loader(workers=2, kind="threads", seed=9) as again:
        again.load_state_dict(state)
        assert [plain(batch) for batch in again] == whole[1][2:]
        assert [plain(batch) for batch in again] == whole[2]
