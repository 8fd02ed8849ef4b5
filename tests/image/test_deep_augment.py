"""Deep AutoAugment: its layers follow the published distributions, and do what they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from penstock.image import deep_auto_augment
from penstock.image.augment import AugmentStep, apply_steps
from penstock.image.deep_augment import GREY, DeepStep, _policy
from penstock.image.geometry import Box, RandomResizedCrop
from penstock.keyed import Key, Keyed
from tests.image.conftest import make_photo


@pytest.mark.parametrize(("policy", "depth"), [("cifar10", 6), ("imagenet", 5)])
def test_layers_follow_the_distributions_of_the_policy(policy: str, depth: int) -> None:
    augment, keyed = deep_auto_augment(policy), Keyed(0, "deep")
    choices, upto = _policy(policy)
    assert upto.shape == (depth, 139)
    assert (upto[:, -1] == 1_000_000).all()
    drawn = [augment.draw(keyed.at(Key(n)), (64, 64, 3)) for n in range(1500)]
    for layer in range(depth):
        found = Counter(steps[layer].name for steps in drawn)
        chances = np.diff(upto[layer], prepend=0) / 1e6
        for name in {choice.name for choice in choices}:
            chance = sum(
                part for choice, part in zip(choices, chances, strict=True) if choice.name == name
            )
            if name == "Flip":  # half of the flips do nothing
                chance /= 2
            elif name == "Identity":
                chance += chances[[choice.name for choice in choices].index("Flip")] / 2
            assert abs(found[name] / 1500 - chance) < 0.07, (layer, name)


def test_the_published_layers_have_their_main_change() -> None:
    # Layers 2 to 4 of the policy for CIFAR erase, shift and flip, as the paper reports.
    upto = _policy("cifar10").upto
    names = [choice.name for choice in _policy("cifar10").choices]
    likeliest = [names[int(np.diff(layer, prepend=0).argmax())] for layer in upto]
    assert likeliest[1:4] == ["Cutout", "Shift", "Flip"]
    assert likeliest[5] == "Identity"


def test_each_kind_of_step_does_what_it_says() -> None:
    augment, image = deep_auto_augment("imagenet", fill=3), make_photo(24, 20)
    np.testing.assert_array_equal(augment.apply(image, (DeepStep("Flip"),)), image[:, ::-1])
    hole = augment.apply(image, (DeepStep("Cutout", 0.0, Box(2, 3, 4, 5)),))
    assert (hole[2:6, 3:8] == GREY).all()
    assert (hole[6:] == image[6:]).all()
    moved = augment.apply(image, (DeepStep("Shift", 0.0, Box(-2, 3, 24, 20)),))
    assert (moved[2:, :17] == image[:22, 3:]).all()
    assert (moved[:2] == GREY).all()
    assert (moved[:, 17:] == GREY).all()
    box = Box(4, 2, 12, 9)
    cropped = augment.apply(image, (DeepStep("Crop", 0.0, box),))
    near = RandomResizedCrop((24, 20)).apply(image, box)
    assert np.abs(cropped.astype(int) - near).mean() < 2
    steps = (DeepStep("Rotate", 20.0), DeepStep("Solarize", 100.0))
    wanted = apply_steps(image, tuple(AugmentStep(*step[:2]) for step in steps), (3,), False)
    np.testing.assert_array_equal(augment.apply(image, steps), wanted)
    together = (steps[0], DeepStep("Flip"), steps[1])
    one_by_one = image
    for step in together:
        one_by_one = augment.apply(one_by_one, (step,))
    np.testing.assert_array_equal(augment.apply(image, together), one_by_one)


def test_boxes_stay_within_the_picture() -> None:
    for policy in ("cifar10", "imagenet"):
        augment, keyed = deep_auto_augment(policy), Keyed(1, "deep")
        for number in range(300):
            for step in augment.draw(keyed.at(Key(number)), (40, 28, 3)):
                if step.name in ("Cutout", "Crop") and step.box is not None:
                    assert 0 <= step.box.top <= step.box.top + step.box.height <= 40
                    assert 0 <= step.box.left <= step.box.left + step.box.width <= 28
                elif step.box is not None:
                    assert abs(step.box.top) <= 5
                    assert abs(step.box.left) <= 3
