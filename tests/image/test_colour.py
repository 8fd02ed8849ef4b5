"""Changes of tone and colour against torchvision's, on images of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.image import color_jitter
from penstock.image.jitter import Jitter
from penstock.image.lazy_image import LazyImage
from penstock.keyed import Key, Keyed

FACTORS = [0.0, 0.1, 0.73, 1.0, 1.27, 1.9, 2.5]


def changed(image: Any, change: Callable[..., None], *by: float) -> Any:
    lazy = LazyImage(image)
    change(lazy, *by)
    return lazy.settle()


def difference(found: Any, expected: Any) -> int:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return int(np.abs(found.astype(int) - expected).max())


def test_brightness_is_torchvisions(image: Any, by_torchvision: Callable[..., Any]) -> None:
    for factor in FACTORS:
        expected = by_torchvision("adjust_brightness", image, brightness_factor=factor)
        assert difference(changed(image, LazyImage.brightness, factor), expected) == 0, factor


@pytest.mark.parametrize(
    ("name", "function", "keyword"),
    [
        ("adjust_contrast", LazyImage.contrast, "contrast_factor"),
        ("adjust_saturation", LazyImage.saturation, "saturation_factor"),
        ("adjust_sharpness", LazyImage.sharpness, "sharpness_factor"),
    ],
)
def test_blends_are_within_one_level_of_torchvision(
    image: Any,
    by_torchvision: Callable[..., Any],
    name: str,
    function: Callable[..., Any],
    keyword: str,
) -> None:
    for factor in FACTORS:
        expected = by_torchvision(name, image, **{keyword: factor})
        allowed = 1 if factor <= 2 else 2
        assert difference(changed(image, function, factor), expected) <= allowed, factor


def test_hue_is_within_one_level_of_torchvision(
    image: Any, by_torchvision: Callable[..., Any]
) -> None:
    for turn in (-0.5, -0.31, -0.05, 0.0, 0.02, 0.25, 0.5):
        expected = by_torchvision("adjust_hue", image, hue_factor=turn)
        assert difference(changed(image, LazyImage.hue, turn), expected) <= 1, turn


def test_posterize_is_torchvisions(image: Any, by_torchvision: Callable[..., Any]) -> None:
    for bits in range(9):
        expected = by_torchvision("posterize", image, bits=bits)
        assert difference(changed(image, LazyImage.posterize, bits), expected) == 0, bits


def test_solarize_is_torchvisions(image: Any, by_torchvision: Callable[..., Any]) -> None:
    for threshold in (0.0, 76.5, 128.0, 254.9, 255.0):
        expected = by_torchvision("solarize", image, threshold=threshold)
        assert difference(changed(image, LazyImage.solarize, threshold), expected) == 0, threshold


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("invert", LazyImage.invert),
        ("autocontrast", LazyImage.autocontrast),
        ("equalize", LazyImage.equalize),
    ],
)
def test_changes_without_strength_are_torchvisions(
    image: Any, by_torchvision: Callable[..., Any], name: str, function: Callable[..., Any]
) -> None:
    assert difference(changed(image, function), by_torchvision(name, image)) == 0


def test_jitter_changes_in_the_order_that_was_drawn(
    photo: Any, by_torchvision: Callable[..., Any]
) -> None:
    jitter = color_jitter(0.4, 0.4, 0.4, 0.1)
    params = Jitter((3, 1, 0, 2), (1.3, 0.7, 1.2, 0.08))
    expected = by_torchvision("adjust_hue", photo, hue_factor=0.08)
    expected = by_torchvision("adjust_contrast", expected, contrast_factor=0.7)
    expected = by_torchvision("adjust_brightness", expected, brightness_factor=1.3)
    expected = by_torchvision("adjust_saturation", expected, saturation_factor=1.2)
    found = jitter.apply(photo, params)
    assert difference(found, expected) <= 4
    assert np.abs(found - expected.astype(int)).mean() < 0.8
    assert difference(jitter.apply(photo, params._replace(order=(0, 1, 2, 3))), expected) > 8


def test_jitter_draws_from_the_ranges_asked_for() -> None:
    jitter = color_jitter(brightness=0.4, contrast=(0.5, 0.6), saturation=3, hue=0.1)
    choices = Keyed(0, "jitter")
    drawn = [jitter.draw(choices.at(Key(i)), (4, 4, 3)) for i in range(3000)]
    factors = np.array([params.factors for params in drawn])
    np.testing.assert_allclose(factors.min(axis=0), [0.6, 0.5, 0.0, -0.1], atol=0.01)
    np.testing.assert_allclose(factors.max(axis=0), [1.4, 0.6, 4.0, 0.1], atol=0.01)
    np.testing.assert_allclose(factors.mean(axis=0), [1.0, 0.55, 2.0, 0.0], atol=0.1)
    orders = [params.order for params in drawn]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert min(counts) > 80


def test_jitter_without_ranges_leaves_the_image(photo: Any) -> None:
    for jitter in (color_jitter(), color_jitter(0, 0, 0, 0), color_jitter((1, 1), hue=(0, 0))):
        params = jitter.draw(np.random.default_rng(0), photo.shape)
        assert params.factors == (None, None, None, None)
        np.testing.assert_array_equal(jitter.apply(photo, params), photo)
