"""Automatic augmentation against torchvision's: every change, range and policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock import native
from penstock.image import auto_augment, rand_augment, trivial_augment
from penstock.image.augment import NAMES, NARROW, POLICIES, WIDE, AugmentStep, apply_steps
from penstock.keyed import Key, Keyed

EXACT = ["Identity", "TranslateX", "TranslateY", "Brightness"]
EXACT += ["Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"]
MOVED = ["ShearX", "ShearY", "Rotate"]
BLENDED = ["Color", "Contrast", "Sharpness"]


@pytest.fixture(params=["kernel", "lazy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the kernel or a lazy image applies the steps."""
    if request.param == "lazy":
        monkeypatch.setattr(native, "_switched_off", lambda: True)
    elif not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    return str(request.param)


@pytest.fixture
def change(
    implementation: str, torchvision: Any, by_torchvision: Callable[..., Any]
) -> Callable[..., Any]:
    """One change of torchvision's automatic augmentation."""

    def call(
        image: Any, step: AugmentStep, fill: list[float] | None = None, smooth: bool = False
    ) -> Any:
        made = torchvision.transforms.v2.RandAugment(fill=fill)
        return by_torchvision(
            made._apply_image_or_video_transform,
            image,
            transform_id=step.name,
            # torchvision's solarize takes thresholds from 0 to 1.
            magnitude=step.magnitude / 255 if step.name == "Solarize" else step.magnitude,
            interpolation="bilinear" if smooth else "nearest",
            fill=made._fill,
        )

    return call


def take(image: Any, step: AugmentStep, fill: tuple[float, ...], smooth: bool) -> Any:
    return apply_steps(image, (step,), fill, smooth)


def every_step(names: list[str], shape: tuple[int, ...]) -> list[AugmentStep]:
    return [
        space.step(name, strength, negative, shape[0], shape[1])
        for space in (NARROW, WIDE)
        for name in names
        for strength in (0.0, 0.3, 0.65, 1.0)
        for negative in (False, True)
    ]


def test_the_groups_of_this_file_cover_all_changes() -> None:
    assert sorted(EXACT + MOVED + BLENDED) == sorted([*NAMES, "Invert"])


def test_changes_by_table_and_shifts_are_torchvisions(
    image: Any, change: Callable[..., Any]
) -> None:
    for step in every_step(EXACT, image.shape):
        found = take(image, step, (0.0,), False)
        np.testing.assert_array_equal(found, change(image, step), err_msg=str(step))


def test_blends_are_within_one_level_of_torchvisions(
    image: Any, change: Callable[..., Any]
) -> None:
    for step in every_step(BLENDED, image.shape):
        found = take(image, step, (0.0,), False)
        assert np.abs(found.astype(int) - change(image, step)).max() <= 1, step


def test_shears_and_rotations_take_the_pixels_torchvision_takes(
    image: Any, change: Callable[..., Any]
) -> None:
    for step in every_step(MOVED, image.shape):
        found, expected = take(image, step, (0.0,), False), change(image, step)
        assert (found != expected).any(axis=2).mean() <= 0.01, step


def test_smooth_shears_and_rotations_are_within_two_levels_of_torchvisions(
    photo: Any, change: Callable[..., Any]
) -> None:
    for step in every_step(MOVED, photo.shape):
        found, expected = take(photo, step, (0.0,), True), change(photo, step, smooth=True)
        difference = np.abs(found.astype(int) - expected)
        assert (difference > 2).mean() <= 0.001, step


def test_halfway_between_two_pixels_either_is_taken(image: Any, change: Callable[..., Any]) -> None:
    # With a slope of a fifth every fifth row is halfway between pixels; rounding decides there.
    found, expected = (
        take(image, AugmentStep("ShearX", 0.2), (0.0,), False),
        change(image, AugmentStep("ShearX", 0.2)),
    )
    rows = (found != expected).any(axis=(1, 2))
    assert not rows[np.arange(len(rows)) % 5 != 2].any()


@pytest.mark.parametrize("degrees", [90.0, -90.0, 180.0, 45.0, 0.0, 360.0])
@pytest.mark.parametrize("shape", [(30, 30, 3), (30, 44, 1), (31, 31, 1)])
def test_right_angles_are_torchvisions(
    change: Callable[..., Any], degrees: float, shape: tuple[int, ...]
) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    step = AugmentStep("Rotate", degrees)
    found, expected = take(image, step, (0.0,), False), change(image, step)
    assert (found != expected).any(axis=2).mean() <= (0.01 if degrees == 45.0 else 0.0)


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "Rotate", "TranslateX", "TranslateY"])
def test_pixels_from_outside_the_image_get_the_fill(
    photo: Any, change: Callable[..., Any], name: str
) -> None:
    step = NARROW.step(name, 0.8, False, *photo.shape[:2])
    found = take(photo, step, (200.0, 100.0, 50.0), False)
    expected = change(photo, step, fill=[200.0, 100.0, 50.0])
    assert (found != expected).any(axis=2).mean() <= 0.01
    assert (found.reshape(-1, 3) == (200, 100, 50)).all(axis=1).mean() > 0.05


@pytest.mark.parametrize("shape", [(64, 64, 3), (50, 90, 3), (331, 331, 1)])
@pytest.mark.parametrize(
    ("theirs", "space", "bins"),
    [("RandAugment", NARROW, 31), ("AutoAugment", NARROW, 10), ("TrivialAugmentWide", WIDE, 31)],
)
def test_strengths_are_torchvisions(
    torchvision: Any, shape: tuple[int, ...], theirs: str, space: Any, bins: int
) -> None:
    made = getattr(torchvision.transforms, theirs)()
    size = () if theirs == "TrivialAugmentWide" else ((shape[0], shape[1]),)
    for name, (magnitudes, signed) in made._augmentation_space(bins, *size).items():
        for index in range(bins):
            expected = float(magnitudes[index]) if magnitudes.ndim else 0.0
            strength = index / (bins - 1)
            up = space.step(name, strength, False, shape[0], shape[1])
            down = space.step(name, strength, True, shape[0], shape[1])
            assert up.magnitude == pytest.approx(expected, abs=1e-4)
            assert down.magnitude == pytest.approx(-expected if signed else expected, abs=1e-4)


@pytest.mark.parametrize("policy", ["imagenet", "cifar10"])
def test_policies_are_torchvisions(torchvision: Any, policy: str) -> None:
    known = torchvision.transforms.AutoAugmentPolicy(policy)
    made = torchvision.transforms.AutoAugment(known)
    expected = [tuple((n, p, m or 0) for n, p, m in pair) for pair in made.policies]
    assert list(POLICIES[policy]) == expected


def test_rand_augment_chooses_every_change_equally_often() -> None:
    augment = rand_augment(num_ops=2, magnitude=9)
    choices = Keyed(0, "augment")
    drawn = [augment.draw(choices.at(Key(i)), (64, 64, 3)) for i in range(7000)]
    for place in range(2):
        names = [steps[place].name for steps in drawn]
        assert all(400 < names.count(name) < 600 for name in NAMES)
    turns = [step.magnitude for steps in drawn for step in steps if step.name == "Rotate"]
    assert set(turns) == {-9.0, 9.0}
    assert 0.4 < np.mean(np.array(turns) > 0) < 0.6
    assert len({steps[0].name == steps[1].name for steps in drawn}) == 2


def test_rand_augment_applies_its_changes_in_turn(photo: Any, change: Callable[..., Any]) -> None:
    steps = (
        AugmentStep("Rotate", 9.0),
        AugmentStep("Solarize", 178.5),
        AugmentStep("TranslateX", -30.0),
    )
    expected = photo
    for step in steps:
        expected = change(expected, step)
    found = rand_augment(3).apply(photo, steps)
    assert (found != expected).any(axis=2).mean() <= 0.01


def test_rand_augment_of_no_changes_leaves_the_image(photo: Any) -> None:
    augment = rand_augment(num_ops=0)
    params = augment.draw(np.random.default_rng(0), photo.shape)
    assert params == ()
    np.testing.assert_array_equal(augment.apply(photo, params), photo)


def test_trivial_augment_chooses_every_change_and_strength() -> None:
    augment = trivial_augment()
    choices = Keyed(0, "augment")
    drawn = [augment.draw(choices.at(Key(i)), (64, 64, 3)) for i in range(14000)]
    names = [step.name for (step,) in drawn]
    assert all(850 < names.count(name) < 1150 for name in NAMES)
    turns = {round(step.magnitude, 3) for (step,) in drawn if step.name == "Rotate"}
    assert turns == {round(sign * 4.5 * i, 3) + 0.0 for i in range(31) for sign in (-1, 1)}


def test_auto_augment_takes_each_change_with_its_probability() -> None:
    augment = auto_augment("cifar10")
    choices = Keyed(0, "augment")
    drawn = [augment.draw(choices.at(Key(i)), (331, 331, 3)) for i in range(20000)]
    # TranslateY has probability 0.9 in pair 22, 0.7 in pairs 4, 22 and 25, and 0.4 in pair 13.
    expected = (0.9 + 0.7 + 0.7 + 0.7 + 0.4) / 25
    found = sum(step.name == "TranslateY" for steps in drawn for step in steps) / len(drawn)
    assert found == pytest.approx(expected, abs=0.015)
    magnitudes = {
        round(abs(step.magnitude)) for steps in drawn for step in steps if step.name == "TranslateY"
    }
    assert magnitudes == {50, 150}


@pytest.mark.parametrize("make", [rand_augment, auto_augment, trivial_augment])
def test_fill_and_interpolation_reach_the_pixels(photo: Any, make: Any) -> None:
    steps = (AugmentStep("Rotate", 20.0),)
    plain = make().apply(photo, steps)
    np.testing.assert_array_equal(plain[0, 0], [0, 0, 0])
    np.testing.assert_array_equal(make(fill=(1, 2, 3)).apply(photo, steps)[0, 0], [1, 2, 3])
    smooth = make(interpolation="bilinear").apply(photo, steps)
    assert (smooth[100:140, 140:180] != plain[100:140, 140:180]).any()
