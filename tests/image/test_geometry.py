"""Resize, crops and flips: torchvision's definitions, for every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.image import center_crop, random_crop, random_flip, random_resized_crop, resize
from penstock.image.geometry import Box, PaddedBox
from penstock.keyed import Key, Keyed
from penstock.operation import ArraySpec

side = st.integers(1, 300)


@given(side, side, st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_one_number_is_the_shorter_side(height: int, width: int, size: int) -> None:
    found = resize(size).output(ArraySpec.of((height, width, 3), np.uint8))
    assert isinstance(found, ArraySpec)
    rows, columns = found.shape[:2]
    assert rows is not None
    assert columns is not None
    assert min(rows, columns) == size
    assert max(rows, columns) == int(size * max(height, width) / min(height, width))
    assert (rows <= columns) == (height <= width) or rows == columns


def test_resize_takes_the_sizes_torchvision_takes(torchvision: Any) -> None:
    rule = torchvision.transforms.functional._compute_resized_output_size
    for height, width in ((375, 500), (500, 375), (333, 333), (1, 9), (481, 321)):
        for size in (7, 224, 256):
            spec = resize(size).output(ArraySpec.of((height, width, 3), np.uint8))
            assert spec == ArraySpec.of((*rule((height, width), [size]), 3), np.uint8)


def test_resize_to_a_pair_is_that_size(photo: Any) -> None:
    assert resize((50, 20)).apply(photo, None).shape == (50, 20, 3)


def test_resize_of_unknown_size_says_so() -> None:
    unknown = ArraySpec.of((None, None, 3), np.uint8)
    assert resize(64).output(unknown) == unknown
    assert resize((64, 32)).output(unknown) == ArraySpec.of((64, 32, 3), np.uint8)
    assert resize(64).output(None) is None


def test_center_crop_is_torchvisions(image: Any, by_torchvision: Callable[..., Any]) -> None:
    for height, width in ((1, 1), (7, 7), (8, 8), (37, 37), (61, 10), (10, 95), (100, 101)):
        expected = by_torchvision("center_crop", image, output_size=[height, width])
        np.testing.assert_array_equal(center_crop((height, width)).apply(image, None), expected)


@given(side, side, st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_random_box_lies_within_the_image(height: int, width: int, seed: int) -> None:
    box = random_resized_crop(8).draw(np.random.default_rng(seed), (height, width, 3))
    assert 0 <= box.top <= height - box.height < height
    assert 0 <= box.left <= width - box.width < width


def test_a_random_box_has_the_area_and_ratio_asked_for() -> None:
    crop = random_resized_crop(8, scale=(0.2, 0.5), ratio=(0.5, 2.0))
    choices = Keyed(0, "crop")
    boxes = [crop.draw(choices.at(Key(i)), (1000, 1000, 3)) for i in range(2000)]
    areas = np.array([box.height * box.width for box in boxes]) / 1e6
    ratios = np.log([box.width / box.height for box in boxes])
    assert 0.199 < areas.min() < 0.21
    assert 0.49 < areas.max() < 0.501
    assert areas.mean() == pytest.approx(0.35, abs=0.01)
    assert ratios.mean() == pytest.approx(0.0, abs=0.05)
    assert ratios.std() == pytest.approx(2 * math.log(2) / math.sqrt(12), abs=0.02)
    room = np.array([box.top / (1000 - box.height) for box in boxes])
    assert room.mean() == pytest.approx(0.5, abs=0.03)
    assert np.corrcoef(room, areas)[0, 1] == pytest.approx(0.0, abs=0.1)


def test_a_random_box_reaches_every_place_equally_often() -> None:
    crop = random_resized_crop(8, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    choices = Keyed(0, "crop")
    places = [crop.draw(choices.at(Key(i)), (4, 4, 3))[:2] for i in range(4500)]
    counts = {place: places.count(place) for place in set(places)}
    assert set(counts) == {(top, left) for top in range(3) for left in range(3)}
    assert all(400 < count < 600 for count in counts.values())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 1000), Box(0, 493, 10, 13)),
        ((1000, 10), Box(493, 0, 13, 10)),
    ],
)
def test_where_no_box_fits_the_largest_central_one_is_taken(
    shape: tuple[int, int], expected: Box
) -> None:
    crop = random_resized_crop(8, scale=(1.0, 1.0))
    assert crop.draw(np.random.default_rng(0), (*shape, 3)) == expected


def test_a_box_that_fits_within_the_ratio_falls_back_to_the_whole_image() -> None:
    class Ones:
        def random(self, count: int) -> Any:
            return np.full(count, 0.999999)

    crop = random_resized_crop(8, scale=(1.0, 1.0))
    rng: Any = Ones()
    assert crop.draw(rng, (100, 100, 3)) == Box(0, 0, 100, 100)


@pytest.mark.parametrize("box", [Box(3, 5, 200, 300), Box(0, 0, 64, 64), Box(30, 40, 50, 170)])
def test_a_resized_crop_is_within_two_grey_levels_of_torchvision(
    photo: Any, by_torchvision: Callable[..., Any], box: Box
) -> None:
    expected = by_torchvision("resized_crop", photo, **box._asdict(), size=[96, 96], antialias=True)
    found = random_resized_crop(96).apply(photo, box)
    assert np.abs(found - expected.astype(int)).mean() <= 2.0


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("padding", [0, 4, (2, 5), (1, 2, 3, 4)])
def test_a_padded_crop_is_torchvisions(
    by_torchvision: Callable[..., Any], mode: str, padding: Any
) -> None:
    image = np.random.default_rng(3).integers(0, 256, (32, 28, 3), dtype=np.uint8)
    crop = random_crop((24, 20), padding=padding, padding_mode=mode, fill=9)
    sides = [padding] if isinstance(padding, int) else list(padding)
    padded = by_torchvision("pad", image, padding=sides, padding_mode=mode, fill=9)
    for seed in range(8):
        params = crop.draw(np.random.default_rng(seed), image.shape)
        top, left = params.box.top, params.box.left
        np.testing.assert_array_equal(
            crop.apply(image, params), padded[top : top + 24, left : left + 20]
        )


def test_a_random_crop_reaches_every_place_equally_often() -> None:
    crop = random_crop(30, padding=1)
    choices = Keyed(1, "crop")
    places = [crop.draw(choices.at(Key(i)), (30, 31, 3)).box[:2] for i in range(6000)]
    counts = {place: places.count(place) for place in set(places)}
    assert set(counts) == {(top, left) for top in range(3) for left in range(4)}
    assert all(400 < count < 600 for count in counts.values())


def test_an_image_too_small_to_crop_is_refused_with_the_remedy() -> None:
    crop = random_crop(32, padding=2)
    with pytest.raises(PipelineError, match="pad_if_needed=True"):
        crop.output(ArraySpec.of((27, None, 3), np.uint8))
    with pytest.raises(PipelineError, match=r"got an image of \(40, 20\)"):
        crop.draw(np.random.default_rng(0), (40, 20, 3))
    assert crop.output(ArraySpec.of((28, 28, 3), np.uint8)) == ArraySpec.of((32, 32, 3), np.uint8)


def test_pad_if_needed_pads_both_sides_as_torchvision_does() -> None:
    crop = random_crop(32, padding=1, pad_if_needed=True)
    params = crop.draw(np.random.default_rng(0), (20, 40, 3))
    assert params.padding == (1, 11, 1, 11)
    assert crop.apply(np.ones((20, 40, 3), np.uint8), params).shape == (32, 32, 3)
    assert crop.draw(np.random.default_rng(0), (40, 20, 3)).padding == (11, 1, 11, 1)


def test_a_fill_of_three_colours_a_padded_crop() -> None:
    crop = random_crop(3, padding=1, fill=(1, 2, 3))
    found = crop.apply(np.zeros((1, 1, 3), np.uint8), PaddedBox((1, 1, 1, 1), Box(0, 0, 3, 3)))
    assert found[0, 0].tolist() == [1, 2, 3]
    assert found[1, 1].tolist() == [0, 0, 0]


def test_a_flip_mirrors_the_axis_asked_for(image: Any) -> None:
    np.testing.assert_array_equal(random_flip().apply(image, True), image[:, ::-1])
    np.testing.assert_array_equal(random_flip(vertical=True).apply(image, True), image[::-1])
    assert random_flip().apply(image, False) is image


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_flip_happens_as_often_as_asked_for(p: float) -> None:
    choices = Keyed(0, "flip")
    flips = [random_flip(p).draw(choices.at(Key(i)), (4, 4, 3)) for i in range(3000)]
    assert np.mean(flips) == pytest.approx(p, abs=0.03 if 0 < p < 1 else 0)
