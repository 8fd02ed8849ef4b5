"""The JPEG index changes the time that crops take, and nothing else."""

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

ENTRY = 10
"""Bytes of one index entry."""


@st.composite
def looks(draw: st.DrawFn, most: int = 150) -> tuple[bytes, list[Box]]:
    """A JPEG of any kind, and boxes to decode from it one after the other."""
    height, width = draw(st.integers(1, most)), draw(st.integers(1, most))
    data = encode(picture(height, width, draw(st.integers(0, 99))), draw(st.sampled_from(KINDS)))
    boxes = []
    for _ in range(draw(st.integers(2, 5))):
        top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
        size = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
        boxes.append((top, left, *size))
    return data, boxes


@settings(max_examples=120, deadline=None)
@given(looks())
def test_crops_with_index_entries_have_the_same_pixels(look: tuple[bytes, list[Box]]) -> None:
    data, boxes = look
    entries = b""
    for box in boxes:
        out = np.empty((*box[2:], 3), np.uint8)
        more = kernel.region(data, box, out, entries=entries)
        np.testing.assert_array_equal(out, by_kernel(data, box, box[2:]))
        if more is not None:
            assert len(more) > len(entries)
            assert more.startswith(entries)
            entries = more


def test_data_above_and_beside_the_crop_is_not_read_again() -> None:
    data = encode(picture(160, 160), "420")
    box = (96, 48, 30, 40)
    right = np.empty((30, 40, 3), np.uint8)
    entries = kernel.region(data, (0, 0, 160, 160), np.empty((160, 160, 3), np.uint8), entries=b"")
    assert entries is not None
    assert len(entries) == ENTRY * 9  # ten rows of 16 pixels; the first needs no entry
    kernel.region(data, box, right)
    # Change the data of the first rows, without adding a marker or changing the length.
    begin = data.index(b"\xff\xda") + 14
    spoilt = bytearray(data)
    for at in range(begin + 10, begin + 60):
        if spoilt[at] != 0xFF and spoilt[at - 1] != 0xFF:
            spoilt[at] ^= 0x15
    found = np.empty_like(right)
    kernel.region(bytes(spoilt), box, found, entries=entries)
    np.testing.assert_array_equal(found, right)
    try:  # without entries the changed data is read
        kernel.region(bytes(spoilt), box, found)
    except ps.errors.SourceError:
        return
    assert (found != right).any()


def test_entries_cover_the_rows_that_were_read_and_no_others() -> None:
    data = encode(picture(160, 160), "420")
    out = np.empty((40, 40, 3), np.uint8)
    first = kernel.region(data, (0, 0, 40, 160), out, entries=b"")
    assert first is not None
    assert len(first) == ENTRY * 2
    assert kernel.region(data, (20, 20, 20, 20), out, entries=first) is None
    second = kernel.region(data, (100, 20, 20, 20), out, entries=first)
    assert second is not None
    assert len(second) == ENTRY * 7


def restarting() -> bytes:
    file = io.BytesIO()
    image = PIL.Image.fromarray(picture(160, 160))
    image.save(file, "JPEG", quality=90, restart_marker_rows=1)
    assert b"\xff\xdd" in file.getvalue()
    return file.getvalue()


@pytest.mark.parametrize("data", [restarting(), encode(picture(160, 160), "progressive")])
def test_progressive_files_and_files_with_restarts_get_no_entries(data: bytes) -> None:
    out = np.empty((40, 40, 3), np.uint8)
    assert kernel.region(data, (80, 40, 40, 40), out, entries=b"") is None
    # Entries that are given anyway do no harm.
    kernel.region(data, (80, 40, 40, 40), out, entries=bytes(ENTRY * 20))
    np.testing.assert_array_equal(out, by_kernel(data, (80, 40, 40, 40), (40, 40)))


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=0, max_size=40 * ENTRY).map(lambda b: b[: len(b) // ENTRY * ENTRY]))
def test_wrong_entries_give_wrong_pixels_or_an_error_and_nothing_worse(entries: bytes) -> None:
    data = encode(picture(160, 160), "420")
    room = np.full(64 + 40 * 40 * 3 + 64, 9, np.uint8)
    with contextlib.suppress(ps.errors.SourceError):
        kernel.region(data, (80, 40, 40, 40), room[64:-64].reshape(40, 40, 3), entries=entries)
    assert (room[:64] == 9).all()
    assert (room[-64:] == 9).all()


def test_bytes_that_cannot_be_entries_are_refused() -> None:
    data, out = encode(picture(32, 32)), np.empty((8, 8, 3), np.uint8)
    with pytest.raises(PipelineError, match="13 bytes are not index entries"):
        kernel.region(data, (0, 0, 8, 8), out, entries=bytes(13))
    with pytest.raises(PipelineError):
        kernel.region(data, (0, 0, 8, 8), out, entries=bytes(ENTRY * 70_000))


def test_files_that_came_first_stay_within_the_budget() -> None:
    index = JpegIndex(2 * (OVERHEAD + 10 * ENTRY))
    first, second, third = (bytes([number]) * 16 for number in (1, 2, 3))
    assert index.entries(first) == b""
    index.add(first, bytes(10 * ENTRY))
    index.add(second, bytes(5 * ENTRY))
    assert index.entries(third) == b""  # within the budget
    index.add(second, bytes(12 * ENTRY))
    index.add(second, bytes(6 * ENTRY))  # from another thread that had read less
    assert index.used == 2 * OVERHEAD + 22 * ENTRY
    assert index.entries(third) is None
    assert (index.entries(first), index.entries(second)) == (bytes(10 * ENTRY), bytes(12 * ENTRY))
    assert len(index) == 2


def test_an_index_of_many_files_finds_each_of_them() -> None:
    index = JpegIndex(1 << 30)
    keys = [number.to_bytes(8, "little") + bytes(8) for number in range(5_000)]
    for number, key in enumerate(keys):
        index.add(key, bytes([number % 251]) * ENTRY)
    assert [index.entries(key) for key in keys] == [bytes([n % 251]) * ENTRY for n in range(5_000)]
    assert len(index) == 5_000


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> JpegIndex:
    """An empty index, in place of that of the process."""
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


def test_epochs_have_the_same_bits_with_and_without_the_index(
    tmp_path: Path, fresh: JpegIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = photographs(tmp_path, 12)
    remembered = epochs(folder, workers=2, kind="threads")
    assert len(fresh) == 12
    monkeypatch.setattr(jpeg_index, "_jpeg_index", JpegIndex(0))
    for a, b in zip(remembered, epochs(folder, workers=0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(jpeg_index.process_index()) == 0


def test_a_file_with_other_content_gets_its_own_entries(fresh: JpegIndex) -> None:
    box = (100, 60, 64, 64)
    for seed in range(3):
        data = encode(picture(240, 320, seed), "420", 95)
        out = np.empty((64, 64, 3), np.uint8)
        for _ in range(2):
            jpeg_index.regions([kernel.RegionRequest(data, box, out)])
            np.testing.assert_array_equal(out, by_kernel(data, box, (64, 64)))
    assert len(fresh) == 3


def test_threads_share_the_index(fresh: JpegIndex) -> None:
    data = [encode(picture(240, 320, seed), "420", 95) for seed in range(4)]
    wrong = []

    def work(first: int) -> None:
        rng = np.random.default_rng(first)
        for turn in range(60):
            file = data[(first + turn) % 4]
            top, left = int(rng.integers(0, 200)), int(rng.integers(0, 280))
            out = np.empty((40, 40, 3), np.uint8)
            jpeg_index.regions([kernel.RegionRequest(file, (top, left, 40, 40), out)])
            if (out != by_kernel(file, (top, left, 40, 40), (40, 40))).any():
                wrong.append((first, turn))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(fresh) == 4


def test_the_budget_is_a_thousandth_of_the_memory_or_from_the_environment(
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
