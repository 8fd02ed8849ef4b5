"""The contract of every image operation: stated output, unmodified input, same result per key."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.image as ps_image
from penstock.errors import PipelineError
from penstock.image import (
    auto_augment,
    center_crop,
    color_jitter,
    deep_auto_augment,
    erase,
    normalize,
    rand_augment,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
    trivial_augment,
)
from penstock.keyed import Key, Keyed
from penstock.operation import ArraySpec, BytesSpec, Operation

OPERATIONS: list[Operation] = [
    resize(13),
    resize((9, 17)),
    center_crop(12),
    center_crop((40, 5)),
    random_resized_crop(16),
    random_resized_crop((7, 21), scale=(0.5, 1.0)),
    random_crop(20, padding=3, pad_if_needed=True),
    random_crop((50, 8), padding_mode="reflect", pad_if_needed=True),
    random_crop(20, padding=(1, 2, 3, 4), padding_mode="edge", pad_if_needed=True),
    random_flip(),
    random_flip(p=1.0, vertical=True),
    color_jitter(0.4, 0.4, 0.4, 0.1),
    rand_augment(),
    rand_augment(num_ops=4, magnitude=30, fill=(1, 2, 3), interpolation="bilinear"),
    auto_augment(),
    auto_augment("cifar10", fill=128),
    trivial_augment(),
    deep_auto_augment(),
    deep_auto_augment("cifar10", fill=7),
    erase(p=0.9),
    erase(p=0.9, value="random"),
    normalize(0.4, 0.2),
    normalize(0.4, 0.2, layout="hwc"),
]

bad: Any = ps_image
"""The same operations, untyped, for arguments that a type checker would reject."""

operations = st.sampled_from(OPERATIONS)
sides = st.one_of(st.just(1), st.just(2), st.integers(1, 48))


def run(operation: Operation, image: Any, key: Key) -> Any:
    params = None
    if operation.random:
        params = operation.draw(Keyed(5, operation.name).at(key), image.shape)
    return operation.apply(image, params)


def pixels(height: int, width: int, channels: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


@given(operations, sides, sides, st.sampled_from([1, 3]), st.integers(0, 1000))
@settings(max_examples=250, deadline=None)
def test_the_output_matches_its_spec_and_the_input_is_not_modified(
    operation: Operation, height: int, width: int, channels: int, index: int
) -> None:
    image = pixels(height, width, channels, index)
    before = image.copy()
    image.flags.writeable = False
    found = run(operation, image, Key(index))
    assert ArraySpec.of(found.shape, found.dtype) == operation.output(
        ArraySpec.of(image.shape, image.dtype)
    )
    np.testing.assert_array_equal(image, before)


@given(operations, sides, sides, st.sampled_from([1, 3]))
@settings(max_examples=100, deadline=None)
def test_an_output_of_unknown_size_agrees_with_the_real_one(
    operation: Operation, height: int, width: int, channels: int
) -> None:
    stated = operation.output(ArraySpec.of((None, None, channels), np.uint8))
    found = run(operation, pixels(height, width, channels), Key(0))
    assert isinstance(stated, ArraySpec)
    assert stated.dtype == found.dtype
    assert len(stated.shape) == found.ndim
    assert all(
        size is None or size == real for size, real in zip(stated.shape, found.shape, strict=True)
    )


@given(operations, st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_the_same_key_gives_the_same_pixels(
    operation: Operation, index: int, epoch: int, replica: int
) -> None:
    key = Key(index, epoch, replica)
    image = pixels(24, 31, 3)
    first = run(operation, image, key)
    run(operation, image, Key(index + 1, epoch, replica))
    np.testing.assert_array_equal(first, run(operation, image.copy(), key))


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op.random], ids=repr)
def test_different_keys_give_different_parameters(operation: Operation) -> None:
    choices = Keyed(5, operation.name)
    drawn = [repr(operation.draw(choices.at(Key(i)), (60, 60, 3))) for i in range(200)]
    assert len(set(drawn)) >= (1 if operation == random_flip(p=1.0, vertical=True) else 2)


@given(operations, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_views_of_any_layout_work_like_copies(operation: Operation, index: int) -> None:
    whole = pixels(40, 62, 3, index)
    views = {
        "cropped": whole[3:31, 5:40],
        "strided": whole[::2, ::3],
        "mirrored": whole[:, ::-1],
        "transposed": whole.transpose(1, 0, 2),
        "channels reversed": whole[..., ::-1],
        "one channel": whole[..., 1:2],
    }
    for name, view in views.items():
        found = run(operation, view, Key(index))
        expected = run(operation, np.ascontiguousarray(view), Key(index))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_operations_travel_by_pickle_and_compare_by_value(operation: Operation) -> None:
    copy = pickle.loads(pickle.dumps(operation))
    assert copy == operation
    assert hash(copy) == hash(operation)
    image = pixels(30, 30, 3)
    np.testing.assert_array_equal(run(copy, image, Key(3)), run(operation, image, Key(3)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_parameters_travel_by_pickle(operation: Operation) -> None:
    image = pixels(30, 30, 3)
    params = operation.draw(Keyed(1, "x").at(Key(4)), image.shape) if operation.random else None
    again = pickle.loads(pickle.dumps(params))
    np.testing.assert_array_equal(operation.apply(image, params), operation.apply(image, again))


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_operations_are_frozen(operation: Any) -> None:
    field = dataclasses.fields(operation)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(operation, field, 0)


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_wrong_inputs_are_refused_when_built_and_when_applied(operation: Operation) -> None:
    name = operation.name
    chosen = operation.draw(np.random.default_rng(0), (8, 8, 3)) if operation.random else None
    with pytest.raises(PipelineError, match=rf"{name} got encoded bytes.*decode\(\)"):
        operation.output(BytesSpec())
    with pytest.raises(PipelineError, match=rf"{name} got encoded bytes.*decode\(\)"):
        operation.apply(b"\xff\xd8\xff", chosen)
    with pytest.raises(PipelineError, match=f"{name} got list"):
        operation.apply([[1]], chosen)
    for shape, dtype in (
        ((8, 8), np.uint8),
        ((3, 8, 8), np.uint8),
        ((3, 8, 8), np.float32),
        ((8, 8, 5), np.uint8),
        ((8, 8, 3), np.float64),
        ((8, 8, 3), bool),
        ((0, 8, 3), np.uint8),
    ):
        with pytest.raises(PipelineError, match=f"^{name} got"):
            operation.output(ArraySpec.of(shape, dtype))
        with pytest.raises(PipelineError, match=f"^{name} got"):
            operation.apply(np.zeros(shape, dtype), chosen)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: bad.decode("bgr"), "mode is 'bgr'"),
        (lambda: bad.resize(0), "size is 0"),
        (lambda: bad.resize(2.5), "size is 2.5"),
        (lambda: bad.resize(True), "size is True"),
        (lambda: bad.resize((1, 2, 3)), r"size is \(1, 2, 3\)"),
        (lambda: bad.resize("224"), "size is '224'"),
        (lambda: bad.center_crop((4, -1)), "width is -1"),
        (lambda: bad.random_resized_crop(None), "size is None"),
        (lambda: bad.random_resized_crop(8, scale=(0.5, 0.2)), "smaller number first"),
        (lambda: bad.random_resized_crop(8, scale=(0.0, 1.0)), "numbers above 0"),
        (lambda: bad.random_resized_crop(8, scale=(0.5, 1.5)), "scale is 1.5"),
        (lambda: bad.random_resized_crop(8, scale=0.5), r"give a pair \(from, to\)"),
        (lambda: bad.random_resized_crop(8, ratio=(0, 1)), "numbers above 0"),
        (lambda: bad.random_crop(8, padding=-1), "padding is -1"),
        (lambda: bad.random_crop(8, padding=(1, 2, 3)), r"padding is \(1, 2, 3\)"),
        (lambda: bad.random_crop(8, padding_mode="wrap"), "padding_mode is 'wrap'"),
        (lambda: bad.random_crop(8, fill=300), "fill is 300"),
        (lambda: bad.random_flip(p=1.5), "p is 1.5"),
        (lambda: bad.random_flip(p=float("nan")), "p is nan"),
        (lambda: bad.random_flip(p="half"), "p is 'half'"),
        (lambda: bad.color_jitter(brightness=-1), "brightness is -1"),
        (lambda: bad.color_jitter(contrast=(2, 1)), "smaller number first"),
        (lambda: bad.color_jitter(hue=0.6), "hue is 0.6"),
        (lambda: bad.rand_augment(magnitude=31), "magnitude is 31"),
        (lambda: bad.rand_augment(num_ops=-1), "num_ops is -1"),
        (lambda: bad.rand_augment(interpolation="cubic"), "interpolation is 'cubic'"),
        (lambda: bad.auto_augment("svhn2"), "policy is 'svhn2'"),
        (lambda: bad.deep_auto_augment("svhn"), 'policy is .svhn.; give one of "imagenet"'),
        (lambda: bad.trivial_augment(bins=1), "bins is 1"),
        (lambda: bad.trivial_augment(fill=(1, 2)), r"fill is \(1, 2\)"),
        (lambda: bad.erase(p=-0.1), "p is -0.1"),
        (lambda: bad.erase(scale=(0.1, 2)), "scale is 2"),
        (lambda: bad.erase(value="noise"), "value is 'noise'"),
        (lambda: bad.normalize(std=0), "std is 0"),
        (lambda: bad.normalize(mean=(1, 2)), r"mean is \(1, 2\)"),
        (lambda: bad.normalize(mean=float("inf")), "mean is inf"),
        (lambda: bad.normalize(layout="nchw"), "layout is 'nchw'"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(make: Any, found: str) -> None:
    with pytest.raises(PipelineError, match=found) as caught:
        make()
    assert "give " in str(caught.value).lower()


def test_operations_have_the_names_users_write() -> None:
    for name in ps_image.__all__:
        made = getattr(ps_image, name)
        assert issubclass(made, Operation)
        assert made.__new__(made).name == name
    assert len(ps_image.__all__) == 13


def test_sizes_given_in_two_ways_are_one_operation() -> None:
    assert random_resized_crop(8) == random_resized_crop((8, 8)) == random_resized_crop([8, 8])
    assert hash(random_crop(8, padding=2)) == hash(random_crop((8, 8), padding=(2, 2, 2, 2)))
    assert resize(8) != resize((8, 8))
