"""The outcomes that each random operation states, against those that it really draws."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.audio as ps_audio
import penstock.image as ps_image
from penstock.audio.masking import SpecAugment
from penstock.errors import PipelineError
from penstock.image.augment import NAMES, WIDE
from penstock.image.boxes import Sizes
from penstock.operation import LEVELS, Operation

image: Any = ps_image
audio: Any = ps_audio

RANDOM: list[tuple[Operation, tuple[int, ...]]] = [
    (image.auto_augment(), (60, 60, 3)),
    (image.color_jitter(0.4, 0.4, 0.4, 0.1), (60, 60, 3)),
    (image.deep_auto_augment("cifar10"), (32, 32, 3)),
    (image.erase(), (60, 60, 3)),
    (image.rand_augment(), (60, 60, 3)),
    (image.random_crop(32, padding=4), (32, 32, 3)),
    (image.random_flip(), (60, 60, 3)),
    (image.random_resized_crop(16), (60, 60, 3)),
    (image.trivial_augment(), (60, 60, 3)),
    (audio.random_crop(300), (1, 900)),
    (audio.random_gain(), (1, 900)),
    (audio.spec_augment(), (1, 80, 400)),
]


def drawn(
    operation: Operation,
    shape: tuple[int, ...],
    times: int = 20_000,
    seen: Callable[[Any], Any] = lambda params: params,
) -> int:
    """The number of different parameters in very many draws."""
    rng = np.random.default_rng(0)
    return len({seen(operation.draw(rng, shape)) for _ in range(times)})


def public(package: Any) -> list[type[Operation]]:
    found: list[type[Operation]] = [getattr(package, name) for name in package.__all__]
    return [operation for operation in found if operation.random]


def test_every_public_random_operation_is_tested_here() -> None:
    tested = {type(operation) for operation, _ in RANDOM}
    assert tested == {*public(ps_image), *public(ps_audio)}


@pytest.mark.parametrize(("operation", "shape"), RANDOM, ids=repr)
def test_every_random_operation_has_more_than_one_outcome(
    operation: Operation, shape: tuple[int, ...]
) -> None:
    found = operation.outcomes(shape)
    assert isinstance(found, float)
    assert 2.0 <= found <= 1e300
    unknown = operation.outcomes(None)
    assert unknown is None or unknown == found


@pytest.mark.parametrize(
    "operation",
    [image.decode(), image.resize(8), image.normalize(), audio.mono(), audio.pad(8)],
    ids=repr,
)
def test_operations_that_are_not_random_have_one_outcome(operation: Operation) -> None:
    assert operation.outcomes(None) == 1.0
    assert operation.outcomes((9, 9, 3)) == 1.0


def test_the_outcomes_of_a_users_random_operation_are_unknown_by_default() -> None:
    class Shaky(Operation):
        random = True

    assert Shaky().outcomes((9, 9, 3)) is None


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (image.random_resized_crop(4, scale=(0.2, 0.8)), (6, 6, 3)),
        (image.random_resized_crop(4, ratio=(1, 1)), (8, 8, 3)),
        (image.random_resized_crop(4, scale=(0.4, 0.7)), (5, 5, 3)),
        (image.random_resized_crop(4, scale=(0.5, 0.5), ratio=(1, 1)), (7, 7, 3)),
        # All boxes are 2.5 pixels high and wide, which round() makes 2; and 3.5, which it makes 4.
        (image.random_resized_crop(4, scale=(0.25, 0.25), ratio=(1, 1)), (5, 5, 3)),
        (image.random_resized_crop(4, scale=(0.25, 0.25), ratio=(1, 1)), (7, 7, 3)),
        # No box fits: only the fallback box remains.
        (image.random_resized_crop(4, scale=(1, 1), ratio=(3, 4)), (6, 6, 3)),
        (image.random_resized_crop(4, ratio=(3, 4)), (6, 6, 3)),
        (image.random_crop(5, padding=(1, 0)), (6, 7, 3)),
        (image.random_crop(9, padding=1, pad_if_needed=True), (6, 9, 3)),
        (image.random_flip(), (6, 7, 3)),
        (image.random_flip(p=0.0), (6, 7, 3)),
        (image.random_flip(p=1.0), (6, 7, 3)),
        (audio.random_crop(20), (1, 50)),
        (audio.random_crop(50), (1, 20)),
        (audio.random_crop(50, place="end"), (1, 20)),
        (audio.random_crop(50, padding=8), (1, 50)),
        (audio.random_gain(3, 3), (1, 50)),
        (audio.spec_augment(1, 3, 0, 0, share=1.0), (1, 4, 9)),
    ],
    ids=repr,
)
def test_outcomes_are_as_many_as_drawn(operation: Operation, shape: tuple[int, ...]) -> None:
    seen = masked if isinstance(operation, SpecAugment) else repr
    assert operation.outcomes(shape) == drawn(operation, shape, seen=seen)


def masked(params: Any) -> Any:
    return tuple(tuple(sorted(s for s in spans if s[0] < s[1])) for spans in params)


def test_masks_are_sets_of_bands() -> None:
    masks = audio.spec_augment(2, 2, 1, 1, share=1.0)
    assert masks.outcomes((1, 2, 3)) == drawn(masks, (1, 2, 3), seen=masked) == 63
    assert audio.spec_augment(0, 5, 0, 5).outcomes((1, 80, 400)) == 1.0


def test_a_repeated_clip_has_as_many_outcomes_as_samples() -> None:
    crop = audio.random_crop(20, mode="repeat")
    sound = np.arange(1.0, 6.0, dtype=np.float32).reshape(1, 5)
    rng = np.random.default_rng(0)
    heard = {crop.apply(sound, crop.draw(rng, sound.shape)).tobytes() for _ in range(500)}
    assert crop.outcomes(sound.shape) == len(heard) == 5


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (image.erase(1.0, scale=(0.3, 1.0)), (6, 5, 3)),
        (image.erase(1.0, scale=(0.1, 0.2), ratio=(1, 1)), (6, 5, 3)),
        (image.erase(0.5, scale=(0.1, 0.2), ratio=(1, 1)), (6, 5, 3)),
        (image.erase(0.5, scale=(0.0, 0.2), ratio=(0.5, 1.5)), (6, 5, 3)),
        (image.erase(0.0), (6, 5, 3)),
    ],
    ids=repr,
)
def test_outcomes_of_erase_are_as_many_as_rectangles_drawn(
    operation: Operation, shape: tuple[int, ...]
) -> None:
    def painted(params: Any) -> Any:
        return None if params is None or 0 in params[2:4] else params[:4]

    assert operation.outcomes(shape) == drawn(operation, shape, 40_000, painted)


def test_noise_multiplies_the_outcomes_of_erase_by_levels() -> None:
    plain = image.erase(1.0, scale=(0.1, 0.2))
    noisy = image.erase(1.0, scale=(0.1, 0.2), value="random")
    assert noisy.outcomes((40, 40, 3)) == LEVELS * plain.outcomes((40, 40, 3))


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)).map(sorted),
    st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)).map(sorted),
)
@settings(deadline=None, max_examples=60)
def test_every_size_that_can_be_drawn_is_counted(
    rows: int, columns: int, scale: list[float], ratio: list[float]
) -> None:
    parts = np.linspace(0.0, 1.0, 60, endpoint=False)
    area = rows * columns * (scale[0] + (scale[1] - scale[0]) * parts[:, np.newaxis])
    turn = ratio[0] * (ratio[1] / ratio[0]) ** parts
    heights, widths = np.sqrt(area / turn), np.sqrt(area * turn)
    # Sides halfway between two whole numbers may round either way, so they are left out.
    sure = (abs(heights % 1 - 0.5) > 1e-6) & (abs(widths % 1 - 0.5) > 1e-6)
    found = {(round(h), round(w)) for h, w in zip(heights[sure], widths[sure], strict=True)}
    inside = {(h, w) for h, w in found if 1 <= h <= rows and 1 <= w <= columns}
    limits = (rows * columns * scale[0], rows * columns * scale[1])
    sizes = Sizes.within((rows, columns), limits, (ratio[0], ratio[1]))
    assert all(sizes.holds(*size) for size in inside)
    assert sizes.outside or inside == found


def test_counting_the_boxes_of_a_large_image_needs_no_loop_over_them() -> None:
    # There are 2.4 billion sizes, and the count grows with the fourth power of the side.
    crop = image.random_resized_crop(224)
    small, large = (crop.outcomes((400 * n, 600 * n, 3)) for n in (1, 100))
    assert large == pytest.approx(small * 1e8, rel=0.05)


def test_a_crop_larger_than_the_image_is_an_error() -> None:
    with pytest.raises(PipelineError, match="too small to crop"):
        image.random_crop(64).outcomes((32, 32, 3))


@pytest.mark.parametrize("magnitude", [0, 1, 9, 30])
@pytest.mark.parametrize("shape", [(1, 1, 3), (4, 9, 3), (200, 300, 3)])
def test_randaugment_counts_steps_with_different_effects(
    magnitude: int, shape: tuple[int, ...]
) -> None:
    augment = image.rand_augment(1, magnitude)
    rng = np.random.default_rng(0)
    steps = {augment.draw(rng, shape)[0].effect for _ in range(2_000)}
    assert augment.outcomes(shape) == len(steps)
    assert image.rand_augment(3, magnitude).outcomes(shape) == len(steps) ** 3


def test_randaugment_has_nine_operations_with_a_sign_and_five_without() -> None:
    assert len(NAMES) == 14
    assert image.rand_augment(1).outcomes(None) == 23
    assert image.rand_augment(2).outcomes(None) == 529
    assert image.rand_augment(0).outcomes(None) == 1
    assert image.rand_augment(1000).outcomes(None) == 1e300


@pytest.mark.parametrize("policy", ["imagenet", "cifar10"])
def test_autoaugment_counts_every_sequence_of_steps_once(policy: str) -> None:
    augment = image.auto_augment(policy)

    def done(steps: Any) -> Any:
        return tuple(step.effect for step in steps if step.effect.name != "Identity")

    assert augment.outcomes((60, 60, 3)) == drawn(augment, (60, 60, 3), 60_000, done)


@pytest.mark.parametrize("bins", [2, 5, 31])
def test_trivialaugment_counts_operations_strengths_and_signs(bins: int) -> None:
    augment = image.trivial_augment(bins=bins)
    found = drawn(augment, (60, 60, 3), 30_000, lambda steps: steps[0].effect)
    assert augment.outcomes((60, 60, 3)) == found


def test_steps_give_the_same_pixels_exactly_if_their_effect_is_equal() -> None:
    # No pixel is black, so that stretching the contrast shows; some are white, which solarizing
    # inverts first; no shift is as long as a side, and some are less than a pixel apart.
    pixels = np.random.default_rng(0).integers(5, 256, (40, 41, 3), dtype=np.uint8)
    augment = image.trivial_augment(bins=45)
    left: dict[Any, set[bytes]] = {}
    for name, strong, way in product(NAMES, range(45), (False, True)):
        step = WIDE.step(name, strong / 44, way, 40, 41)
        left.setdefault(step.effect, set()).add(augment.apply(pixels, (step,)).tobytes())
    assert {len(results) for results in left.values()} == {1}
    assert len(set().union(*left.values())) == len(left) == augment.outcomes(pixels.shape)


def test_a_factor_from_a_range_counts_as_levels_and_orders_count_too() -> None:
    jitter = image.color_jitter
    assert jitter().outcomes((9, 9, 3)) == 1
    assert jitter(0.4).outcomes((9, 9, 3)) == LEVELS
    assert jitter(0.4, 0.4).outcomes((9, 9, 3)) == 2 * LEVELS**2
    assert jitter(0.4, (2, 2)).outcomes((9, 9, 3)) == 2 * LEVELS
    assert jitter(0.4, 0.4, 0.4, 0.1).outcomes(None) == 24 * LEVELS**4
    assert jitter(0.4, 0.4, 0.4, 0.1).outcomes((9, 9, 1)) == 2 * LEVELS**2
    assert audio.random_gain().outcomes(None) == LEVELS


def test_crop_and_flip_have_98_visible_outcomes_as_the_paper_counts() -> None:
    flip = image.random_flip().visible_outcomes((375, 500, 3))
    for crop in (image.random_resized_crop(224), image.random_crop(32, padding=40)):
        assert crop.visible_outcomes((375, 500, 3)) * flip == 98


@pytest.mark.parametrize(("operation", "shape"), RANDOM, ids=repr)
def test_no_more_outcomes_are_visible_than_there_are(
    operation: Operation, shape: tuple[int, ...]
) -> None:
    exact, visible = operation.outcomes(shape), operation.visible_outcomes(shape)
    assert exact is not None
    assert visible is not None
    assert 2 <= visible <= exact


@pytest.mark.parametrize(
    ("operation", "shape", "visible"),
    [
        (image.random_crop(5, padding=(1, 0)), (6, 20, 3), 2 * 7 + 2 * 0),
        (image.random_resized_crop(4, scale=(1, 1), ratio=(1, 1)), (6, 6, 3), 1),
        (image.erase(0.5), (60, 60, 3), 50),
        (image.color_jitter(0.4, 0.4), (60, 60, 3), 49),
        (audio.random_crop(20), (1, 24), 5),
        (audio.random_crop(20), (1, 900), 7),
        (audio.random_gain(), (1, 900), 7),
        (audio.spec_augment(2, 20, 1, 20), (1, 80, 400), 343),
    ],
    ids=repr,
)
def test_visible_outcomes(operation: Operation, shape: tuple[int, ...], visible: int) -> None:
    assert operation.visible_outcomes(shape) == visible
