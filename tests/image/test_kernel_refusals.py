"""The compiled kernel refuses files it does not support, and survives broken ones."""

from __future__ import annotations

import contextlib
import gc
import io
import struct
from typing import Any

import cv2
import numpy as np
import PIL.Image
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import config, native
from penstock.errors import PipelineError, SourceError
from penstock.image import decode, kernel
from penstock.image.normalizing import _table
from tests.support.jpegs import KINDS, Box, by_kernel, encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

START, END = b"\xff\xd8", b"\xff\xd9"


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
            assert "or leave it out." in str(caught.value)


def test_damage_above_the_box_is_an_error() -> None:
    data = bytearray(encode(picture(200, 300)))
    middle = data.index(b"\xff\xda") + 400
    data[middle : middle + 60] = b"\xff\xd5" * 30
    with pytest.raises(SourceError, match="Corrupt JPEG"):
        by_kernel(bytes(data), (150, 0, 40, 300), (32, 32))


def test_a_restart_marker_out_of_order_is_an_error() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(picture(64, 64)).save(file, "JPEG", restart_marker_blocks=2)
    data = file.getvalue()
    np.testing.assert_array_equal(
        by_kernel(data, (5, 5, 50, 50), (50, 50)), decode().apply(data, None)[5:55, 5:55]
    )
    with pytest.raises(SourceError, match="Corrupt JPEG"):
        by_kernel(data.replace(b"\xff\xd1", b"\xff\xd6"), (40, 0, 24, 64), (24, 24))


def test_stray_bytes_are_ignored_as_in_decode() -> None:
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
        pytest.param(
            cv2.imencode(".png", picture(32, 32).astype(np.uint16) * 257)[1].tobytes(),
            id="png of 16 bits",
        ),
        pytest.param(cv2.imencode(".webp", picture(32, 32))[1].tobytes(), id="webp"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"not a picture at all", id="text"),
    ],
)
def test_unsupported_files_are_left_to_the_single_operations(data: bytes) -> None:
    with pytest.raises(kernel.Unsupported, match=r"\w"):
        by_kernel(data, (0, 0, 8, 8), (8, 8))


def test_a_progressive_file_that_would_take_gigabytes_is_left_to_the_single_operations() -> None:
    # 16,000 x 16,000 is below the limit on pixels; its coefficients are 1.5 GB.
    data = patched(encode(picture(32, 32), "progressive"), height=16000, width=16000)
    with pytest.raises(kernel.Unsupported, match="memory"):
        by_kernel(data, (0, 0, 8, 8), (8, 8))


def in_separate_scans(count: int) -> bytes:
    """A sequential JPEG with one component in each of ``count`` scans."""
    grey = encode(picture(16, 16), "gray")
    frame, scan = grey.index(b"\xff\xc0"), grey.index(b"\xff\xda")
    header = struct.pack(">HHBHHB", 0xFFC0, 17, 8, 16, 16, 3)
    components = b"".join(bytes([n, 0x11, 0]) for n in (1, 2, 3))
    scans = [
        b"\xff\xda\x00\x08\x01" + bytes([1 + n % 3]) + grey[scan + 6 : -2] for n in range(count)
    ]
    return grey[:frame] + header + components + grey[frame + 13 : scan] + b"".join(scans) + END


def test_separate_scans_are_read_up_to_a_limit() -> None:
    data = in_separate_scans(3)
    whole = decode().apply(data, None)
    np.testing.assert_array_equal(by_kernel(data, (3, 2, 9, 11), (9, 11)), whole[3:12, 2:13])
    with pytest.raises(kernel.Unsupported, match="500 scans"):
        by_kernel(in_separate_scans(600), (0, 0, 8, 8), (8, 8))


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"GIF89a....", b"\x89PNG\r\n\x1a\n"])
def test_size_leaves_other_files_to_the_single_operations(data: bytes) -> None:
    with pytest.raises(kernel.Unsupported, match="JPEG"):
        kernel.size(data)


@pytest.mark.parametrize("cut", [encode(picture(9, 9))[:30], START + bytes(40), START + END + END])
def test_size_of_a_file_without_a_frame_is_an_error(cut: bytes) -> None:
    with pytest.raises(SourceError, match="Premature end"):
        kernel.size(cut)


@settings(max_examples=160, deadline=None)
@given(st.data())
def test_damaged_files_do_nothing_worse_than_raise(data: st.DataObject) -> None:
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
def test_a_box_outside_the_image_is_refused(box: Box) -> None:
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


def test_the_kernel_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "no_kernel", lambda: True)
    assert not native.kernel_available()
    assert "PENSTOCK_NO_KERNEL" in native.why_no_kernel()
    with pytest.raises(kernel.Unsupported, match="PENSTOCK_NO_KERNEL"):
        kernel.size(encode(picture(8, 8)))


def test_calls_leak_no_memory() -> None:
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
    # One leaked decoder is 0.7 MB of coefficients.
    assert process.memory_info().rss - before < 20 << 20


def test_buffers_are_released_after_success_and_after_errors() -> None:
    good = bytearray(encode(picture(32, 48)))
    out = bytearray(8 * 8 * 3)
    pixels: Any = np.frombuffer(out, np.uint8).reshape(8, 8, 3)
    for data in (good, good[:-40], bytearray(b"no JPEG at all")):
        with contextlib.suppress(SourceError, kernel.Unsupported):
            kernel.size(data)
            kernel.region(data, (0, 0, 32, 48), pixels)
        # A bytearray with an exported buffer cannot grow.
        data.append(0)
    with pytest.raises(PipelineError):
        kernel.region(good, (0, 0, 99, 48), pixels)
    del pixels
    gc.collect()
    out.append(0)
