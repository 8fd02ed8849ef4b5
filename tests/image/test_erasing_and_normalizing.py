"""Erasing and normalizing against torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.image import erase, normalize, random_resized_crop
from penstock.image.erasing import Patch
from penstock.keyed import Key, Keyed
from penstock.operation import ArraySpec


def test_erasing_paints_the_rectangle_and_nothing_else(photo: Any) -> None:
    found = erase(value=(1, 2, 3)).apply(photo, Patch(10, 20, 30, 40, None))
    expected = photo.copy()
    expected[10:40, 20:60] = (1, 2, 3)
    np.testing.assert_array_equal(found, expected)


def test_random_erasing_paints_noise(photo: Any) -> None:
    operation = erase(p=1.0, value="random")
    patch = operation.draw(np.random.default_rng(0), photo.shape)
    assert patch is not None
    assert patch.noise is not None
    assert patch.noise.shape == (patch.height, patch.width, 3)
    assert 120 < patch.noise.mean() < 135
    found = operation.apply(photo, patch)
    np.testing.assert_array_equal(
        found[patch.top : patch.top + patch.height, patch.left : patch.left + patch.width],
        patch.noise,
    )


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_patch_lies_within_the_image(height: int, width: int, seed: int) -> None:
    patch = erase(p=1.0).draw(np.random.default_rng(seed), (height, width, 3))
    if patch is not None:
        assert 0 <= patch.top <= height - patch.height
        assert 0 <= patch.left <= width - patch.width
        assert patch.height < height
        assert patch.width < width


def test_patches_have_the_frequency_area_and_ratio_asked_for() -> None:
    operation = erase(p=0.25, scale=(0.1, 0.2), ratio=(0.5, 2.0))
    choices = Keyed(0, "erase")
    drawn = [operation.draw(choices.at(Key(i)), (1000, 1000, 3)) for i in range(6000)]
    patches = [patch for patch in drawn if patch is not None]
    assert len(patches) / len(drawn) == pytest.approx(0.25, abs=0.02)
    areas = np.array([patch.height * patch.width for patch in patches]) / 1e6
    assert areas.min() > 0.099
    assert areas.max() < 0.201
    assert areas.mean() == pytest.approx(0.15, abs=0.005)
    ratios = np.log([patch.height / patch.width for patch in patches])
    assert ratios.mean() == pytest.approx(0.0, abs=0.05)
    assert np.exp(ratios.max()) == pytest.approx(2.0, abs=0.03)


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_normalizing_is_torchvisions(
    image: Any, by_torchvision: Callable[..., Any], layout: str
) -> None:
    channels = image.shape[2]
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]

    def scaled(tensor: Any) -> Any:
        import torch
        from torchvision.transforms.v2 import functional

        return functional.normalize(tensor.to(torch.float32) / 255, list(mean), list(std))

    found = normalize(mean, std, layout).apply(image, None)
    expected = by_torchvision(scaled, image)
    assert found.dtype == np.float32
    if layout == "chw":
        assert found.flags.c_contiguous
        expected = expected.transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_one_mean_serves_all_channels(photo: Any) -> None:
    np.testing.assert_array_equal(
        normalize(0.5, 0.25).apply(photo, None),
        normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)).apply(photo, None),
    )


@given(
    mean=st.lists(st.floats(-1, 2), min_size=3, max_size=3),
    std=st.lists(st.floats(0.01, 4), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_arithmetic_and_tables_give_the_same_bits(
    mean: list[float], std: list[float], seed: int
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    operation = normalize(mean, std)
    table = operation.table(3)
    by_kernel = operation.apply(image, None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_NO_KERNEL", "1")
        by_arithmetic = operation.apply(image, None)
        looked_up = operation.look_up(image, table.copy(), None)
    expected = np.stack([table[channel][image[..., channel]] for channel in range(3)])
    for found in (by_kernel, by_arithmetic, looked_up):
        np.testing.assert_array_equal(found, expected)


def test_normalizing_states_its_layout() -> None:
    spec = ArraySpec.of((8, 9, 3), np.uint8)
    assert normalize().output(spec) == ArraySpec.of((3, 8, 9), np.float32)
    assert normalize(layout="hwc").output(spec) == ArraySpec.of((8, 9, 3), np.float32)
    unknown = ArraySpec.of((8, 9, None), np.uint8)
    assert normalize().output(unknown) == ArraySpec.of((3, 8, 9), np.float32)
    assert normalize(0.5, 0.5).output(unknown) == ArraySpec.of((None, 8, 9), np.float32)
    assert normalize().output(None) is None


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_normalizing_twice_is_refused_when_built(layout: str) -> None:
    once = normalize(layout=layout).output(ArraySpec.of((8, 9, 3), np.uint8))
    with pytest.raises(PipelineError, match=r"normalize.*Put it above normalize\(\)"):
        normalize().output(once)


def test_a_crop_below_a_channels_first_normalize_is_refused_when_built() -> None:
    once = normalize().output(ArraySpec.of((8, 9, 3), np.uint8))
    with pytest.raises(PipelineError, match='layout="hwc"'):
        random_resized_crop(4).output(once)
    flat = normalize(layout="hwc").output(ArraySpec.of((8, 9, 3), np.uint8))
    assert random_resized_crop(4).output(flat) == ArraySpec.of((4, 4, 3), np.float32)


def test_means_of_another_number_of_channels_are_refused() -> None:
    with pytest.raises(PipelineError, match="1 channel, but mean and std for 3"):
        normalize().output(ArraySpec.of((8, 9, 1), np.uint8))
    with pytest.raises(PipelineError, match="1 channel, but mean and std for 3"):
        normalize().apply(np.zeros((8, 9, 1), np.uint8), None)
