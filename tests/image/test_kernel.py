"""The compiled kernel against the pure road and PIL, and against files that are broken."""

from __future__ import annotations

import io
import struct
import threading
from typing import Any

import cv2
import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock import config
from penstock.errors import PipelineError, SourceError
from penstock.image import decode, kernel, normalize, random_resized_crop
from penstock.image.normalizing import _table

pytestmark = pytest.mark.skipif(not kernel.available(), reason=kernel.why_not())

KINDS = ("444", "422", "420", "440", "411", "gray", "progressive", "progressive gray")
Pixels = NDArray[np.uint8]


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth areas, edges and texture, of any size from one pixel on."""
    rng = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 120.0, np.float32)
    for step, strength in ((64, 60.0), (16, 25.0), (4, 12.0), (1, 3.0)):
        coarse = rng.normal(0, strength, (height // step + 2, width // step + 2, 3))
        levels += cv2.resize(coarse.astype(np.float32), (width, height)).reshape(levels.shape)
    levels[height // 3 : height // 2, width // 4 : width // 2] = (230, 20, 90)
    return np.clip(levels, 0, 255).astype(np.uint8)


def encode(pixels: Pixels, kind: str = "420", quality: int = 90) -> bytes:
    if kind in ("444", "422", "420", "440", "411"):
        data: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", kind)
        return data
    file = io.BytesIO()
    image = PIL.Image.fromarray(pixels)
    if kind == "cmyk":
        image = image.convert("CMYK")
    elif "gray" in kind:
        image = image.convert("L")
    image.save(file, "JPEG", quality=quality, progressive="progressive" in kind)
    return file.getvalue()


def by_kernel(
    data: Any, box: tuple[int, int, int, int], size: tuple[int, int], flip: bool = False
) -> NDArray[np.int64]:
    out = np.full((*size, 3), 7, np.uint8)
    kernel.region(data, box, out, flip=flip)
    return out.astype(int)


def by_pil(data: bytes, box: tuple[int, int, int, int], size: tuple[int, int]) -> NDArray[np.int64]:
    top, left, height, width = box
    image = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop((left, top, left + width, top + height))
    return np.asarray(image.resize(size[::-1], PIL.Image.Resampling.BILINEAR)).astype(int)


@st.composite
def crops(draw: st.DrawFn, most: int = 120) -> tuple[bytes, tuple[int, int, int, int]]:
    """A JPEG of any kind and size, and a box in it."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))
    return data, box


@settings(max_examples=300, deadline=None)
@given(crops())
def test_a_region_has_exactly_the_pixels_of_the_whole_image(
    crop: tuple[bytes, tuple[int, int, int, int]],
) -> None:
    data, box = crop
    top, left, height, width = box
    whole = decode().apply(data, None)
    np.testing.assert_array_equal(
        by_kernel(data, box, (height, width)), whole[top : top + height, left : left + width]
    )


@settings(max_examples=300, deadline=None)
@given(crops(), st.tuples(st.integers(1, 150), st.integers(1, 150)), st.booleans())
def test_a_resized_region_is_within_rounding_of_pil(
    crop: tuple[bytes, tuple[int, int, int, int]], size: tuple[int, int], flip: bool
) -> None:
    data, box = crop
    # Beyond a shrink by 4 libjpeg does part of it, and the filter is another one.
    size = (max(size[0], -(-box[2] // 3)), max(size[1], -(-box[3] // 3)))
    found = by_kernel(data, box, size, flip)
    difference = np.abs((found[:, ::-1] if flip else found) - by_pil(data, box, size))
    # PIL's own libjpeg may round a pixel the other way; both round once between the passes.
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
def test_extreme_boxes_and_sizes_agree_with_pil(
    box: tuple[int, int, int, int], size: tuple[int, int]
) -> None:
    data = encode(picture(300, 400), "420", 95)
    assert np.abs(by_kernel(data, box, size) - by_pil(data, box, size)).mean() <= 1.0


@pytest.mark.parametrize("kind", ["420", "444", "gray", "progressive"])
def test_the_kernel_and_the_pure_road_see_the_same_picture(kind: str) -> None:
    crop = random_resized_crop(112)
    data = encode(picture(375, 500, seed=5), kind)
    whole = decode().apply(data, None)
    for seed in range(30):
        box = crop.draw(np.random.default_rng(seed), whole.shape)
        difference = np.abs(by_kernel(data, box, (112, 112)) - crop.apply(whole, box))
        # The pure road approximates the filter: see resample.
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
    crop: tuple[bytes, tuple[int, int, int, int]], size: tuple[int, int], flip: bool
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


def test_bytes_come_in_any_container() -> None:
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


@pytest.mark.parametrize("kind", ["420", "progressive", "gray"])
@pytest.mark.parametrize("part", [0.03, 0.3, 0.6, 0.9, 0.999])
def test_a_file_cut_short_is_refused_wherever_the_box_lies(kind: str, part: float) -> None:
    data = encode(picture(200, 300), kind)
    cut = data[: int(len(data) * part)]
    for box in ((0, 0, 8, 8), (190, 280, 8, 8), (0, 0, 200, 300)):
        with pytest.raises((SourceError, kernel.Unsupported)) as caught:
            by_kernel(cut, box, (8, 8))
        if part >= 0.3:
            assert isinstance(caught.value, SourceError)
            assert f"{len(cut):,} bytes that begin" in str(caught.value)
            assert 'on_error="skip"' in str(caught.value)


def test_damage_above_the_box_is_an_error() -> None:
    data = bytearray(encode(picture(200, 300)))
    middle = data.index(b"\xff\xda") + 400
    data[middle : middle + 60] = b"\xff\xd5" * 30
    with pytest.raises(SourceError, match="Corrupt JPEG"):
        by_kernel(bytes(data), (150, 0, 40, 300), (32, 32))


def test_stray_bytes_are_passed_over_as_decode_does() -> None:
    data = encode(picture(40, 60))
    expected = by_kernel(data, (0, 0, 40, 60), (40, 60))
    for stray in (data[:-2] + b"\x00\x01\x02" + data[-2:], data + b"more", data + bytes(9000)):
        np.testing.assert_array_equal(by_kernel(stray, (0, 0, 40, 60), (40, 60)), expected)


def patched(data: bytes, **changes: int) -> bytes:
    """The file with another frame header."""
    out = bytearray(data)
    at = next(n for n in range(len(out)) if out[n] == 0xFF and out[n + 1] in (0xC0, 0xC1, 0xC2))
    if "marker" in changes:
        out[at + 1] = changes["marker"]
    if "precision" in changes:
        out[at + 4] = changes["precision"]
    height, width = struct.unpack(">HH", out[at + 5 : at + 9])
    sides = (changes.get("height", height), changes.get("width", width))
    out[at + 5 : at + 9] = struct.pack(">HH", *sides)
    return bytes(out)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode(picture(32, 32), "cmyk"), id="cmyk"),
        pytest.param(patched(encode(picture(32, 32)), precision=12), id="12 bits"),
        pytest.param(patched(encode(picture(32, 32)), marker=0xC9), id="arithmetic"),
        pytest.param(patched(encode(picture(32, 32)), marker=0xC3), id="lossless"),
        pytest.param(patched(encode(picture(32, 32)), height=0), id="no height"),
        pytest.param(patched(encode(picture(32, 32)), height=65500, width=65500), id="absurd"),
        pytest.param(cv2.imencode(".png", picture(32, 32))[1].tobytes(), id="png"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"not a picture at all", id="text"),
    ],
)
def test_what_the_kernel_does_not_know_is_left_to_the_pure_road(data: bytes) -> None:
    with pytest.raises(kernel.Unsupported, match=r"\w"):
        by_kernel(data, (0, 0, 8, 8), (8, 8))


def test_a_progressive_file_that_would_take_gigabytes_is_left_to_the_pure_road() -> None:
    # 16,000 x 16,000 is below the limit on pixels; its coefficients are 1.5 GB.
    data = patched(encode(picture(32, 32), "progressive"), height=16000, width=16000)
    with pytest.raises(kernel.Unsupported, match="memory"):
        by_kernel(data, (0, 0, 8, 8), (8, 8))


def test_endless_scans_are_left_to_the_pure_road() -> None:
    data = encode(picture(16, 16), "progressive")
    at = data.rindex(b"\xff\xda")
    again = data[:at] + data[at:-2] * 600 + data[-2:]
    with pytest.raises((kernel.Unsupported, SourceError)):
        by_kernel(again, (0, 0, 8, 8), (8, 8))


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"GIF89a....", b"\x89PNG\r\n\x1a\n"])
def test_size_leaves_other_files_to_the_pure_road(data: bytes) -> None:
    with pytest.raises(kernel.Unsupported, match="JPEG"):
        kernel.size(data)


def test_size_of_a_file_without_a_frame_is_an_error() -> None:
    data = encode(picture(32, 32))
    for cut in (data[:30], data[:3] + bytes(40), data[:2] + b"\xff\xd9"):
        with pytest.raises((SourceError, kernel.Unsupported)):
            kernel.size(cut)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_mutilated_file_does_more_than_raise(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    file = bytearray(encode(picture(40, 56, 2), kind, 60))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        height, width, _ = kernel.size(bytes(file))
        out = np.empty((16, 16, 3), np.uint8)
        kernel.region(bytes(file), (0, 0, min(height, 40), min(width, 56)), out)
    except (SourceError, kernel.Unsupported, PipelineError):
        pass


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 8, 8),
        (0, -1, 8, 8),
        (0, 0, 0, 8),
        (0, 0, 8, -8),
        (30, 0, 3, 8),
        (0, 0, 33, 8),
        (0, 41, 8, 8),
        (0, 0, 8, 2**31 - 1),
        (2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1),
        (0, 0, 2**40, 8),
    ],
)
def test_a_box_outside_the_image_is_refused(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(PipelineError, match="box"):
        by_kernel(encode(picture(32, 48)), box, (8, 8))


def test_an_out_that_cannot_hold_the_pixels_is_refused() -> None:
    data = encode(picture(32, 48))
    table = _table((0.5,), (0.5,), 3)
    read_only = np.empty((8, 8, 3), np.uint8)
    read_only.flags.writeable = False
    for out in (
        np.empty((8, 8, 4), np.uint8),
        np.empty((8, 8), np.uint8),
        np.empty((0, 8, 3), np.uint8),
        np.empty((8, 8, 3), np.int8),
        np.empty((8, 8, 3), np.float32),
        np.empty((8, 16, 3), np.uint8)[:, ::2],
        np.empty((3, 8, 8), np.uint8).transpose(1, 2, 0),
        np.empty((8, 70000, 3), np.uint8),
        read_only,
    ):
        with pytest.raises(PipelineError, match="contiguous"):
            kernel.region(data, (0, 0, 32, 48), out)
    for out in (np.empty((8, 8, 3), np.float32), np.empty((3, 8, 8), np.float64)):
        with pytest.raises(PipelineError, match="out must"):
            kernel.region(data, (0, 0, 32, 48), out, table=table)
    wrong: Any
    for wrong in (table[:2], table.astype(np.float64), table[:, ::2]):
        with pytest.raises(PipelineError):
            kernel.region(data, (0, 0, 32, 48), np.empty((3, 8, 8), np.float32), table=wrong)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "no_kernel", lambda: True)
    assert not kernel.available()
    assert "PENSTOCK_NO_KERNEL" in kernel.why_not()
    with pytest.raises(kernel.Unsupported, match="PENSTOCK_NO_KERNEL"):
        kernel.size(encode(picture(8, 8)))


def test_calls_leave_no_memory_behind() -> None:
    import psutil

    good = encode(picture(300, 400), "progressive")
    bad = good[: len(good) // 2] + b"\xff\xd9"
    process = psutil.Process()

    def calls(count: int) -> None:
        for _ in range(count):
            by_kernel(good, (5, 5, 200, 200), (64, 64))
            with pytest.raises((SourceError, kernel.Unsupported)):
                by_kernel(bad, (5, 5, 280, 200), (64, 64))

    calls(20)
    before = process.memory_info().rss
    calls(100)
    # One lost decoder is 0.7 MB of coefficients.
    assert process.memory_info().rss - before < 20 << 20
