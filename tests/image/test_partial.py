"""Without the kernel: only the rows that a crop needs, with the bits of the whole picture."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image.jpegs import KINDS, Box, encode, picture

from penstock.errors import SourceError
from penstock.image import decode, normalize, partial
from penstock.image.kernel import Unsupported
from penstock.image.resample import resize


def whole(data: bytes, box: Box, size: tuple[int, int]) -> np.ndarray:
    top, left, height, width = box
    return resize(decode().apply(data, None)[top : top + height, left : left + width], *size)


@st.composite
def crops(draw: st.DrawFn) -> tuple[bytes, Box]:
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    return data, (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))


@settings(max_examples=200, deadline=None)
@given(crops(), st.tuples(st.integers(1, 70), st.integers(1, 70)), st.booleans(), st.booleans())
def test_the_pixels_are_those_of_the_whole_picture(
    crop: tuple[bytes, Box], wanted: tuple[int, int], flip: bool, floats: bool
) -> None:
    data, box = crop
    expected = whole(data, box, wanted)
    if flip:
        expected = np.ascontiguousarray(expected[:, ::-1])
    table = None
    out = np.full((*wanted, 3), 7, np.uint8)
    if floats:
        table = normalize().table(3)
        expected = normalize().apply(expected, None)
        out = np.full((3, *wanted), 7, np.float32)
    partial.region(data, box, out, flip=flip, table=table)
    np.testing.assert_array_equal(out, expected)


@given(st.tuples(st.integers(20, 60), st.integers(20, 60)), st.data())
@settings(max_examples=50, deadline=None)
def test_a_part_of_the_resized_box_is_cut_out(full: tuple[int, int], data: st.DataObject) -> None:
    top, left = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))
    file, box = encode(picture(100, 80)), (5, 6, 70, 60)
    out = np.empty((8, 9, 3), np.uint8)
    partial.region(file, box, out, full=full, corner=(top, left))
    np.testing.assert_array_equal(out, whole(file, box, full)[top : top + 8, left : left + 9])


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_read_from_the_header(kind: str) -> None:
    components = 1 if "gray" in kind else 3
    assert partial.size(encode(picture(33, 47), kind)) == (33, 47, components)


@pytest.mark.parametrize("data", [b"\x89PNG1234", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00"])
def test_what_is_no_jpeg_is_left_to_others(data: bytes) -> None:
    with pytest.raises(Unsupported):
        partial.size(data)


def test_four_colours_are_left_to_others() -> None:
    with pytest.raises(Unsupported, match="three colours"):
        partial.size(encode(picture(20, 20), "cmyk"))


def test_restarts_do_not_hide_the_end() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(picture(120, 90)).save(file, "JPEG", restart_marker_blocks=3)
    out = np.empty((20, 90, 3), np.uint8)
    partial.region(file.getvalue(), (10, 0, 20, 90), out)
    np.testing.assert_array_equal(out, whole(file.getvalue(), (10, 0, 20, 90), (20, 90)))


@pytest.mark.parametrize("box", [(0, 0, 40, 90), (80, 0, 40, 90)])
def test_a_file_that_is_cut_short_is_an_error_wherever_the_crop_is(box: Box) -> None:
    data = encode(picture(120, 90), quality=95)
    with pytest.raises(SourceError, match=r"[Pp]remature end"):
        partial.region(data[: len(data) * 3 // 4], box, np.empty((40, 90, 3), np.uint8))


def test_damage_above_the_end_of_the_crop_is_an_error() -> None:
    data = encode(picture(200, 160), quality=95)
    found = 0
    for at in range(len(data) // 4, len(data) // 2, 5):
        hurt = bytearray(data)
        hurt[at : at + 12] = b"\xff\x00" * 6
        try:
            decode().apply(bytes(hurt), None)
        except SourceError as error:
            if "bad Huffman code" not in str(error):
                continue
            found += 1
            with pytest.raises(SourceError):
                # Down to the last row but three, so that something is left out.
                partial.region(bytes(hurt), (0, 0, 197, 160), np.empty((197, 160, 3), np.uint8))
    assert found > 1


def test_threads_do_not_see_each_others_pictures() -> None:
    files = [encode(picture(60 + 7 * i, 80, seed=i)) for i in range(8)]
    boxes = [(3, 4, 40 + i, 50) for i in range(8)]

    def one(i: int) -> np.ndarray:
        out = np.empty((boxes[i][2], 50, 3), np.uint8)
        partial.region(files[i], boxes[i], out)
        return out

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, [i % 8 for i in range(400)]))
    for i, found in enumerate(results):
        box = boxes[i % 8]
        np.testing.assert_array_equal(found, whole(files[i % 8], box, (box[2], 50)))
