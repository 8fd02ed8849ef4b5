"""The device, in plain torch, gives the bits of the CPU for every operation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import native
from penstock.image.on_device.program import NotOnDevice, device_program
from penstock.image.on_device.ragged import Ragged
from penstock.keyed import Keys
from penstock.operation import Operation
from tests.image.conftest import make_photo
from tests.image.on_device.conftest import check_same_bits, on_cpu, on_device, stops_of

image = ps.image

MIXED = [(60, 80), (33, 47), (120, 37), (90, 150), (16, 16), (7, 5), (3, 2)]
MANY = [(24 + n, 44 - n) for n in range(16)]


@pytest.mark.parametrize(
    ("operations", "sizes"),
    [
        ([image.random_resized_crop(24)], MIXED),
        ([image.random_resized_crop((9, 31)), image.random_flip(), image.normalize()], MIXED),
        ([image.resize(20), image.center_crop(18), image.random_flip(vertical=True)], MIXED),
        ([image.resize((3, 3)), image.normalize(layout="hwc")], MIXED),
        ([image.random_crop(32, padding=4), image.random_flip()], [(32, 32)] * 6),
        ([image.random_crop(30, padding=30, padding_mode="edge")], MIXED),
        ([image.random_crop(20, padding=2, padding_mode="reflect")], MIXED[:4]),
        ([image.random_crop(32, pad_if_needed=True, fill=(9, 8.5, 7))], MIXED),
        ([image.random_flip(), image.center_crop(40), image.random_flip(vertical=True)], MIXED),
        ([image.resize(40), image.rand_augment(), image.random_crop(28)], MIXED),
        ([image.resize((20, 26)), image.erase(p=0.8, value=(1, 2.7, 3))], MANY),
        ([image.erase(p=0.8, value="random"), image.resize((20, 26))], MANY),
        ([image.trivial_augment(fill=(3, 4, 5)), image.random_resized_crop(17)], MANY),
        ([image.random_resized_crop(19), image.rand_augment(3, 25), image.normalize()], MANY),
        ([image.random_resized_crop(19), image.auto_augment(fill=50)], MANY),
        ([image.random_resized_crop(19), image.auto_augment("cifar10")], MANY),
        ([image.random_resized_crop(19), image.color_jitter(0.4, 0.4, 0.9)], MANY),
        ([image.resize((32, 30)), image.deep_auto_augment("cifar10", fill=9)], MANY),
        ([image.resize((26, 32)), image.deep_auto_augment(), image.normalize()], MANY),
        ([image.deep_auto_augment(), image.center_crop(20)], MANY[:6]),
    ],
    ids=lambda given: "-".join(one.name for one in given) if hasattr(given[0], "name") else "",
)
def test_cpu_and_device_agree(operations: list[Operation], sizes: list[tuple[int, int]]) -> None:
    for epoch in range(2):
        assert not check_same_bits(operations, sizes, epoch=epoch).left


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=4),
    to=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    smallest=st.floats(0.01, 1.0),
    flip=st.booleans(),
    changes=st.integers(0, 4),
    strength=st.integers(0, 30),
    normalize=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_size_box_and_change_agrees(
    sizes: list[tuple[int, int]],
    to: tuple[int, int],
    smallest: float,
    flip: bool,
    changes: int,
    strength: int,
    normalize: bool,
    seed: int,
) -> None:
    operations: list[Operation] = [image.random_resized_crop(to, scale=(smallest, 1.0))]
    operations += [image.random_flip(1.0)] * flip
    operations += [image.rand_augment(changes, strength, fill=7)]
    operations += [image.normalize()] * normalize
    assert not check_same_bits(operations, sizes, seed=seed).left


def test_hue_is_within_one_level() -> None:
    stops = stops_of([image.resize((20, 20)), image.color_jitter(hue=0.5)])
    pictures = [make_photo(*size, seed=n) for n, size in enumerate(MANY)]
    keys = Keys(0, list(range(len(MANY))))
    program, _, rows = on_device(stops, pictures, keys, 0, "torch")
    apart = np.abs(rows.astype(int) - np.stack(on_cpu(stops, pictures, keys, 0)).astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.01
    assert not program.exact
    assert "hue" in program.tolerance


@pytest.mark.parametrize(
    ("operations", "by_kernel"),
    [
        ([image.random_resized_crop(24), image.random_flip(), image.normalize()], True),
        ([image.random_resized_crop(24), image.random_flip(0.3), image.rand_augment(3, 25)], True),
        ([image.random_crop(24), image.auto_augment(), image.normalize()], True),
        ([image.resize(24), image.center_crop(20)], False),  # the kernel draws them fused only
        ([image.resize((20, 24)), image.random_flip(vertical=True)], False),
        ([image.resize((20, 24)), image.color_jitter(0.4)], False),
        ([image.random_crop(24, padding=2)], False),
        ([image.deep_auto_augment(), image.random_crop(20)], False),
    ],
)
def test_the_kernel_draws_the_parameters_that_python_draws(
    operations: list[Operation], by_kernel: bool
) -> None:
    program = device_program(stops_of(operations), seed=7)
    assert (program.drawer is not None) == by_kernel
    sizes = [(40, 60), (33, 47), (25, 90), (12, 70), (61, 20), (300, 200)]
    for keys in (Keys(3, list(range(6))), Keys(0, [2**40 + n for n in range(6)], [9] * 6)):
        found = program.draw(keys, sizes)
        expected = replace(program, drawer=None).draw(keys, sizes)
        assert found.buffer.tobytes() == expected.buffer.tobytes()
        assert found.regions.tolist() == expected.regions.tolist()
        assert found.frames.tolist() == expected.frames.tolist()
        assert found.left == expected.left
        # Two pictures are too small to crop without padding.
        assert len(found.left) == (2 if operations[0].name == "random_crop" else 0) or not by_kernel


def test_a_sample_that_the_cpu_prepares_otherwise_is_left_to_it() -> None:
    padded = check_same_bits([image.resize(16), image.center_crop(20)], [(16, 40), (40, 90)])
    assert sorted(padded.left) == [0, 1]
    assert "center_crop pads" in padded.left[0]
    # The rows of the others are written to their places.
    some = check_same_bits(
        [image.random_crop(16), image.random_flip()], [(20, 20), (9, 30), (16, 16)]
    )
    assert some.places.tolist() == [0, 2]
    assert "pad_if_needed" in some.left[1]


def test_rows_of_samples_left_to_the_cpu_stay_as_they_are() -> None:
    stops, keys = stops_of([image.random_crop(16)]), Keys(0, [0, 1])
    pictures = [make_photo(9, 30), make_photo(20, 20)]
    _, _, rows = on_device(stops, pictures, keys, 0, "torch")
    assert (rows[0] == 77).all()
    assert not (rows[1] == 77).all()


def test_regions_are_the_pixels_that_a_crop_needs() -> None:
    program = device_program(stops_of([image.random_resized_crop(8, scale=(0.1, 0.2))]), 0)
    parameters = program.draw(Keys(0, [0, 1]), [(100, 100), (400, 200)])
    areas = parameters.regions[:, 2:].prod(axis=1) / (100 * 100, 400 * 200)
    assert ((areas > 0.09) & (areas < 0.21)).all()
    assert (program.regions(parameters) == parameters.regions).all()
    assert (parameters.frames[:, 4:] == 8).all()


def test_parameters_travel_in_one_buffer() -> None:
    program = device_program(stops_of([image.resize((4, 4)), image.rand_augment()]), 0)
    parameters = program.draw(Keys(0, [0, 1, 2]), [(9, 9)] * 3)
    copied = torch.from_numpy(parameters.buffer.copy())
    for tensors, arrays in zip(parameters.on(copied), parameters.stages, strict=True):
        for name, array in arrays.items():
            np.testing.assert_array_equal(tensors[name].numpy(), array, err_msg=name)


@pytest.mark.parametrize(
    ("operations", "why"),
    [
        ([image.resize(8)], "no fixed size"),
        ([image.decode(mode="gray"), image.resize((8, 8))], "not RGB"),
        ([image.resize((8, 8)), image.rand_augment(interpolation="bilinear")], "interpolation"),
        ([image.resize((8, 8)), image.normalize(layout="hwc"), image.random_flip()], "normalize"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_the_reason(
    operations: list[Operation], why: str
) -> None:
    with pytest.raises(NotOnDevice, match=why):
        device_program(stops_of(operations), 0)


def test_a_function_of_the_user_is_refused_by_its_name() -> None:
    from penstock.stops.map import Map

    def brighten(picture: object) -> object:
        return picture

    with pytest.raises(NotOnDevice, match="brighten"):
        device_program([Map(brighten)], 0)


def test_a_wrong_number_of_pictures_is_an_error() -> None:
    program = device_program(stops_of([image.resize((4, 4))]), 0)
    parameters = program.draw(Keys(0, [0, 1]), [(9, 9)] * 2)
    one = Ragged.of([make_photo(9, 9)])
    with pytest.raises(ValueError, match="1 pictures and parameters for 2"):
        program.run(one, parameters, torch.zeros((2, 4, 4, 3), dtype=torch.uint8))


def test_taps_of_the_kernel_are_bounded() -> None:
    taps = native.kernel().taps
    with pytest.raises(ValueError, match="six 64-bit integers"):
        taps(np.zeros(7, np.int64))
    for wrong in (
        [0, 0, 4, 0, 4, 0],
        [0, 9, 4, 2, 3, 0],
        [-1, 9, 4, 0, 4, 0],
        [0, 1 << 40] + [1] * 4,
    ):
        with pytest.raises(ValueError, match="six 64-bit integers"):
            taps(np.array([wrong], np.int64))
    with pytest.raises(MemoryError):
        taps(np.array([[0, 65535, 1, 0, 1, 0], [0, 65535, 65535, 0, 65535, 0]], np.int64))
