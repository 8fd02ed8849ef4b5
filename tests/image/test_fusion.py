"""Fusion: decode, crop, flip and normalize in one step, with the same parameters and pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import penstock as ps
from penstock import native
from penstock.image.fused import Fused, fuse
from tests.support.contract import POOLS, Workers, plain

image = ps.image

TOLERANCE = {"kernel": 2.0, "partial": 0.0}
"""Mean difference to the single operations in grey levels, on pictures with much detail. The kernel
antialiases exactly; OpenCV's blur is an approximation. For shrinks by 4 or more, which libjpeg
begins, it is ``GREAT`` for both."""

GREAT = 2.0


@pytest.fixture(params=["kernel", "partial"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "partial":
        monkeypatch.setattr(native, "_switched_off", lambda: True)
    elif not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    return str(request.param)


def one_by_one(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first batch of the pipeline without fusion."""
    monkeypatch.setattr("penstock.pipeline.fused", lambda stops: stops)
    with pipeline.loader(workers=0, seed=3) as loader:
        assert "decode" in [s.name for s in loader.stats().stages]
        return next(iter(loader))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(1)
    for i in range(24):
        folder = root / f"class{i % 3}"
        folder.mkdir(exist_ok=True)
        picture = np.zeros((150, 200, 3), np.float32)
        for step, strength in ((50, 60), (20, 30), (8, 15), (3, 6)):
            coarse = rng.normal(0, strength, (150 // step + 2, 200 // step + 2, 3))
            picture += cv2.resize(coarse.astype(np.float32), (200, 150))
        picture = np.clip(picture + 128, 0, 255).astype(np.uint8)
        ending = "bmp" if i == 5 else "jpg"  # the kernel does not support it
        cv2.imwrite(str(folder / f"{i:02}.{ending}"), picture)
    return root


def road(photos: Path, *below: Any, crop: Any = None) -> Any:
    first = crop or image.random_resized_crop(64)
    pipeline = ps.from_folder(photos).map(image.decode()).map(first)
    for operation in below:
        pipeline = pipeline.map(operation)
    return pipeline.batch(24)


BELOW: dict[str, list[Any]] = {
    "crop": [],
    "crop, flip": [image.random_flip()],
    "crop, flip, normalize": [image.random_flip(), image.normalize()],
    "crop, normalize": [image.normalize()],
    "crop, colour": [image.color_jitter(0.2)],
    "crop, upside down": [image.random_flip(vertical=True)],
}


@pytest.mark.parametrize("below", BELOW)
def test_fused_and_unfused_roads_agree(
    below: str, decoder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = road(photos, *BELOW[below])
    with pipeline.loader(workers=0, seed=3) as loader:
        assert any("decode+random_resized_crop" in s.name for s in loader.stats().stages)
        fused = next(iter(loader))
    alone = one_by_one(pipeline, monkeypatch)
    assert fused[1].tolist() == alone[1].tolist()
    assert fused[0].dtype == alone[0].dtype
    assert fused[0].shape == alone[0].shape
    scale = 255 * 0.226 if fused[0].dtype == np.float32 else 1.0
    apart = np.abs(fused[0].astype(np.float32) - alone[0].astype(np.float32)) * scale
    # By sample: one with another box, or without its flip, would be far off.
    assert apart.reshape(24, -1).mean(axis=1).max() <= TOLERANCE[decoder]


FRAMINGS: dict[str, list[Any]] = {
    "resize": [image.resize((70, 90))],
    "resize, center_crop": [image.resize(72), image.center_crop(64)],
    "resize, center_crop, flip, normalize": [
        image.resize(72),
        image.center_crop(64),
        image.random_flip(),
        image.normalize(),
    ],
    "resize, random_crop": [image.resize((80, 100)), image.random_crop((61, 67))],
    "center_crop, resize": [image.center_crop((120, 110)), image.resize((60, 50))],
    "random_crop, center_crop, resize": [
        image.random_crop((130, 170)),
        image.center_crop((99, 101)),
        image.resize((64, 200)),
    ],
    "center_crop": [image.center_crop((100, 64))],
    "random_crop": [image.random_crop(64)],
    "crop, crop": [image.random_crop((111, 99)), image.random_crop((64, 63))],
    "crop of a crop resized": [image.center_crop(90), image.random_resized_crop(64)],
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_runs_of_crops_and_resizes_agree_with_one_by_one(
    framing: str, decoder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crop, *below = FRAMINGS[framing]
    pipeline = road(photos, *below, crop=crop)
    with pipeline.loader(workers=0, seed=3) as loader:
        assert len(loader.stats().stages) == 2
        fused = next(iter(loader))[0]
    alone = one_by_one(pipeline, monkeypatch)[0]
    assert fused.shape == alone.shape
    if "resize" not in framing:
        np.testing.assert_array_equal(fused, alone)
    scale = 255 * 0.226 if fused.dtype == np.float32 else 1.0
    apart = np.abs(fused.astype(np.float32) - alone.astype(np.float32)) * scale
    assert apart.reshape(24, -1).mean(axis=1).max() <= TOLERANCE[decoder]


@pytest.mark.parametrize("side", [33, 16])
def test_great_shrinks_agree_with_one_by_one(
    side: int, decoder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = road(photos, image.random_flip(), crop=image.resize(side))
    with pipeline.loader(workers=0, seed=3) as loader:
        fused = next(iter(loader))[0]
    apart = np.abs(fused.astype(int) - one_by_one(pipeline, monkeypatch)[0])
    assert 0 < apart.reshape(24, -1).mean(axis=1).max() <= GREAT


def test_crops_that_pad_run_as_single_operations(photos: Path, decoder: str) -> None:
    padded = road(photos, crop=image.random_crop((160, 210), padding=8))
    small = road(photos, crop=image.center_crop(300))
    for pipeline, shape in ((padded, (160, 210, 3)), (small, (300, 300, 3))):
        with pipeline.loader(workers=0, seed=3) as loader:
            assert next(iter(loader))[0].shape == (24, *shape)


@pytest.mark.parametrize(
    "augment",
    [image.rand_augment(2, 9), image.auto_augment(fill=(9, 99, 199)), image.trivial_augment()],
    ids=lambda operation: operation.name,
)
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_an_augmentation_and_normalize_have_the_bits_of_one_by_one(
    augment: Any, layout: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = road(photos, augment, image.normalize(layout=layout))
    with pipeline.loader(workers=0, seed=3) as loader:
        assert loader.stats().stages[-1].name == f"{augment.name}+normalize"
        batches = [next(iter(loader)) for _ in range(3)]
    monkeypatch.setattr("penstock.pipeline.fused", lambda stops: fuse(stops))
    with pipeline.loader(workers=0, seed=3) as loader:
        assert loader.stats().stages[-1].name == "normalize"
        for batch in batches:
            np.testing.assert_array_equal(batch[0], next(iter(loader))[0])


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_fused_road_is_bit_equal_in_every_pool(
    pool: Workers, decoder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "partial":
        monkeypatch.setenv("PENSTOCK_NO_KERNEL", "1")  # for worker processes
    pipeline = road(photos, image.random_flip(), image.normalize())
    with pipeline.loader(workers=0, seed=3) as loader:
        expected = [plain(b) for b in loader]
    with pipeline.loader(**pool._asdict(), seed=3) as loader:
        assert [plain(b) for b in loader] == expected


DECODED: dict[str, list[Any]] = {
    "crop": [image.random_resized_crop(64)],
    "crop, flip": [image.random_resized_crop(64), image.random_flip()],
    "crop, flip, normalize": [
        image.random_resized_crop(64),
        image.random_flip(),
        image.normalize(),
    ],
    "resize, center_crop, normalize": [image.resize(72), image.center_crop(64), image.normalize()],
}


@pytest.mark.parametrize("below", DECODED)
def test_crops_of_decoded_images_are_fused_too(
    below: str, decoder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = DECODED[below]
    pipeline: Any = ps.from_folder(photos).map(image.decode()).cache("10MB")
    for operation in operations:
        pipeline = pipeline.map(operation)
    pipeline = pipeline.batch(24)
    together = "+".join(operation.name for operation in operations)
    with pipeline.loader(workers=0, seed=3) as loader:
        names = [stage.name for stage in loader.stats().stages]
        fused = next(iter(loader))
    if decoder == "kernel":
        assert names == ["source", "decode", "cache", together]
        assert "the compiled kernel reads only the pixels it needs" in pipeline.explain()
    else:
        assert len(names) == 3 + len(operations)
    alone = one_by_one(pipeline, monkeypatch)
    assert fused[1].tolist() == alone[1].tolist()
    assert fused[0].shape == alone[0].shape
    scale = 255 * 0.226 if fused[0].dtype == np.float32 else 1.0
    apart = np.abs(fused[0].astype(np.float32) - alone[0].astype(np.float32)) * scale
    assert apart.reshape(24, -1).mean(axis=1).max() <= TOLERANCE[decoder]


def test_images_that_the_kernel_cannot_resize_run_as_single_operations() -> None:
    rng = np.random.default_rng(0)
    pictures = [
        rng.integers(0, 256, (40, 50, 1), dtype=np.uint8),
        rng.integers(0, 256, (40, 100, 3), dtype=np.uint8)[:, ::2],
        rng.integers(0, 256, (40, 50, 3), dtype=np.uint8),
    ]
    for picture in pictures:
        pipeline = ps.from_dataset([picture]).map(image.resize((20, 25))).batch(1)
        (found,) = next(iter(pipeline.loader(workers=0)))
        expected = image.resize((20, 25)).apply(picture, None)
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected).mean() <= 6.0  # noise, the worst to resize


def test_operations_that_cannot_run_together_are_not_fused(photos: Path) -> None:
    def names(pipeline: Any) -> list[str]:
        return [stop.name for stop in fuse(pipeline.stops)]

    folder = ps.from_folder(photos)
    twice = folder.map(image.decode()).map(image.resize(64)).map(image.random_resized_crop(32))
    assert names(twice) == ["decode+resize", "random_resized_crop"]
    coloured = folder.map(image.decode()).map(image.color_jitter(0.2)).map(image.resize(64))
    assert names(coloured) == ["decode", "color_jitter", "resize"]
    first, second = image.decode(), image.resize(64)
    elsewhere = ps.from_dataset([{"image": b"", "b": b""}]).map(first, on="b").map(second)
    assert names(elsewhere) == ["decode", "resize"]
    grey = folder.map(image.decode(mode="gray")).map(image.random_resized_crop(64))
    assert names(grey) == ["decode", "random_resized_crop"]
    cached = folder.map(image.decode()).cache("1MB").map(image.random_resized_crop(64))
    assert names(cached) == ["decode", "cache", "random_resized_crop"]
    hwc = folder.map(image.decode()).map(image.random_resized_crop(64))
    assert names(hwc.map(image.normalize(layout="hwc")))[1:] == ["normalize"]
    assert isinstance(fuse(hwc.stops)[0], Fused)


def test_explain_says_what_runs(photos: Path, decoder: str) -> None:
    lines = road(photos, image.random_flip()).explain().splitlines()
    assert lines[1].startswith("decode+random_resized_crop+random_flip in one step")
    if decoder == "kernel":
        assert "the compiled kernel" in lines[1]
    else:
        assert "PENSTOCK_NO_KERNEL is set" in lines[1]


def test_audio_operations_are_not_explained_as_image_operations() -> None:
    road = ps.from_dataset([b""], random=False).map(ps.audio.decode(rate=8000)).batch(1)
    assert road.explain().splitlines()[1] == "decode"


def test_a_damaged_file_is_named(photos: Path, tmp_path: Path, decoder: str) -> None:
    good = next(photos.rglob("*.jpg")).read_bytes()
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(good[: len(good) // 2])
    pipeline = ps.from_files([bad]).map(image.decode()).map(image.random_resized_crop(8)).batch(1)
    with pipeline.loader(workers=0) as loader, pytest.raises(ps.PenstockError, match=r"bad\.jpg"):
        list(loader)


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_damaged_file_leaves_its_neighbours_as_they_are(
    photos: Path, tmp_path: Path, decoder: str, on_error: Any
) -> None:
    files = sorted(photos.rglob("*.*"))
    damaged = [*files]
    for place in (2, 3, 11):
        damaged[place] = tmp_path / f"{place}.jpg"
        damaged[place].write_bytes(files[place].read_bytes()[:900])

    def pixels(files: list[Path]) -> list[Any]:
        pipeline = ps.from_files(files).map(image.decode()).map(image.random_resized_crop(16))
        options: dict[str, Any] = {"on_error": on_error, "seed": 3, "shuffle": False}
        with pipeline.batch(24).loader(workers=0, **options) as loader:
            # The second epoch: by then the time per sample is known, so samples run in groups.
            first, second = (next(iter(loader)).tolist() for _ in range(2))
            assert isinstance(second, list)
            assert first != second
            return second

    whole, found = pixels(files), pixels(damaged)
    kept = [place for place in range(24) if place not in (2, 3, 11)]
    if on_error == "substitute":
        assert len(found) == 24
        found = [found[place] for place in kept]
    assert found == [whole[place] for place in kept]


def test_an_error_of_the_kernel_names_its_sample(photos: Path, tmp_path: Path) -> None:
    strip = tmp_path / "strip.jpg"
    assert cv2.imwrite(str(strip), np.zeros((20, 6_000, 3), np.uint8))
    files = [*sorted(photos.rglob("*.jpg"))[:3], strip]
    # At a height of 256 it is 76,800 wide, more than the kernel supports.
    pipeline = ps.from_files(files).map(image.decode()).map(image.resize(256)).batch(1)
    with pipeline.loader(workers=0, shuffle=False, on_error="skip") as loader:
        found = [batch.shape for batch in loader]
    if native.kernel_available():
        assert len(found) == 3
        with pytest.raises(ps.PenstockError, match=r"strip\.jpg"):
            list(pipeline.loader(workers=0, shuffle=False))
    else:
        assert found[-1] == (1, 256, 76_800, 3)
