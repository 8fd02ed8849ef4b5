"""Without the kernel: only the rows that a crop needs are decoded; libjpeg begins large shrinks."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.image import decode, normalize, partial
from penstock.image.kernel import Unsupported
from penstock.image.resample import resize
from tests.support.jpegs import KINDS, Box, by_pil, encode, picture


def whole(data: bytes, box: Box, size: tuple[int, int]) -> np.ndarray:
    top, left, height, width = box
    return resize(decode().apply(data, None)[top : top + height, left : left + width], *size)


@st.composite
def crops(draw: st.DrawFn) -> tuple[bytes, Box]:
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    return data, (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))


@settings(max_examples=100, deadline=None)
@given(crops(), st.tuples(st.integers(1, 70), st.integers(1, 70)), st.booleans(), st.booleans())
def test_the_pixels_are_those_of_the_whole_picture(
    crop: tuple[bytes, Box], wanted: tuple[int, int], flip: bool, floats: bool
) -> None:
    data, box = crop
    assume(min(box[2] / wanted[0], box[3] / wanted[1]) < 4)
    expected = whole(data, box, wanted)
    if flip:
        expected = np.ascontiguousarray(expected[:, ::-1])
    table = None
    out = np.full((*wanted, 3), 7, np.uint8)
    if floats:
        table = normalize().table(3)
        expected = normalize().apply(expected, None)
        out = np.full((3, *wanted), 7, np.float32)
    partial.region(partial.read_file(data), box, out, flip=flip, table=table)
    np.testing.assert_array_equal(out, expected)


@given(st.tuples(st.integers(20, 60), st.integers(20, 60)), st.data())
@settings(max_examples=50, deadline=None)
def test_a_part_of_the_resized_box_is_cut_out(full: tuple[int, int], data: st.DataObject) -> None:
    top, left = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))
    file, box = encode(picture(100, 80)), (5, 6, 70, 60)
    out = np.empty((8, 9, 3), np.uint8)
    partial.region(partial.read_file(file), box, out, full=full, corner=(top, left))
    np.testing.assert_array_equal(out, whole(file, box, full)[top : top + 8, left : left + 9])


def part_of(data: bytes, box: Box, size: tuple[int, int], **options: Any) -> np.ndarray:
    out = np.full((*size, 3), 7, np.uint8)
    partial.region(partial.read_file(data), box, out, **options)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 420, 510), (105, 127)),
        ((13, 27, 367, 403), (61, 73)),  # by 5.5, from odd corners
        ((6, 9, 413, 491), (50, 41)),  # by 8 and 12
        ((1, 2, 401, 333), (12, 20)),
        ((0, 101, 340, 330), (61, 20)),  # by 5.6 one way, by 16 the other
    ],
)
def test_a_large_shrink_stays_close_to_pil(kind: str, box: Box, size: tuple[int, int]) -> None:
    data = encode(picture(420, 510), kind)
    expected = by_pil(data, box, size)
    apart = np.abs(part_of(data, box, size) - expected).mean()
    assert apart <= 2.0
    assert apart <= np.abs(whole(data, box, size) - expected).mean() + 0.4


@pytest.mark.parametrize("corner", range(8))
@pytest.mark.parametrize(("by", "within"), [(4, 0.6), (8, 0.8), (17, 1.0)])
def test_a_large_shrink_does_not_move_the_picture(corner: int, by: int, within: float) -> None:
    down, right = np.mgrid[0:300, 0:300] * 255 / 299
    data = encode(np.dstack([down, right, down]).round().astype(np.uint8), "444", 100)
    size = 280 // by
    found = part_of(data, (corner, 7 - corner, size * by + 3, size * by), (size, size))
    centres = np.arange(size) + 0.5
    for axis, first, step in ((0, corner, by + 3 / size), (1, 7 - corner, by)):
        expected = (first + centres * step - 0.5) * 255 / 299
        means = found[..., axis].mean(axis=1 - axis)
        # Half a pixel of libjpeg's output would be 0.9, 1.7 and 3.4 here.
        assert np.abs(means - expected)[1:-1].max() < within


@pytest.mark.parametrize("kind", ["444", "420", "gray"])
@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_skipped_rows_change_no_bit_of_the_others(kind: str, by: int) -> None:
    file = partial.read_file(encode(picture(203, 151), kind))
    expected = partial._rows(file, 203, by)[0].copy()
    for upto in range(1, 203, 7):
        rows, divided = partial._rows(file, upto, by)
        assert divided == by
        wanted = -(-upto // by)
        np.testing.assert_array_equal(rows[:wanted], expected[:wanted])


def test_a_part_of_a_large_shrink_is_flipped_and_normalized() -> None:
    data, box = encode(picture(420, 510)), (13, 27, 367, 403)
    full = part_of(data, box, (61, 73))
    found = part_of(data, box, (20, 30), full=(61, 73), corner=(5, 7), flip=True)
    expected = np.ascontiguousarray(full[5:25, 7:37][:, ::-1])
    np.testing.assert_array_equal(found, expected)
    out = np.empty((3, 61, 73), np.float32)
    partial.region(partial.read_file(data), box, out, table=normalize().table(3))
    np.testing.assert_array_equal(out, normalize().apply(full, None))


def test_a_large_shrink_of_an_unusual_file_is_left_to_decode() -> None:
    good = encode(picture(420, 510))
    odd, box = good[:-2] + bytes(5) + good[-2:], (13, 27, 407, 403)
    np.testing.assert_array_equal(part_of(odd, box, (61, 73)), whole(good, box, (61, 73)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_read_from_the_header(kind: str) -> None:
    components = 1 if "gray" in kind else 3
    assert partial.read_file(encode(picture(33, 47), kind)).size == (33, 47, components)


@pytest.mark.parametrize("data", [b"\x89PNG1234", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00"])
def test_files_that_are_not_jpegs_are_unsupported(data: bytes) -> None:
    with pytest.raises(Unsupported):
        partial.read_file(data)


def test_four_colours_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="three colours"):
        partial.read_file(encode(picture(20, 20), "cmyk"))


def test_restarts_do_not_hide_the_end() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(picture(120, 90)).save(file, "JPEG", restart_marker_blocks=3)
    out = np.empty((20, 90, 3), np.uint8)
    partial.region(partial.read_file(file.getvalue()), (10, 0, 20, 90), out)
    np.testing.assert_array_equal(out, whole(file.getvalue(), (10, 0, 20, 90), (20, 90)))


@pytest.mark.parametrize("box", [(0, 0, 40, 90), (80, 0, 40, 90)])
@pytest.mark.parametrize("size", [(40, 90), (9, 20)])
def test_a_file_that_is_cut_short_is_an_error_wherever_the_crop_is(
    box: Box, size: tuple[int, int]
) -> None:
    data = encode(picture(120, 90), quality=95)
    with pytest.raises(SourceError, match=r"[Pp]remature end"):
        part_of(data[: len(data) * 3 // 4], box, size)


def test_damage_above_the_end_of_the_crop_is_an_error() -> None:
    data = encode(picture(200, 160), quality=95)
    found = 0
    for at in range(len(data) // 4, len(data) // 2, 5):
        damaged = bytearray(data)
        damaged[at : at + 12] = b"\xff\x00" * 6
        try:
            decode().apply(bytes(damaged), None)
        except SourceError as error:
            if "bad Huffman code" not in str(error):
                continue
            found += 1
            with pytest.raises(SourceError):
                # All but the last three rows, so that some are skipped.
                part_of(bytes(damaged), (0, 0, 197, 160), (197, 160))
    assert found > 1


def test_threads_do_not_see_each_others_pictures() -> None:
    files = [encode(picture(60 + 7 * i, 80, seed=i)) for i in range(8)]
    boxes = [(3, 4, 40 + i, 50) for i in range(8)]

    def one(i: int) -> np.ndarray:
        out = np.empty((boxes[i][2], 50, 3), np.uint8)
        partial.region(partial.read_file(files[i]), boxes[i], out)
        return out

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, [i % 8 for i in range(400)]))
    for i, found in enumerate(results):
        box = boxes[i % 8]
        np.testing.assert_array_equal(found, whole(files[i % 8], box, (box[2], 50)))
