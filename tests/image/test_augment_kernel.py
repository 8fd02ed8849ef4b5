"""Augmentation by the kernel: the bits of a lazy image, torchvision's rotations, no overrun."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.errors import PipelineError
from penstock.image import kernel, normalize, rand_augment
from penstock.image.augment import (
    CHANGES,
    NARROW,
    NUMBERS,
    WIDE,
    AugmentStep,
    Space,
    apply_and_normalize,
    apply_steps,
)
from penstock.image.lazy_image import LazyImage

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

UNROTATED = [name for name in CHANGES if name != "Rotate"]
LARGEST = {"Posterize": 9.0, "Solarize": 300.0, "TranslateX": 60.0, "TranslateY": 60.0}
"""Largest magnitudes to test, beyond what any policy draws. All other changes go up to 3."""

BLENDED = ("Brightness", "Color", "Contrast", "Sharpness")


@st.composite
def images(draw: Callable[..., Any], most: int = 50) -> Any:
    """Images with noise in narrow and wide ranges, with few levels, and of one colour."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    low = rng.integers(0, draw(st.sampled_from([1, 120])), 3)
    high = np.minimum(low + draw(st.sampled_from([1, 2, 30, 136, 256])), 256)
    return rng.integers(low, high, (height, width, 3), dtype=np.uint8)


@st.composite
def steps_of(draw: Callable[..., Any], names: list[str], most: int = 5) -> tuple[AugmentStep, ...]:
    def one() -> AugmentStep:
        name = draw(st.sampled_from(names))
        if draw(st.booleans()):
            space: Space = draw(st.sampled_from([NARROW, WIDE]))
            strength = draw(st.sampled_from([0.0, 0.1, 0.3, 0.65, 1.0]))
            return space.step(name, strength, draw(st.booleans()), 30, 40)
        largest = LARGEST.get(name, 3.0)
        # Negative factors are not used, and OpenCV treats them differently.
        smallest = -1.0 if name in BLENDED else -largest
        return AugmentStep(name, draw(st.floats(smallest, largest)))

    return tuple(one() for _ in range(draw(st.integers(0, most))))


fills = st.sampled_from([(0.0,), (255.0,), (127.5,), (200.0, 100.0, 50.0), (0.0, 3.0, 255.0)])


def by_lazy_image(image: Any, steps: tuple[AugmentStep, ...], fill: tuple[float, ...]) -> Any:
    lazy = LazyImage(image, fill)
    for step in steps:
        CHANGES[step.name](lazy, step.magnitude)
    return lazy.settle()


@given(images(), steps_of(UNROTATED), fills)
@settings(max_examples=300, deadline=None)
def test_the_kernel_has_the_bits_of_a_lazy_image(
    image: Any, steps: tuple[AugmentStep, ...], fill: tuple[float, ...]
) -> None:
    before = image.copy()
    found = apply_steps(image, steps, fill, False)
    np.testing.assert_array_equal(found, by_lazy_image(image, steps, fill))
    np.testing.assert_array_equal(image, before)


COUNTING = ["AutoContrast", "Contrast", "Equalize", "Solarize", "TranslateX", "ShearY", "Color"]


@given(images(), steps_of(COUNTING), fills)
@settings(max_examples=120, deadline=None)
def test_level_counts_are_not_used_after_the_pixels_change(
    image: Any, steps: tuple[AugmentStep, ...], fill: tuple[float, ...]
) -> None:
    found = apply_steps(image, steps, fill, False)
    np.testing.assert_array_equal(found, by_lazy_image(image, steps, fill))


def test_levels_of_a_large_bright_image_add_up() -> None:
    image = np.full((300, 400, 3), 255, np.uint8)
    image[::7, ::5] = (3, 90, 250)
    steps = (AugmentStep("Contrast", 0.4),)
    np.testing.assert_array_equal(
        apply_steps(image, steps, (0.0,), False), by_lazy_image(image, steps, (0.0,))
    )


@pytest.mark.parametrize("name", UNROTATED)
def test_every_change_has_the_bits_of_a_lazy_image_at_full_size(photo: Any, name: str) -> None:
    for space in (NARROW, WIDE):
        for strength in (0.2, 0.55, 1.0):
            step = space.step(name, strength, strength == 0.55, *photo.shape[:2])
            found = apply_steps(photo, (step,), (7.0,), False)
            np.testing.assert_array_equal(found, by_lazy_image(photo, (step,), (7.0,)))


@given(images(), steps_of(list(CHANGES)), fills, st.sampled_from(["chw", "hwc"]))
@settings(max_examples=120, deadline=None)
def test_floats_are_what_normalize_makes_of_the_bytes(
    image: Any, steps: tuple[AugmentStep, ...], fill: tuple[float, ...], layout: str
) -> None:
    after = normalize(layout=layout)
    found = apply_and_normalize(image, steps, fill, False, after, None)
    np.testing.assert_array_equal(found, after.apply(apply_steps(image, steps, fill, False), None))


@given(images(), steps_of(list(CHANGES)), fills)
@settings(max_examples=120, deadline=None)
def test_steps_together_have_the_bits_of_steps_one_after_the_other(
    image: Any, steps: tuple[AugmentStep, ...], fill: tuple[float, ...]
) -> None:
    expected = image
    for step in steps:
        expected = apply_steps(expected, (step,), fill, False)
    np.testing.assert_array_equal(apply_steps(image, steps, fill, False), expected)


@pytest.mark.parametrize("shape", [(60, 80, 3), (41, 33, 3), (31, 31, 3), (32, 32, 3), (1, 37, 3)])
def test_a_rotation_takes_the_pixels_that_torchvision_takes(
    by_torchvision: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    image = np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)
    angles = [4.5 * i for i in range(-30, 31)] + [30.0, -60.0, 120.0, 271.3, 1e4, -1e-9]
    for degrees in angles:
        found = apply_steps(image, (AugmentStep("Rotate", degrees),), (0.0,), False)
        expected = by_torchvision("rotate", image, angle=degrees)
        # No pixel differs here. A torch with fused multiply-add may round differently.
        assert (found != expected).any(axis=2).mean() <= 0.002, degrees


def test_a_rotation_differs_from_that_of_a_lazy_image_in_few_pixels(photo: Any) -> None:
    for degrees in (-135.0, -9.0, 1.0, 20.0, 45.0, 90.0, 180.0):
        steps = (AugmentStep("Rotate", degrees),)
        found = apply_steps(photo, steps, (9.0,), False)
        assert (found != by_lazy_image(photo, steps, (9.0,))).any(axis=2).mean() <= 0.01, degrees


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.lists(
        st.tuples(
            st.integers(0, len(CHANGES) - 1),
            st.one_of(
                st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e6, 1e6), st.just(90)
            ),
        ),
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_finite_magnitude_stays_within_out(
    height: int, width: int, steps: list[tuple[int, float]], floats: bool
) -> None:
    rng = np.random.default_rng(height * width)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    room = np.full(image.size + 128, 99, np.float32 if floats else np.uint8)
    shape = (3, height, width) if floats else image.shape
    table = rng.random((3, 256), dtype=np.float32) if floats else None
    kernel.augment(image, steps, (1, 2, 3), room[64:-64].reshape(shape), table=table)
    assert (room[:64] == 99).all()
    assert (room[-64:] == 99).all()


def test_changes_that_do_nothing_give_the_image_itself(photo: Any) -> None:
    steps = (
        AugmentStep("Identity", 0.0),
        AugmentStep("Brightness", 0.0),
        AugmentStep("Rotate", -720.0),
        AugmentStep("TranslateX", 0.9),
        AugmentStep("Posterize", 8.0),
        AugmentStep("Invert", 0.0),
        AugmentStep("Invert", 0.0),
    )
    assert apply_steps(photo, steps, (0.0,), False) is photo
    out = np.full_like(photo, 7)
    assert kernel.augment(photo, [(0, 0.0)], (0, 0, 0), out) is False
    assert (out == 7).all()


def test_an_image_that_is_not_contiguous_works_too(photo: Any) -> None:
    steps = (AugmentStep("Rotate", 20.0), AugmentStep("Equalize", 0.0))
    part = photo[10:90, 20:100]
    assert not part.flags.c_contiguous
    found = apply_steps(part, steps, (0.0,), False)
    np.testing.assert_array_equal(found, apply_steps(part.copy(), steps, (0.0,), False))


def test_a_read_only_image_works_too(photo: Any) -> None:
    photo.flags.writeable = False
    found = apply_steps(photo, (AugmentStep("Sharpness", 0.5),), (0.0,), False)
    assert found.flags.writeable


def test_one_channel_and_interpolation_use_a_lazy_image(
    photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **named: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(kernel, "augment", never)
    steps = (AugmentStep("Rotate", 20.0),)
    assert apply_steps(photo[..., :1].copy(), steps, (0.0,), False).shape == (240, 320, 1)
    assert apply_steps(photo, steps, (0.0,), True).shape == photo.shape
    with pytest.raises(AssertionError):
        apply_steps(photo, steps, (0.0,), False)


def test_a_row_of_a_batch_is_written_and_returned(photo: Any) -> None:
    batch = np.zeros((2, 3, 240, 320), np.float32)
    found = apply_and_normalize(
        photo, (AugmentStep("Invert", 0.0),), (0.0,), False, normalize(), batch[1]
    )
    assert found.base is batch
    np.testing.assert_array_equal(batch[1], normalize().apply(255 - photo, None))
    assert not batch[0].any()


@pytest.mark.parametrize("magnitude", [math.nan, math.inf, -math.inf])
def test_a_magnitude_that_is_not_finite_is_refused(photo: Any, magnitude: float) -> None:
    for name in CHANGES:
        with pytest.raises(PipelineError, match="finite magnitude"):
            rand_augment().apply(
                photo, (AugmentStep("Identity", 0.0), AugmentStep(name, magnitude))
            )


IMAGE = np.zeros((4, 5, 3), np.uint8)
TABLE = np.zeros((3, 256), np.float32)


@pytest.mark.parametrize(
    ("image", "steps", "fill", "table", "out"),
    [
        (IMAGE, [(15, 0.0)], (0, 0, 0), None, IMAGE.copy()),
        (IMAGE, [(-1, 0.0)], (0, 0, 0), None, IMAGE.copy()),
        (IMAGE, [(1,)], (0, 0, 0), None, IMAGE.copy()),
        (IMAGE, ["ab"], (0, 0, 0), None, IMAGE.copy()),
        (IMAGE, 3, (0, 0, 0), None, IMAGE.copy()),
        (IMAGE, [], (0, 0, 256), None, IMAGE.copy()),
        (IMAGE, [], (0, 0, -1), None, IMAGE.copy()),
        (IMAGE, [], (0, 0), None, IMAGE.copy()),
        (IMAGE, [], (0, 0, 0), None, np.zeros((5, 4, 3), np.uint8)),
        (IMAGE, [], (0, 0, 0), None, np.zeros((3, 4, 5), np.float32)),
        (IMAGE, [], (0, 0, 0), TABLE, IMAGE.copy()),
        (IMAGE, [], (0, 0, 0), TABLE[:2], np.zeros((3, 4, 5), np.float32)),
        (IMAGE, [], (0, 0, 0), None, IMAGE),
        (IMAGE[:, :, :1], [], (0, 0, 0), None, IMAGE.copy()),
        (IMAGE[:, ::2], [], (0, 0, 0), None, np.zeros((4, 3, 3), np.uint8)),
        (IMAGE.astype(np.int16), [], (0, 0, 0), None, IMAGE.copy()),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    image: Any, steps: Any, fill: Any, table: Any, out: Any
) -> None:
    with pytest.raises(PipelineError, match="the kernel cannot apply"):
        kernel.augment(image, steps, fill, out, table=table)


def test_the_kernel_numbers_the_changes_like_the_table(photo: Any) -> None:
    assert list(NUMBERS) == list(CHANGES)
    assert list(NUMBERS.values()) == list(range(15))
    photo = photo // 2 + np.uint8(20)
    out = np.empty_like(photo)
    for name, number in NUMBERS.items():
        step = NARROW.step(name, 0.7, False, *photo.shape[:2])
        written = kernel.augment(photo, [(number, step.magnitude)], (0, 0, 0), out)
        assert written == (name != "Identity")
        if written and name != "Rotate":
            np.testing.assert_array_equal(out, by_lazy_image(photo, (step,), (0.0,)), err_msg=name)


def test_many_threads_at_once_make_the_same_bits(photo: Any) -> None:
    names = list(CHANGES)
    jobs = [
        tuple(NARROW.step(names[(n + k * 4) % 15], 0.6, False, 240, 320) for k in range(3))
        for n in range(15)
    ]
    expected = [apply_steps(photo, steps, (0.0,), False) for steps in jobs]
    wrong: list[int] = []
    done: list[int] = []

    def work(first: int) -> None:
        for turn in range(45):
            n = (first + turn) % len(jobs)
            if not np.array_equal(apply_steps(photo, jobs[n], (0.0,), False), expected[n]):
                wrong.append(n)
        done.append(first)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert wrong == []
