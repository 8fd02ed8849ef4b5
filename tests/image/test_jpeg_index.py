"""What is remembered of a JPEG changes the time that its crops take, and nothing else."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import config, native
from penstock.errors import PipelineError
from penstock.image import jpeg_index, kernel
from penstock.image.jpeg_index import OVERHEAD, JpegIndex
from tests.support.jpegs import KINDS, Box, Pixels, by_kernel, encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

MARK = 10
"""Bytes of a mark."""


@st.composite
def looks(draw: st.DrawFn, most: int = 150) -> tuple[bytes, list[Box]]:
    """A JPEG of any kind, and boxes that are taken out of it one after the other."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    boxes = []
    for _ in range(draw(st.integers(2, 5))):
        top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
        size = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
        boxes.append((top, left, *size))
    return data, boxes


@settings(max_examples=300, deadline=None)
@given(looks())
def test_every_look_has_the_pixels_of_the_first(look: tuple[bytes, list[Box]]) -> None:
    data, boxes = look
    marks = b""
    for box in boxes:
        out = np.empty((*box[2:], 3), np.uint8)
        more = kernel.region(data, box, out, marks=marks)
        np.testing.assert_array_equal(out, by_kernel(data, box, box[2:]))
        if more is not None:
            assert len(more) > len(marks)
            assert more.startswith(marks)
            marks = more


def test_what_lies_above_and_beside_is_not_read_again() -> None:
    data = encode(picture(160, 160), "420")
    box = (96, 48, 30, 40)
    right = np.empty((30, 40, 3), np.uint8)
    marks = kernel.region(data, (0, 0, 160, 160), np.empty((160, 160, 3), np.uint8), marks=b"")
    assert marks is not None
    assert len(marks) == MARK * 9  # of ten rows of 16 pixels, the first begins where the data does
    kernel.region(data, box, right)
    # Spoil the data of the first rows, without a marker and in the same length.
    begin = data.index(b"\xff\xda") + 14
    spoilt = bytearray(data)
    for at in range(begin + 10, begin + 60):
        if spoilt[at] != 0xFF and spoilt[at - 1] != 0xFF:
            spoilt[at] ^= 0x15
    found = np.empty_like(right)
    kernel.region(bytes(spoilt), box, found, marks=marks)
    np.testing.assert_array_equal(found, right)
    try:  # and without marks, it would have been read
        kernel.region(bytes(spoilt), box, found)
    except ps.errors.SourceError:
        return
    assert (found != right).any()


def test_marks_grow_with_what_was_read_and_no_further() -> None:
    data = encode(picture(160, 160), "420")
    out = np.empty((40, 40, 3), np.uint8)
    first = kernel.region(data, (0, 0, 40, 160), out, marks=b"")
    assert first is not None
    assert len(first) == MARK * 2
    assert kernel.region(data, (20, 20, 20, 20), out, marks=first) is None
    second = kernel.region(data, (100, 20, 20, 20), out, marks=first)
    assert second is not None
    assert len(second) == MARK * 7


def restarting() -> bytes:
    file = io.BytesIO()
    image = PIL.Image.fromarray(picture(160, 160))
    image.save(file, "JPEG", quality=90, restart_marker_rows=1)
    assert b"\xff\xdd" in file.getvalue()
    return file.getvalue()


@pytest.mark.parametrize("data", [restarting(), encode(picture(160, 160), "progressive")])
def test_files_of_another_kind_have_none(data: bytes) -> None:
    out = np.empty((40, 40, 3), np.uint8)
    assert kernel.region(data, (80, 40, 40, 40), out, marks=b"") is None
    # Nor do marks that somehow came to be lead astray.
    kernel.region(data, (80, 40, 40, 40), out, marks=bytes(MARK * 20))
    np.testing.assert_array_equal(out, by_kernel(data, (80, 40, 40, 40), (40, 40)))


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=0, max_size=40 * MARK).map(lambda b: b[: len(b) // MARK * MARK]))
def test_wrong_marks_give_wrong_pixels_or_an_error_and_nothing_worse(marks: bytes) -> None:
    data = encode(picture(160, 160), "420")
    room = np.full(64 + 40 * 40 * 3 + 64, 9, np.uint8)
    with contextlib.suppress(ps.errors.SourceError):
        kernel.region(data, (80, 40, 40, 40), room[64:-64].reshape(40, 40, 3), marks=marks)
    assert (room[:64] == 9).all()
    assert (room[-64:] == 9).all()


def test_what_cannot_be_marks_is_refused() -> None:
    data, out = encode(picture(32, 32)), np.empty((8, 8, 3), np.uint8)
    with pytest.raises(PipelineError, match="13 bytes are no marks"):
        kernel.region(data, (0, 0, 8, 8), out, marks=bytes(13))
    with pytest.raises(PipelineError):
        kernel.region(data, (0, 0, 8, 8), out, marks=bytes(MARK * 70_000))


def test_those_that_came_first_stay() -> None:
    found = JpegIndex(2 * (OVERHEAD + 100))
    assert found.known(1) == b""
    found.add(1, bytes(100))
    found.add(2, bytes(50))
    assert found.known(3) == b""  # there is room
    found.add(2, bytes(120))
    found.add(2, bytes(60))  # another thread knew less
    assert found.used == 2 * OVERHEAD + 220
    assert found.known(3) is None
    assert (found.known(1), found.known(2)) == (bytes(100), bytes(120))
    assert len(found) == 2


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> JpegIndex:
    """Nothing is remembered yet."""
    found = JpegIndex(1 << 20)
    monkeypatch.setattr(jpeg_index, "_jpeg_index", found)
    return found


def photographs(folder: Path, count: int) -> Path:
    for number in range(count):
        place = folder / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        data = encode(picture(240, 320, number), "420", 95)
        assert len(data) > jpeg_index.FEWEST_BYTES
        (place / f"{number}.jpg").write_bytes(data)
    return folder


def epochs(folder: Path, **options: object) -> list[Pixels]:
    road = ps.from_folder(folder).map(ps.image.decode()).map(ps.image.random_resized_crop(64))
    road = road.map(ps.image.random_flip()).batch(4)
    with road.loader(seed=3, **options) as loader:  # type: ignore[arg-type]
        return [batch[0].copy() for _ in range(3) for batch in loader]


def test_epochs_are_the_same_bits_with_and_without(
    tmp_path: Path, fresh: JpegIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photographs(tmp_path, 12)
    remembered = epochs(folder, workers=2, kind="threads")
    assert len(fresh) == 12
    monkeypatch.setattr(jpeg_index, "_jpeg_index", JpegIndex(0))
    for a, b in zip(remembered, epochs(folder, workers=0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(jpeg_index.process_index()) == 0


def test_a_file_that_is_changed_is_another_one(fresh: JpegIndex) -> None:
    box = (100, 60, 64, 64)
    for seed in range(3):
        data = encode(picture(240, 320, seed), "420", 95)
        out = np.empty((64, 64, 3), np.uint8)
        for _ in range(2):
            jpeg_index.regions([kernel.RegionRequest(data, box, out)])
            np.testing.assert_array_equal(out, by_kernel(data, box, (64, 64)))
    assert len(fresh) == 3


def test_threads_share_them(fresh: JpegIndex) -> None:
    data = [encode(picture(240, 320, seed), "420", 95) for seed in range(4)]
    wrong = []

    def work(first: int) -> None:
        rng = np.random.default_rng(first)
        for turn in range(60):
            one = data[(first + turn) % 4]
            top, left = int(rng.integers(0, 200)), int(rng.integers(0, 280))
            out = np.empty((40, 40, 3), np.uint8)
            jpeg_index.regions([kernel.RegionRequest(one, (top, left, 40, 40), out)])
            if (out != by_kernel(one, (top, left, 40, 40), (40, 40))).any():
                wrong.append((first, turn))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(fresh) == 4


def test_the_budget_is_a_thousandth_of_the_memory_or_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_JPEG_INDEX", raising=False)
    assert config.jpeg_index() == config.memory() >> 10
    monkeypatch.setenv("PENSTOCK_JPEG_INDEX", "5MB")
    assert config.jpeg_index() == 5_000_000
    monkeypatch.setenv("PENSTOCK_JPEG_INDEX", "0")
    assert config.jpeg_index() == 0
    monkeypatch.setenv("PENSTOCK_JPEG_INDEX", "much")
    with pytest.raises(PipelineError, match="PENSTOCK_JPEG_INDEX"):
        config.jpeg_index()
