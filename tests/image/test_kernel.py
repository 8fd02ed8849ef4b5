"""The compiled kernel gives the pixels of the single operations and of PIL."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.errors import PipelineError
from penstock.image import decode, kernel, normalize, random_resized_crop
from penstock.image.normalizing import _table
from tests.support.jpegs import KINDS, Box, by_kernel, by_pil, encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())


@st.composite
def crops(draw: st.DrawFn, most: int = 120) -> tuple[bytes, Box]:
    """A JPEG of any kind and size, and a box in it."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))
    return data, box


@settings(max_examples=120, deadline=None)
@given(crops())
def test_a_region_has_exactly_the_pixels_of_the_whole_image(
    crop: tuple[bytes, Box],
) -> None:
    data, box = crop
    top, left, height, width = box
    whole = decode().apply(data, None)
    np.testing.assert_array_equal(
        by_kernel(data, box, (height, width)), whole[top : top + height, left : left + width]
    )


@settings(max_examples=120, deadline=None)
@given(crops(), st.tuples(st.integers(1, 150), st.integers(1, 150)), st.booleans())
def test_a_resized_region_is_within_rounding_of_pil(
    crop: tuple[bytes, Box], size: tuple[int, int], flip: bool
) -> None:
    data, box = crop
    # For a shrink by 4 or more libjpeg does a part of it, with another filter.
    size = (max(size[0], -(-box[2] // 3)), max(size[1], -(-box[3] // 3)))
    found = by_kernel(data, box, size, flip)
    difference = np.abs((found[:, ::-1] if flip else found) - by_pil(data, box, size))
    # PIL's libjpeg may round differently; both round once between the two passes.
    assert difference.max() <= 3
    assert difference.mean() <= 0.6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [4.0, 5.3, 8.0, 11.0, 16.0, 30.0])
def test_a_large_shrink_is_within_two_levels_of_pil(kind: str, factor: float) -> None:
    data = encode(picture(700, 900, seed=3), kind)
    box = (37, 51, 640, 803)
    size = (int(box[2] / factor), int(box[3] / factor))
    difference = np.abs(by_kernel(data, box, size) - by_pil(data, box, size))
    assert difference.mean() <= 1.0
    assert np.quantile(difference, 0.99) <= 12


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 300, 1), (1, 300)),
        ((0, 0, 1, 400), (224, 1)),
        ((0, 0, 300, 400), (1, 1)),
        ((0, 0, 300, 400), (1, 400)),
        ((0, 0, 300, 400), (300, 1)),
        ((299, 399, 1, 1), (224, 224)),
        ((0, 0, 1, 1), (1, 1)),
        ((3, 5, 290, 2), (7, 500)),
        ((150, 200, 9, 150), (600, 17)),
    ],
)
def test_extreme_boxes_and_sizes_agree_with_pil(box: Box, size: tuple[int, int]) -> None:
    data = encode(picture(300, 400), "420", 95)
    assert np.abs(by_kernel(data, box, size) - by_pil(data, box, size)).mean() <= 1.0


@pytest.mark.parametrize("kind", ["420", "444", "gray", "progressive"])
def test_the_kernel_and_the_single_operations_give_the_same_picture(kind: str) -> None:
    crop = random_resized_crop(112)
    data = encode(picture(375, 500, seed=5), kind)
    whole = decode().apply(data, None)
    for seed in range(30):
        box = crop.draw(np.random.default_rng(seed), whole.shape)
        difference = np.abs(by_kernel(data, box, (112, 112)) - crop.apply(whole, box))
        # The single operations approximate the filter: see resample.
        assert difference.mean() <= 2.0


def test_a_flip_is_exactly_the_mirror_image() -> None:
    data = encode(picture(90, 130))
    for size in ((64, 64), (33, 47), (200, 301), (4, 5)):
        plain = by_kernel(data, (3, 7, 80, 111), size)
        flipped = by_kernel(data, (3, 7, 80, 111), size, flip=True)
        np.testing.assert_array_equal(flipped, plain[:, ::-1])


@settings(max_examples=60, deadline=None)
@given(crops(60), st.tuples(st.integers(1, 70), st.integers(1, 70)), st.booleans())
def test_floats_are_bit_for_bit_what_normalize_makes_of_the_bytes(
    crop: tuple[bytes, Box], size: tuple[int, int], flip: bool
) -> None:
    data, box = crop
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    levels = np.empty((*size, 3), np.uint8)
    floats = np.empty((3, *size), np.float32)
    kernel.region(data, box, levels, flip=flip)
    kernel.region(data, box, floats, flip=flip, table=_table(mean, std, 3))
    np.testing.assert_array_equal(floats, normalize(mean, std).apply(levels, None))
    by_hand = (levels / 255 - mean) / std
    np.testing.assert_allclose(floats, by_hand.transpose(2, 0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", [0, 1, 127, 128, 254, 255])
def test_a_flat_image_stays_flat(level: int) -> None:
    data = encode(np.full((97, 131, 3), level, np.uint8), "444", 100)
    flat = int(decode().apply(data, None)[0, 0, 0])
    for size in ((97, 131), (50, 60), (224, 224), (3, 2), (97, 1)):
        assert (by_kernel(data, (0, 0, 97, 131), size) == flat).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(KINDS))
def test_size_is_what_the_header_says(height: int, width: int, kind: str) -> None:
    data = encode(picture(height, width), kind)
    assert kernel.size(data) == (height, width, 1 if "gray" in kind else 3)


def test_an_exif_orientation_is_not_followed() -> None:
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    file = io.BytesIO()
    PIL.Image.fromarray(picture(40, 60)).save(file, "JPEG", exif=exif)
    data = file.getvalue()
    assert kernel.size(data) == (40, 60, 3)
    np.testing.assert_array_equal(
        by_kernel(data, (0, 0, 40, 60), (40, 60)), decode().apply(data, None)
    )


def test_any_container_of_bytes_is_accepted() -> None:
    data = encode(picture(40, 60))
    expected = by_kernel(data, (1, 2, 30, 50), (20, 20))
    for same in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert kernel.size(same) == (40, 60, 3)
        np.testing.assert_array_equal(by_kernel(same, (1, 2, 30, 50), (20, 20)), expected)


def test_only_out_is_written() -> None:
    data = encode(picture(64, 64))
    for height, width in ((1, 1), (5, 5), (17, 3), (31, 33), (16, 16)):
        room = np.full(height * width * 3 + 128, 99, np.uint8)
        kernel.region(data, (0, 0, 64, 64), room[64:-64].reshape(height, width, 3))
        assert (room[:64] == 99).all()
        assert (room[-64:] == 99).all()
        floats = np.full(height * width * 3 + 32, 99, np.float32)
        kernel.region(
            data,
            (0, 0, 64, 64),
            floats[16:-16].reshape(3, height, width),
            table=_table((0.5,), (0.5,), 3),
        )
        assert (floats[:16] == 99).all()
        assert (floats[-16:] == 99).all()


def test_many_threads_at_once_give_the_same_bits() -> None:
    jobs = [
        (encode(picture(60 + 7 * n, 90 + 5 * n, n), KINDS[n % len(KINDS)]), (n, n, 50, 60 + n))
        for n in range(16)
    ]
    expected = [by_kernel(data, box, (64, 64), bool(n % 2)) for n, (data, box) in enumerate(jobs)]
    wrong: list[int] = []
    done: list[int] = []

    def work(first: int) -> None:
        for turn in range(80):
            n = (first + turn) % len(jobs)
            if not np.array_equal(by_kernel(*jobs[n], (64, 64), bool(n % 2)), expected[n]):
                wrong.append(n)
        done.append(first)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert wrong == []


def test_levels_are_looked_up_channel_by_channel() -> None:
    image = picture(37, 53)
    table = _table((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 3)
    out = np.full((3, 37, 53), 7, np.float32)
    kernel.look_up(image, table, out)
    for channel in range(3):
        np.testing.assert_array_equal(out[channel], table[channel][image[..., channel]])


@pytest.mark.parametrize(
    ("image", "table", "out"),
    [
        (np.zeros((4, 5, 3), np.uint8), np.zeros((3, 256), np.float32), np.zeros((3, 5, 4), "f4")),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((3, 255), np.float32), np.zeros((3, 4, 5), "f4")),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((3, 256), np.float64), np.zeros((3, 4, 5), "f4")),
        (np.zeros((4, 5, 3), np.int8), np.zeros((3, 256), np.float32), np.zeros((3, 4, 5), "f4")),
        (np.zeros((4, 5, 1), np.uint8), np.zeros((3, 256), np.float32), np.zeros((3, 4, 5), "f4")),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((3, 256), np.float32), np.zeros((3, 4, 5), "f8")),
    ],
)
def test_look_up_refuses_arrays_that_do_not_fit(
    image: np.ndarray, table: np.ndarray, out: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="must"):
        kernel.look_up(image, table, out)


@given(
    sides=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    places=st.tuples(*[st.floats(0, 1)] * 4),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    flip=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_a_box_of_an_image_is_resized_as_pil_does(
    sides: tuple[int, int],
    places: tuple[float, ...],
    size: tuple[int, int],
    flip: bool,
    seed: int,
) -> None:
    from PIL import Image as Pillow

    height, width = sides
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    top, left = int(places[0] * (height - 1)), int(places[1] * (width - 1))
    rows = 1 + int(places[2] * (height - top - 1))
    columns = 1 + int(places[3] * (width - left - 1))
    out = np.empty((*size, 3), np.uint8)
    kernel.resize(picture, (top, left, rows, columns), out, flip=flip)
    part = Pillow.fromarray(picture[top : top + rows, left : left + columns])
    wanted = np.asarray(part.resize((size[1], size[0]), Pillow.Resampling.BILINEAR))
    found = out[:, ::-1] if flip else out
    assert np.abs(found.astype(int) - wanted).max() <= 2


def test_a_resize_beyond_the_image_or_of_another_kind_is_refused() -> None:
    picture = np.zeros((8, 9, 3), np.uint8)
    out = np.empty((4, 4, 3), np.uint8)
    for box in [(-1, 0, 4, 4), (0, 0, 9, 4), (0, 6, 4, 4), (0, 0, 0, 4), (2**31 - 1, 0, 1, 1)]:
        with pytest.raises(PipelineError, match=r"resize box .* within the image"):
            kernel.resize(picture, box, out)
    with pytest.raises(PipelineError, match="within the resized box"):
        kernel.resize(picture, (0, 0, 8, 9), out, full=(5, 5), corner=(2, 0))
    others: list[Any] = [
        picture[:, :, 0],
        picture.astype(np.float32),
        picture[:, ::2],
        picture[:, :, :2],
    ]
    for other in others:
        with pytest.raises(PipelineError, match="resize"):
            kernel.resize(other, (0, 0, 1, 1), out)
    for target in (np.empty((4, 4), np.uint8), np.empty((4, 4, 3), np.float32)):
        with pytest.raises(PipelineError, match="out must"):
            kernel.resize(picture, (0, 0, 8, 9), target)
