"""Resizing: close to torchvision, antialiased, exact in geometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.image.resample import resize, resize_part

side = st.integers(1, 70)


@pytest.mark.parametrize(
    "factor", [1.1, 1.21, 1.3, 1.45, 1.6, 1.8, 2.0, 2.2, 2.6, 3.1, 3.5, 3.7, 4.4, 5.0, 6.3, 8.0]
)
def test_shrinking_is_within_two_grey_levels_of_torchvision(
    photo: Any, by_torchvision: Callable[..., Any], factor: float
) -> None:
    height, width = round(240 / factor), round(320 / factor)
    expected = by_torchvision("resize", photo, size=[height, width], antialias=True)
    found = resize(photo, height, width)
    assert found.shape == expected.shape
    assert found.dtype == np.uint8
    difference = found.astype(int) - expected
    assert np.abs(difference).mean() <= 2.0
    assert abs(difference.mean()) <= 0.6


@pytest.mark.parametrize(("height", "width"), [(100, 320), (240, 90), (30, 400), (500, 60)])
def test_each_side_has_its_own_factor(
    photo: Any, by_torchvision: Callable[..., Any], height: int, width: int
) -> None:
    expected = by_torchvision("resize", photo, size=[height, width], antialias=True)
    assert np.abs(resize(photo, height, width) - expected.astype(int)).mean() <= 2.0


@pytest.mark.parametrize("factor", [1.3, 2.0, 3.7])
def test_growing_differs_from_torchvision_by_rounding_only(
    photo: Any, by_torchvision: Callable[..., Any], factor: float
) -> None:
    height, width = round(240 * factor), round(320 * factor)
    expected = by_torchvision("resize", photo, size=[height, width], antialias=True)
    assert np.abs(resize(photo, height, width) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("factor", [1.5, 2.3, 3.0, 4.7, 7.0])
def test_fine_stripes_turn_grey_and_not_into_coarse_stripes(factor: float) -> None:
    stripes = np.zeros((210, 210, 3), np.uint8)
    stripes[:, ::2] = 255
    size = round(210 / factor)
    # Sampling alone turns them into coarse stripes that the image does not have.
    plain = cv2.resize(stripes, (size, size), interpolation=cv2.INTER_LINEAR)
    assert resize(stripes, size, size).std() < 0.6 * plain.std()


@pytest.mark.parametrize("length", [201, 202, 203, 204, 205])
def test_halving_an_odd_side_does_not_move_the_picture(length: int) -> None:
    ramp = np.repeat(np.linspace(0, 65535, length)[:, None], 8, axis=1)[..., None]
    found = resize(ramp.astype(np.uint16), 23, 8)[:, 0, 0].astype(float)
    step = length / 23
    centres = (np.arange(23) + 0.5) * step - 0.5
    expected = centres / (length - 1) * 65535
    # The edges blend with the border; elsewhere, half a source pixel would be 160.
    assert np.abs(found - expected)[1:-1].max() < 40


@pytest.mark.parametrize(("height", "width"), [(100, 90), (61, 70), (30, 23), (24, 160)])
def test_a_part_of_whole_pixels_is_the_same_as_resizing_it(
    photo: Any, height: int, width: int
) -> None:
    found = resize_part(photo, (20, 30, 200, 250), height, width)
    expected = resize(photo[20:220, 30:280], height, width).astype(int)
    assert np.abs(found - expected).max() <= 2


@pytest.mark.parametrize("length", [33.0, 61.5, 93.25, 180.75])
@pytest.mark.parametrize("first", [0.0, 3.25, 6.5, 11.75])
def test_a_part_begins_and_ends_within_pixels(first: float, length: float) -> None:
    ramp = np.repeat(np.linspace(0, 65535, 200)[:, None], 8, axis=1)[..., None]
    found = resize_part(ramp.astype(np.uint16), (first, 0, length, 8), 23, 8)[:, 0, 0].astype(float)
    centres = first + (np.arange(23) + 0.5) * length / 23 - 0.5
    # A tenth of a pixel of the ramp is 33.
    assert np.abs(found - centres / 199 * 65535)[2:-2].max() < 33


def test_the_same_size_returns_the_same_array(photo: Any) -> None:
    assert resize(photo, 240, 320) is photo


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_other_dtypes_and_channels_stay_what_they_are(dtype: Any, channels: int) -> None:
    image = np.full((40, 30, channels), 200, dtype)
    for height, width in ((20, 10), (80, 90), (5, 5)):
        found = resize(image, height, width)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, np.full((height, width, channels), 200), rtol=1e-6)


@given(side, side, side, side, st.sampled_from([1, 3]))
@settings(max_examples=80, deadline=None)
def test_a_flat_image_of_any_size_stays_flat(
    rows: int, columns: int, height: int, width: int, channels: int
) -> None:
    found = resize(np.full((rows, columns, channels), 91, np.uint8), height, width)
    np.testing.assert_array_equal(found, np.full((height, width, channels), 91, np.uint8))
