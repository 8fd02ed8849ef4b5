"""TIFFs with fax compression: rows are read exactly, and damaged ones are refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.image import decode
from penstock.image.formats import Damaged, fax, tiff

KINDS: dict[str, dict[str, Any]] = {
    "no ends": {"compression": "tiff_ccitt"},
    "group 3": {"compression": "group3"},
    "group 3, ends at bytes": {"compression": "group3", "tiffinfo": {292: 4}},
    "group 3, two-dimensional": {"compression": "group3", "tiffinfo": {292: 1}},
    "group 4": {"compression": "group4"},
    "group 4, low bits first": {"compression": "group4", "tiffinfo": {266: 2}},
    "group 4, strips": {"compression": "group4", "tiffinfo": {278: 3}},
}


def random_runs(height: int, width: int, seed: int) -> NDArray[np.bool_]:
    """Runs of all lengths, the same for several rows most of the time."""
    rng = np.random.default_rng(seed)
    out = np.zeros((height, width), bool)
    for row in range(height):
        if row and rng.random() < 0.7:
            out[row] = np.roll(out[row - 1], rng.integers(-4, 5))
            out[row, rng.integers(0, width) :][: rng.integers(0, 9)] ^= True
            continue
        at, black = 0, rng.random() < 0.5
        while at < width:
            end = at + 1 + int(rng.choice([1, 3, 20, 70, 3000]) * rng.random())
            out[row, at:end] = black
            at, black = end, not black
    return out


def saved(pixels: NDArray[np.bool_], kind: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "TIFF", **KINDS[kind])
    return file.getvalue()


def strips(data: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    directory = tiff._directory(memoryview(data))
    return directory.numbers(273), directory.numbers(279)


def black_pixels(data: bytes) -> NDArray[np.bool_]:
    """The pixels of all strips, as ``fax.rows`` reads them."""
    directory = tiff._directory(memoryview(data))
    height, width = tiff.size(memoryview(data))
    kind = tiff._fax_kind(directory)
    in_strip, found = directory.number(278, height), []
    for number, (start, length) in enumerate(zip(*strips(data), strict=True)):
        rows = min(in_strip, height - number * in_strip)
        low_first = directory.number(266, 1) == 2
        for changes in fax.rows(
            data[start : start + length], width, rows, kind, low_first=low_first
        ):
            runs = np.diff([0, *changes])
            found.append(np.repeat(np.arange(len(runs)) % 2 == 1, runs))
    # Which level is black is for the reader of the directory to say.
    return np.array(found) ^ (directory.number(262) == 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(40, 50), (33, 21), (1, 1), (9, 6000), (300, 9)], ids=str)
def test_rows_are_those_that_pil_reads(kind: str, size: tuple[int, int]) -> None:
    for seed in range(3):
        data = saved(random_runs(*size, seed), kind)
        expected = np.asarray(PIL.Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(black_pixels(data), expected)
        levels = decode().apply(data, None)[:, :, 0]
        np.testing.assert_array_equal(levels, expected * np.uint8(255))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_unless_it_gives_another_picture(kind: str) -> None:
    data = saved(random_runs(20, 200, 0), kind)
    (first, *_), (length, *_) = strips(data)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[first + rng.integers(0, length)] ^= 1 << rng.integers(0, 8)
        try:
            decode().apply(bytes(damaged), None)
        except SourceError:
            refused += 1
            continue
        found = black_pixels(bytes(damaged))
        np.testing.assert_array_equal(found, np.asarray(PIL.Image.open(io.BytesIO(damaged))))
    assert refused > 10


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_that_are_cut_short_are_refused(kind: str) -> None:
    data = bytearray(saved(random_runs(20, 200, 0), kind))
    (first, *_), (length, *_) = strips(bytes(data))
    data[first + length // 2 : first + length] = bytes(length - length // 2)
    with pytest.raises(SourceError, match=r"pixels are (damaged|cut short)"):
        decode().apply(bytes(data), None)


def test_a_row_that_is_too_long_is_refused() -> None:
    # 5 white pixels, 3 black ones.
    eight = bytes([0b11001000])
    assert list(fax.rows(eight, 8, 1, "group 3, no ends")) == [[5, 8, 8, 8, 8]]
    with pytest.raises(Damaged, match="a row of 8 pixels in place of 7"):
        list(fax.rows(eight, 7, 1, "group 3, no ends"))
    with pytest.raises(Damaged, match="undefined run length"):
        list(fax.rows(eight, 9, 1, "group 3, no ends"))


def test_a_directory_without_its_last_bytes_is_refused() -> None:
    data = saved(random_runs(20, 200, 0), "group 4")
    (at,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, at)
    cut = data[: at + 2 + 12 * count - 2]  # of the last entry only unused bytes are missing
    with pytest.raises(SourceError, match="directory is cut short"):
        decode().apply(cut, None)
