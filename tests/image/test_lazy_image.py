"""Joined changes have the bits of changes applied one after the other, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.image import color_jitter, colour, normalize, tone, warp
from penstock.image.augment import (
    CHANGES,
    NARROW,
    WIDE,
    AugmentStep,
    apply_and_normalize,
    apply_except_table,
    apply_steps,
)
from penstock.image.jitter import Jitter
from penstock.image.lazy_image import LazyImage
from penstock.image.tone import Tone, Tones

LEVELS = np.arange(256, dtype=np.uint8)
TABLES = ["Brightness", "Contrast", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"]
NEAREST = ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"]


@pytest.fixture(autouse=True, scope="module")
def without_the_kernel() -> Iterator[None]:
    """Switch the kernel off, so that every image is a lazy image. The kernel has its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_switched_off", lambda: True)
        yield


@st.composite
def images(draw: Callable[..., Any]) -> Any:
    """Images with noise, narrow ranges, few levels, and of one colour."""
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    lows = rng.integers(0, 120, 3) if draw(st.booleans()) else np.zeros(3, int)
    highs = lows + draw(st.sampled_from([1, 2, 30, 100, 136]))
    if draw(st.booleans()):
        highs[:] = 256
    channels = draw(st.sampled_from([1, 3]))
    planes = [
        rng.integers(low, high, (height, width))
        for low, high in zip(lows[:channels], highs[:channels], strict=True)
    ]
    return np.stack(planes, axis=2).astype(np.uint8)


@st.composite
def step_lists(draw: Callable[..., Any], names: list[str], most: int = 5) -> Any:
    def one() -> Any:
        return st.builds(
            lambda name, space, strength, negative: space.step(name, strength, negative, 30, 30),
            st.sampled_from(names),
            st.sampled_from([NARROW, WIDE]),
            st.sampled_from([0.0, 0.1, 0.3, 0.65, 1.0]),
            st.booleans(),
        )

    return tuple(draw(st.lists(one(), max_size=most)))


fills = st.sampled_from([(0.0,), (255.0,), (127.5,), (200.0, 100.0, 50.0), (0.0, 3.0, 255.0)])


def in_turn(image: Any, steps: Any, fill: tuple[float, ...], smooth: bool) -> Any:
    for step in steps:
        image = apply_steps(image, (step,), fill, smooth)
    return image


@given(images(), step_lists(list(CHANGES)), fills, st.booleans())
@settings(max_examples=200, deadline=None)
def test_joined_changes_have_the_bits_of_changes_in_turn(
    image: Any, steps: Any, fill: tuple[float, ...], smooth: bool
) -> None:
    found = apply_steps(image, steps, fill, smooth)
    np.testing.assert_array_equal(found, in_turn(image, steps, fill, smooth))


@given(images(), step_lists(TABLES, most=7))
@settings(max_examples=200, deadline=None)
def test_any_sequence_of_tables_becomes_one_table(image: Any, steps: Any) -> None:
    found, table = apply_except_table(image, steps, (0.0,), False)
    if table is not None:
        assert table.shape == (image.shape[2], 256)
        found = np.stack([one[found[..., c]] for c, one in enumerate(table)], axis=2)
    np.testing.assert_array_equal(found, in_turn(image, steps, (0.0,), False))


@given(images(), step_lists(TABLES + NEAREST, most=6), fills)
@settings(max_examples=200, deadline=None)
def test_tables_and_moves_in_any_order_have_the_bits_of_changes_in_turn(
    image: Any, steps: Any, fill: tuple[float, ...]
) -> None:
    found, table = apply_except_table(image, steps, fill, False)
    if table is not None:
        found = np.stack([one[found[..., c]] for c, one in enumerate(table)], axis=2)
    np.testing.assert_array_equal(found, in_turn(image, steps, fill, False))


@given(images(), step_lists(list(CHANGES)), fills, st.booleans(), st.sampled_from(["chw", "hwc"]))
@settings(max_examples=100, deadline=None)
def test_floats_are_what_normalize_makes_of_the_bytes(
    image: Any, steps: Any, fill: tuple[float, ...], smooth: bool, layout: str
) -> None:
    after = normalize(0.4, 0.2, layout=layout)
    found = apply_and_normalize(image, steps, fill, smooth, after, None)
    np.testing.assert_array_equal(found, after.apply(apply_steps(image, steps, fill, smooth), None))


@given(
    images(),
    st.lists(st.tuples(st.integers(-45, 45), st.integers(-45, 45)), min_size=1, max_size=4),
    fills,
)
@settings(max_examples=120, deadline=None)
def test_any_sequence_of_shifts_becomes_one_shift(
    image: Any, shifts: Any, fill: tuple[float, ...]
) -> None:
    lazy = LazyImage(image, fill)
    expected = image
    for down, right in shifts:
        lazy.shift(down, right)
        expected = shifted_pixel_by_pixel(expected, down, right, fill)
    np.testing.assert_array_equal(lazy.settle(), expected)


def shifted_pixel_by_pixel(image: Any, down: int, right: int, fill: tuple[float, ...]) -> Any:
    levels = [round(level) for level in fill]
    out = np.empty_like(image)
    out[:] = levels[: image.shape[2]] if len(levels) > 1 else levels[0]
    rows, columns = np.indices(image.shape[:2])
    inside = (rows >= down) & (rows - down < len(image))
    inside &= (columns >= right) & (columns - right < image.shape[1])
    out[inside] = image[rows[inside] - down, columns[inside] - right]
    return out


@given(st.floats(-1.2, 1.2), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3]))
@settings(max_examples=100, deadline=None)
def test_a_sheared_row_is_the_row_moved_by_the_nearest_whole_number(
    slope: float, height: int, width: int, channels: int
) -> None:
    shape = (height, width, channels)
    image = np.random.default_rng(height * width).integers(1, 256, shape, dtype=np.uint8)
    expected = np.zeros_like(image)
    for row in range(height):
        by = round(slope * (row + 0.5))
        part = image[row : row + 1]
        expected[row] = shifted_pixel_by_pixel(part, 0, -by, (0.0,))[0]
    found = warp.shear_x(image, slope, (0,) * channels, False)
    np.testing.assert_array_equal(found, expected)
    standing = warp.shear_y(image.transpose(1, 0, 2), slope, (0,) * channels, False)
    np.testing.assert_array_equal(standing.transpose(1, 0, 2), expected)


def same_by_table_and_by_passes(tones: Tones, channels: int) -> None:
    # Long enough for OpenCV's vector code, and not a multiple of its vector length.
    ramp = np.resize(LEVELS, (1, 1031, 1)).repeat(channels, axis=2)
    by_table = tuple(Tone(one.table, one.rising) for one in tones)
    np.testing.assert_array_equal(tone.apply(tones, ramp, None), tone.apply(by_table, ramp, None))


@given(
    st.floats(0.0, 40.0),
    st.lists(st.integers(0, 255 * 100), min_size=3, max_size=3),
    st.sampled_from([1, 3]),
)
@settings(max_examples=160, deadline=None)
def test_passes_of_a_factor_give_what_its_table_gives(
    factor: float, sums: list[int], channels: int
) -> None:
    same_by_table_and_by_passes(tone.brightness(factor), channels)
    same_by_table_and_by_passes(tone.contrast(factor, sums[:channels], 100), channels)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
@settings(max_examples=160, deadline=None)
def test_passes_that_stretch_give_what_their_table_gives(a: int, b: int, c: int, d: int) -> None:
    one, other = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    same_by_table_and_by_passes(tone.autocontrast([one, other, (0, 255)]), 3)
    same_by_table_and_by_passes(tone.autocontrast([one] * 3), 3)
    same_by_table_and_by_passes(tone.autocontrast([one]), 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_passes_of_whole_numbers_give_what_their_table_gives(channels: int) -> None:
    for bits in range(9):
        same_by_table_and_by_passes(tone.posterize(bits), channels)
    for threshold in np.linspace(0, 256, 513):
        same_by_table_and_by_passes(tone.solarize(float(threshold)), channels)


def test_most_factors_and_ranges_need_no_table() -> None:
    factors = np.random.default_rng(0).uniform(0.1, 2.0, 300)
    assert sum(tone.brightness(float(one))[0].passes is not None for one in factors) > 270
    ranges = [tone.autocontrast([(low, high)]) for low in range(40) for high in range(200, 256)]
    assert sum(one.passes is not None for (one,) in ranges) > 0.7 * len(ranges)


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1), (4, 1, 3), (2, 2, 1), (1, 1, 3)])
def test_images_of_a_few_pixels_work(shape: tuple[int, ...]) -> None:
    image = np.arange(10, 10 + np.prod(shape), dtype=np.uint8).reshape(shape)
    found = apply_steps(image, (AugmentStep("AutoContrast", 0.0),), (0.0,), False)
    low, high = image.min(axis=(0, 1)), image.max(axis=(0, 1))
    expected = (image - low) * np.where(low == high, 1.0, 255.0 / np.maximum(high - low, 1))
    expected = np.where(low == high, image, expected)
    assert np.abs(found - expected).max() <= 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes over the pixels, as they happen."""
    made: list[str] = []

    def watch(place: Any, name: str) -> None:
        real = getattr(place, name)

        def called(*args: Any) -> Any:
            made.append(name)
            return real(*args)

        monkeypatch.setattr(place, name, called)

    for name in ("count", "sums", "ranges", "saturation", "sharpness"):
        watch(colour, name)
    watch(tone, "apply")
    watch(warp, "_framed")
    return made


def test_levels_are_counted_and_looked_up_once_for_any_sequence_of_tables(
    photo: Any, calls: list[str]
) -> None:
    names = ["Equalize", "Invert", "AutoContrast", "Equalize", "Contrast", "Solarize", "Equalize"]
    apply_steps(photo, tuple(NARROW.step(name, 0.5, False, 9, 9) for name in names), (0.0,), False)
    assert calls == ["count", "apply"]


def test_a_range_follows_through_a_rising_table(photo: Any, calls: list[str]) -> None:
    steps = (
        AugmentStep("Brightness", 0.27),
        AugmentStep("Posterize", 5.0),
        AugmentStep("AutoContrast", 0.0),
    )
    apply_steps(photo, steps, (0.0,), False)
    assert calls == ["ranges", "apply"]


def test_shifts_are_one_copy_even_with_tables_between(photo: Any, calls: list[str]) -> None:
    steps = (
        AugmentStep("TranslateX", 20.0),
        AugmentStep("Posterize", 4.0),
        AugmentStep("TranslateY", -30.0),
        AugmentStep("TranslateX", -5.0),
    )
    apply_steps(photo, steps, (0.0,), False)
    assert calls == ["_framed", "apply"]


def test_shifts_that_fill_with_different_levels_stay_apart(photo: Any, calls: list[str]) -> None:
    steps = (
        AugmentStep("TranslateX", 20.0),
        AugmentStep("Invert", 0.0),
        AugmentStep("TranslateY", 30.0),
    )
    found = apply_steps(photo, steps, (0.0,), False)
    assert calls == ["_framed", "_framed", "apply"]
    np.testing.assert_array_equal(found[:30], 0)
    np.testing.assert_array_equal(found[30:, :20], 255)
    np.testing.assert_array_equal(found[30:, 20:], 255 - photo[:-30, :-20])


def test_changes_that_change_nothing_touch_no_pixel(photo: Any, calls: list[str]) -> None:
    # Solarize inverts white even at a strength of 0.
    without = ("AutoContrast", "Equalize", "Invert", "Solarize")
    names = [name for name in CHANGES if name not in without]
    steps = tuple(space.step(name, 0.0, False, 9, 9) for name in names for space in (NARROW, WIDE))
    assert apply_steps(photo, steps, (7.0,), False) is photo
    assert apply_steps(photo, steps, (7.0,), True) is photo
    assert calls == []


def test_a_table_stays_pending_while_pixels_move_if_the_fill_allows_it(photo: Any) -> None:
    steps = (AugmentStep("Solarize", 100.0), AugmentStep("Rotate", 20.0))
    for fill, waits in ((0.0, True), (99.0, True), (130.0, True), (200.0, False)):
        moved, table = apply_except_table(photo, steps, (fill,), False)
        assert (table is not None) == waits, fill
        np.testing.assert_array_equal(
            moved[0, 0] if table is None else table[(0, 1, 2), moved[0, 0]], [fill] * 3
        )
    assert apply_except_table(photo, steps, (0.0,), True)[1] is None


def test_there_is_no_table_if_nothing_is_pending(photo: Any) -> None:
    assert apply_except_table(photo, (), (0.0,), False) == (photo, None)
    assert apply_except_table(photo, (AugmentStep("Brightness", 0.0),), (0.0,), False) == (
        photo,
        None,
    )
    assert (
        apply_except_table(
            photo, (AugmentStep("Invert", 0.0), AugmentStep("Color", 0.5)), (0.0,), False
        )[1]
        is None
    )


def test_jitter_joins_its_tables_and_has_the_bits_of_changes_in_turn(
    photo: Any, calls: list[str]
) -> None:
    params = Jitter((0, 1, 2, 3), (1.27, 0.7, 1.2, 0.08))
    found = color_jitter(0.4, 0.4, 0.4, 0.1).apply(photo, params)
    assert calls == ["apply", "sums", "apply", "saturation"]
    expected = photo
    for change, by in zip(
        (LazyImage.brightness, LazyImage.contrast, LazyImage.saturation, LazyImage.hue),
        params.factors,
        strict=True,
    ):
        lazy = LazyImage(expected)
        assert by is not None
        change(lazy, by)
        expected = lazy.settle()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", NEAREST)
def test_a_fill_between_two_levels_is_the_same_for_every_move(photo: Any, name: str) -> None:
    step = NARROW.step(name, 0.8, False, *photo.shape[:2])
    found = apply_steps(photo, (step,), (127.5,), False)
    assert (found == 128).all(axis=2).mean() > 0.05
