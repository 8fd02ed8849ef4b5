"""Packed coefficients of JPEGs: what is read, what is refused, and how errors are reported."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from penstock import native
from penstock.errors import PipelineError, SourceError
from penstock.image import jpeg_index, kernel
from penstock.image.coefficients import Coefficients, read_coefficients
from tests.support.jpegs import Box, encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the kernel")

WHOLE = (0, 0, 48, 64)


@pytest.fixture(scope="module")
def file() -> bytes:
    return encode(picture(48, 64))


def lengths(read: Coefficients) -> Any:
    records = read.packed[read.parts[2]].view(np.uint32)
    return records >> 24


def test_only_the_blocks_of_the_box_are_packed(file: bytes) -> None:
    read = read_coefficients([file, file], [WHOLE, (20, 20, 8, 8)])
    whole, part = read.pictures
    assert (whole["across"], whole["down"], whole["blocks"]) == (4, 3, 4 * 3 * 6)
    # Smoothing of chroma reads two pixels around the box, which lies in one unit of 16 x 16.
    assert (part["unit_top"], part["unit_left"], part["blocks"]) == (1, 1, 6)
    assert (part["block"], part["pixel"]) == (whole["blocks"], 48 * 64 * 3)
    assert read.numbers == [0, 1]
    assert read.errors == [None, None]


def test_the_parts_of_the_buffer_fit_together(file: bytes) -> None:
    read = read_coefficients([file, file], [WHOLE, (3, 5, 20, 31)])
    data = read.parts[3]
    assert lengths(read).sum() + 8 == data.stop - data.start
    assert read.blocks == sum(read.pictures["blocks"])
    assert read.pixel_bytes == (48 * 64 + 20 * 31) * 3
    with PIL.Image.open(io.BytesIO(file)) as image:
        tables = image.quantization
    steps = read.packed[read.parts[1]].view(np.int16).reshape(2, 3, 64)
    for one in steps:
        assert [sorted(component) for component in one.tolist()] == [
            sorted(tables[number]) for number in (0, 1, 1)
        ]


def test_packed_coefficients_are_smaller_than_pixels(file: bytes) -> None:
    flat = encode(np.full((64, 64, 3), 77, np.uint8))
    read = read_coefficients([flat], [(0, 0, 64, 64)])
    assert lengths(read).sum() == 0
    photo = read_coefficients([encode(picture(200, 300))], [(0, 0, 200, 300)])
    assert len(photo.packed) < photo.pixel_bytes / 3


def test_large_values_take_two_bytes() -> None:
    noise = np.random.default_rng(0).integers(0, 2, (16, 16, 3), dtype=np.uint8) * 255
    read = read_coefficients([encode(noise, "444", 100)], [(0, 0, 16, 16)])
    assert lengths(read).max() > 8 + 63


def test_files_of_other_kinds_are_left_to_the_cpu(file: bytes) -> None:
    pixels = picture(48, 64)
    png = io.BytesIO()
    PIL.Image.fromarray(pixels).save(png, "PNG")
    others = [encode(pixels, kind) for kind in ("progressive", "411", "cmyk")]
    others += [png.getvalue(), b"", encode(pixels[:, :4])]
    boxes: list[Box] = [WHOLE] * (len(others) + 1)
    boxes[-2] = (0, 0, 48, 4)
    read = read_coefficients([*others, file], boxes)
    assert [type(error) for error in read.errors] == [kernel.Unsupported] * len(others) + [
        type(None)
    ]
    assert read.numbers == [len(others)]


def test_a_damaged_file_has_the_error_of_decoding(file: bytes) -> None:
    cut = file[: len(file) // 2]
    read = read_coefficients([cut, file], [WHOLE, WHOLE])
    with pytest.raises(SourceError) as decoded:
        kernel.region(cut, WHOLE, np.empty((48, 64, 3), np.uint8))
    assert isinstance(read.errors[0], SourceError)
    assert str(read.errors[0]) == str(decoded.value)
    assert read.numbers == [1]


def test_damage_within_the_data_is_left_to_the_cpu(file: bytes) -> None:
    start = file.index(b"\xff\xda") + 20
    broken = file[:start] + b"\xfe" * 40 + file[start + 40 :]
    read = read_coefficients([broken], [WHOLE])
    assert isinstance(read.errors[0], kernel.Unsupported)
    assert "intact baseline JPEG" in str(read.errors[0])
    assert len(read.pictures) == 0


@pytest.mark.parametrize("box", [(0, 0, 49, 64), (-1, 0, 4, 4), (0, 60, 4, 5), (0, 0, 0, 4)])
def test_a_box_outside_the_picture_is_an_error(file: bytes, box: Box) -> None:
    error = read_coefficients([file], [box], [(4, 4)]).errors[0]
    assert isinstance(error, PipelineError)
    assert str(box) in str(error)


def test_a_malformed_box_is_an_error_of_the_call(file: bytes) -> None:
    with pytest.raises(PipelineError, match="Give boxes"):
        read_coefficients([file], [(0, 0, 1 << 40, 2)])


def test_paths_are_read(tmp_path: Path, file: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(file)
    files: Sequence[Any] = [str(tmp_path / "b.jpg"), tmp_path / "a.jpg", file]
    read = read_coefficients(files, [WHOLE] * 3)
    assert isinstance(read.errors[0], FileNotFoundError)
    assert read.numbers == [1, 2]
    half = read.pictures["blocks"][0]
    records = read.packed[read.parts[2]].view(np.uint32)
    assert (records[:half] == records[half:]).all()


def test_a_shrink_that_libjpeg_begins_is_left_to_the_cpu() -> None:
    file = encode(picture(256, 256))
    box = (0, 0, 256, 256)
    read = read_coefficients([file] * 2, [box] * 2, [(65, 65), (64, 64)])
    assert read.numbers == [0]
    assert "libjpeg" in str(read.errors[1])


def test_a_part_of_the_resized_box_needs_only_its_pixels() -> None:
    file = encode(picture(256, 256))
    read = read_coefficients([file], [(0, 0, 256, 256)], [(128, 128)], [(64, 0, 32, 16)])
    (one,) = read.pictures
    # Twice the size, and the triangle filter reaches one pixel further on every side.
    assert [int(one[name]) for name in ("top", "left", "height", "width")] == [127, 0, 66, 33]


def test_no_files_are_fine() -> None:
    read = read_coefficients([], [])
    assert (len(read.pictures), read.blocks, read.pixel_bytes, read.errors) == (0, 0, 0, [])


def test_the_jpeg_index_is_filled_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode(picture(300, 400), quality=95)
    assert len(file) > jpeg_index.FEWEST_BYTES
    fresh = jpeg_index.JpegIndex(1 << 20)
    monkeypatch.setattr(jpeg_index, "process_index", lambda: fresh)
    box = (180, 50, 60, 90)
    first = read_coefficients([file], [box])
    entries = fresh.entries(kernel.key(file))
    assert entries
    again = read_coefficients([file], [box])
    assert (first.packed == again.packed).all()
    # Entries of other data lead elsewhere: they are used.
    wrong = jpeg_index.JpegIndex(1 << 20)
    wrong.add(kernel.key(file), entries[:10] * (len(entries) // 10))
    monkeypatch.setattr(jpeg_index, "process_index", lambda: wrong)
    other = read_coefficients([file], [box])
    assert (
        other.errors[0] is not None
        or (other.packed[:64] != first.packed[:64]).any()
        or (len(other.packed) != len(first.packed))
    )


def test_without_a_kernel_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NO_KERNEL", "1")
    with pytest.raises(kernel.Unsupported, match="PENSTOCK_NO_KERNEL"):
        read_coefficients([b""], [WHOLE])
