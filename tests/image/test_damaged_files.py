"""Damaged and hostile files: refused on every way through the library, quietly and early."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image
import pytest

from penstock import config, native
from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.image import center_crop, decode, formats, kernel, resize
from penstock.image.formats import lzw
from penstock.image.fused import Fused
from penstock.keyed import Keys
from penstock.stats import Tally
from penstock.stops.stop import StageFailure, StepContext
from tests.support import ROOT
from tests.support.jpegs import encode, picture

END = b"\xff\xd9"


def saved(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    # Saving leaves options behind in the image.
    image.copy().save(file, kind, **options)
    return file.getvalue()


def alone(data: bytes, **options: Any) -> Any:
    return decode(**options).apply(data, None)


def fused(framing: Any) -> Callable[..., Any]:
    """Decodes and crops or resizes in one step."""

    def run(data: bytes, **options: Any) -> Any:
        stop = Fused(decode(**options), (framing,), None, None, (0, 1))
        try:
            return stop.step(StepContext(0, Tally(1, 0)))(Keys(0, [0]), lambda _: [data])[0]
        except StageFailure as failure:
            raise failure.__cause__ or failure from None

    return run


@pytest.fixture(params=["kernel", "no kernel"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no kernel":
        monkeypatch.setattr(native, "_switched_off", lambda: True)
    elif not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    return str(request.param)


WAYS = {
    "alone": alone,
    "gray": lambda data, **options: alone(data, mode="gray", **options),
    "crop": fused(center_crop(30)),
    "resize": fused(resize((20, 30))),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, setting: str) -> Callable[..., Any]:
    return WAYS[request.param]


def in_the_scan(marker: bytes) -> bytes:
    """A JPEG with a marker far below the rows of a crop, with an end, and with pixels around it."""
    good = encode(picture(200, 150), quality=95)
    scan = good.rindex(b"\xff\xda")
    at = scan + (len(good) - scan) * 9 // 10
    return good[:at] + marker + good[at + 2 :]


BROKEN_OFF = encode(picture(200, 150), quality=95)

DAMAGED_JPEGS = {
    "upload broken off, then repeated": BROKEN_OFF[: len(BROKEN_OFF) * 9 // 10] + BROKEN_OFF,
    "upload broken off, then another": BROKEN_OFF[: len(BROKEN_OFF) // 2] + encode(picture(9, 9)),
    "reserved marker": in_the_scan(b"\xff\x02"),
    "Huffman table marker": in_the_scan(b"\xff\xc4"),
    "second frame": in_the_scan(b"\xff\xc0"),
    "restart without an interval": in_the_scan(b"\xff\xd3"),
    "application data within the scan": in_the_scan(b"\xff\xe5"),
}


@pytest.mark.parametrize("data", DAMAGED_JPEGS.values(), ids=DAMAGED_JPEGS)
def test_a_jpeg_with_damage_in_its_scan_never_gives_a_half_grey_picture(
    way: Callable[..., Any], data: bytes
) -> None:
    with pytest.raises(SourceError, match="bytes that begin"):
        way(data)


@pytest.mark.parametrize("mode", ["rgb", "gray"])
def test_a_jpeg_that_ends_early_never_gives_a_half_grey_picture(setting: str, mode: str) -> None:
    # A crop of the upper rows does not notice, and shows none of the grey.
    with pytest.raises(SourceError, match="premature end"):
        alone(BROKEN_OFF[:-700] + END, mode=mode)
    with pytest.raises(SourceError, match="premature end"):
        fused(center_crop((200, 150)))(BROKEN_OFF[:-700] + END)


def restarts(*numbers: int) -> bytes:
    """A JPEG in which only these restart markers are left, of 0 to 6."""
    image = PIL.Image.fromarray(picture(64, 128))
    data = saved(image, "JPEG", restart_marker_blocks=4, subsampling=2)
    for number in range(7):
        marker = bytes([0xFF, 0xD0 + number])
        assert data.count(marker) == 1
        if number not in numbers:
            data = data.replace(marker, b"")
    return data


def test_missing_restart_markers_are_damage_and_not_stray_bytes(way: Callable[..., Any]) -> None:
    way(restarts(*range(7)))
    for kept in ((0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (0, 1, 2), ()):
        with pytest.raises(SourceError, match="bytes that begin"):
            way(restarts(*kept))


def test_stray_bytes_hide_no_other_damage(way: Callable[..., Any]) -> None:
    good = encode(picture(64, 96))
    scan = good.index(b"\xff\xda")
    stray = good[:scan] + b"\x01\x02" + good[scan:-2] + bytes(5) + END
    np.testing.assert_array_equal(way(stray), way(good))
    bad = bytearray(stray)
    bad[scan + 200 : scan + 240] = b"\xff\x00" * 20
    with pytest.raises(SourceError, match="bytes that begin"):
        way(bytes(bad))


def test_a_damaged_colour_profile_is_no_reason_to_refuse_a_jpeg(way: Callable[..., Any]) -> None:
    image = PIL.Image.fromarray(picture(64, 96))
    good = saved(image, "JPEG", icc_profile=bytes(200))
    # The second of one part: libjpeg warns, though the pixels are fine.
    bad = good.replace(b"ICC_PROFILE\0\1\1", b"ICC_PROFILE\0\2\1")
    assert bad != good
    np.testing.assert_array_equal(way(bad), way(good))


def flat_jpeg(*factors: int, restart: int = 0, frame: int = 0xC0) -> bytes:
    """A JPEG of 40 x 56 pixels with these sampling factors, in flat blocks of 8 x 8 samples."""
    across, down = max(factor >> 4 for factor in factors), max(factor & 15 for factor in factors)
    units = -(-56 // (8 * across)) * -(-40 // (8 * down))
    levels = np.random.default_rng(0)

    def segment(marker: int, content: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    def coded(count: int) -> bytes:
        bits, last = "", [0] * len(factors)
        for _ in range(count):
            for component, factor in enumerate(factors):
                for _ in range((factor >> 4) * (factor & 15)):
                    level = int(levels.integers(-60, 60))
                    change, last[component] = level - last[component], level
                    length = abs(change).bit_length()
                    value = change if change > 0 else change + (1 << length) - 1
                    # The code of a length is the length in 4 bits; a 0 ends the block.
                    bits += f"{length:04b}" + (f"{value:0{length}b}" if length else "") + "0"
        bits += "1" * (-len(bits) % 8)
        packed = int(bits, 2).to_bytes(len(bits) // 8, "big")
        return packed.replace(b"\xff", b"\xff\0")

    parts = [coded(min(restart or units, units - at)) for at in range(0, units, restart or units)]
    scan = parts[0]
    for number, part in enumerate(parts[1:]):
        scan += bytes([0xFF, 0xD0 + number % 8]) + part
    frame_header = struct.pack(">BHHB", 8, 40, 56, len(factors))
    for number, factor in enumerate(factors):
        frame_header += bytes([number, factor, 0])
    scan_header = bytes([len(factors)])
    scan_header += b"".join(bytes([number, 0]) for number in range(len(factors)))
    return (
        b"\xff\xd8"
        + segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
        + segment(0xDB, bytes([0]) + bytes([8] * 64))
        + segment(frame, frame_header)
        + segment(0xC4, bytes([0, 0, 0, 0, 12]) + bytes(12) + bytes(range(12)))
        + segment(0xC4, bytes([0x10, 1]) + bytes(15) + bytes([0]))
        + (segment(0xDD, struct.pack(">H", restart)) if restart else b"")
        + segment(0xDA, scan_header + b"\0\x3f\0")
        + scan
        + END
    )


RARE_SAMPLING = {
    "3x1": flat_jpeg(0x31, 0x11, 0x11),
    "4x2": flat_jpeg(0x42, 0x11, 0x11),
    "2x4": flat_jpeg(0x24, 0x11, 0x11),
    "3x2": flat_jpeg(0x32, 0x11, 0x11),
    "three resolutions": flat_jpeg(0x22, 0x21, 0x11),
    "more colour than light": flat_jpeg(0x11, 0x22, 0x22),
    "restarts": flat_jpeg(0x31, 0x11, 0x11, restart=2),
    "unknown version": flat_jpeg(0x31, 0x11, 0x11).replace(b"JFIF\0\1", b"JFIF\0\3"),
    "bytes behind the end": flat_jpeg(0x31, 0x11, 0x11) + b"more",
    "bytes before the end": flat_jpeg(0x31, 0x11, 0x11)[:-2] + bytes(5) + END,
    "comment behind the scan": flat_jpeg(0x31, 0x11, 0x11)[:-2] + b"\xff\xfe\0\6word" + END,
}


@pytest.mark.parametrize("name", RARE_SAMPLING)
def test_a_jpeg_with_colours_of_a_rare_resolution_is_decoded(
    way: Callable[..., Any], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = RARE_SAMPLING[name]
    whole = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert whole.std() > 20
    np.testing.assert_allclose(alone(data), whole, atol=2)
    found = way(data)
    if found.shape == (30, 30, 3):
        np.testing.assert_allclose(found, whole[5:35, 13:43], atol=2)
    assert found.std() > 10
    assert capfd.readouterr() == ("", "")


RARE = RARE_SAMPLING["3x1"]
RARE_SCAN = RARE.index(b"\xff\xda") + 14
DAMAGED_RARE = {
    "rows missing": RARE[:-9] + END,
    "most rows missing": RARE[: RARE_SCAN + 3] + END,
    "no end": RARE[:-9],
    "undefined code": RARE[:RARE_SCAN] + b"\xfc\xfc\xfc" + RARE[RARE_SCAN + 3 :],
    "reserved marker": RARE[: RARE_SCAN + 9] + b"\xff\x02" + RARE[RARE_SCAN + 9 :],
    "other sampling": RARE.replace(b"\0\x31\0\1", b"\0\x51\0\1"),
    "too many blocks": flat_jpeg(0x44, 0x11, 0x11),
    "table missing": RARE.replace(b"\3\0\0\1", b"\3\0\x11\1"),
    "table cut short": RARE.replace(b"\xff\xc4\0\x14\x10\1", b"\xff\xc4\0\x14\x10\2"),
    "colour twice": RARE.replace(b"\3\0\0\1\0\2", b"\3\0\0\0\0\2"),
    "progressive": flat_jpeg(0x31, 0x11, 0x11, frame=0xC2),
    "arithmetic codes": flat_jpeg(0x31, 0x11, 0x11, frame=0xC9),
    "restart missing": RARE_SAMPLING["restarts"].replace(b"\xff\xd0", b""),
}


@pytest.mark.parametrize("name", DAMAGED_RARE)
def test_damage_in_a_jpeg_of_rare_sampling_is_refused_without_a_word_on_stderr(
    way: Callable[..., Any], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert DAMAGED_RARE[name] not in RARE_SAMPLING.values()
    with pytest.raises(SourceError, match="bytes that begin"):
        way(DAMAGED_RARE[name])
    assert capfd.readouterr() == ("", "")


def many_scans(count: int) -> bytes:
    """A progressive JPEG in which the last scan is repeated."""
    good = encode(picture(64, 96), "progressive")
    last = good.rindex(b"\xff\xda")
    return good[:-2] + good[last:-2] * (count - good.count(b"\xff\xda")) + END


def test_a_progressive_jpeg_of_thousands_of_scans_is_refused(way: Callable[..., Any]) -> None:
    way(encode(picture(64, 96), "progressive"))
    with pytest.raises(SourceError, match="more than 500 scans"):
        way(many_scans(501))


# ------------------------------------------------------------------------------- other formats

PICTURE = PIL.Image.fromarray(picture(40, 50))


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return chunks


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A PNG of these chunks, with the right checksums."""
    packed = [
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def png_with_stream(change: Callable[[bytes], bytes]) -> bytes:
    chunks = png_chunks(saved(PICTURE, "PNG"))
    stream = b"".join(content for name, content in chunks if name == b"IDAT")
    return png_of([chunks[0], (b"IDAT", change(stream)), chunks[-1]])


PNG, WEBP, GIF = (saved(PICTURE, kind) for kind in ("PNG", "WEBP", "GIF"))
BMP, TIFF = saved(PICTURE, "BMP"), saved(PICTURE, "TIFF", compression="tiff_lzw")

DAMAGED = {
    "png, checksum of a chunk": PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:],
    "png, checksum of the pixels": png_with_stream(lambda stream: stream[:-1] + b"\1"),
    "png, no checksum of the pixels": png_with_stream(lambda stream: stream[:-4]),
    "png, too few rows": png_with_stream(
        lambda stream: zlib.compress(zlib.decompress(stream)[: 151 * 39])
    ),
    "png, unknown filter": png_with_stream(
        lambda stream: zlib.compress(b"\x09" + zlib.decompress(stream)[1:])
    ),
    "png, a byte missing": png_with_stream(
        lambda stream: zlib.compress(zlib.decompress(stream)[:-1])
    ),
    "png, megabytes behind the last row": png_with_stream(
        lambda stream: zlib.compress(zlib.decompress(stream) + bytes((1 << 20) + 1))
    ),
    "png, bytes behind the last row and no checksum": png_with_stream(
        lambda stream: zlib.compress(zlib.decompress(stream) + bytes(9))[:-4]
    ),
    "png, no end": PNG[:-12],
    "webp, length": WEBP[:4] + struct.pack("<I", len(WEBP)) + WEBP[8:],
    "webp, cut short": WEBP[:-30],
    "gif, cut short": GIF[: len(GIF) // 2],
    "gif, undefined code": GIF[:-300] + b"\xff" * 100 + GIF[-200:],
    "bmp, rows missing": BMP[:-200],
    "bmp, pixels beyond the end": BMP[:10] + struct.pack("<I", len(BMP) + 9) + BMP[14:],
    "tiff, cut short": TIFF[: len(TIFF) * 3 // 4],
    "tiff, undefined code": TIFF.replace(TIFF[60:100], b"\xff" * 40),
    "not an image": b"P6 2 2 255 twelve bytes",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damage_in_other_formats_is_refused_without_a_word_on_stderr(
    way: Callable[..., Any], data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="bytes that begin"):
        way(data)
    assert capfd.readouterr() == ("", "")


def test_parts_of_a_png_that_do_not_change_its_pixels_are_not_given_to_a_decoder() -> None:
    chunks = png_chunks(PNG)
    odd = png_of([chunks[0], (b"tEXt", b"x\0y"), (b"iCCP", b"x\0\0zz"), *chunks[1:]])
    names = [name for name, _ in png_chunks(formats.png.checked(memoryview(odd)))]
    assert set(names) == {b"IHDR", b"IDAT", b"IEND"}
    np.testing.assert_array_equal(alone(odd), np.asarray(PICTURE))


def lzw_streams() -> list[tuple[bytes, int, bool]]:
    """Compressed pixels, bits of a pixel, and whether they are from a TIFF."""
    few = saved(PICTURE.quantize(16), "GIF")
    found = []
    for data in (GIF, few):
        at = data.index(b",\0\0\0\0" + struct.pack("<HH", 50, 40)) + 10
        at += formats.gif._colours(data[at - 1])

        found.append((formats.gif._blocks(memoryview(data), at + 1)[0], data[at], False))
    directory = formats.tiff._directory(memoryview(TIFF))
    offset, length = directory.number(273), directory.number(279)
    return [*found, (TIFF[offset : offset + length], 8, True)]


@pytest.mark.parametrize(("data", "bits", "tiff"), lzw_streams())
def test_lzw_lengths_are_the_same_with_and_without_the_kernel(
    data: bytes, bits: int, tiff: bool
) -> None:
    if not native.kernel_available():
        pytest.skip(native.why_no_kernel())
    whole = 40 * 50 * (3 if tiff else 1)
    assert lzw.unpacked_length(data, bits, 1 << 30, tiff=tiff) == whole
    rng = np.random.default_rng(bits)
    outcomes = set()
    for _ in range(100):
        damaged = bytearray(data)
        damaged[rng.integers(0, len(data))] ^= 1 << rng.integers(0, 8)
        found = []
        for length in (lzw.unpacked_length, lzw._unpacked_length):
            try:
                found.append(length(bytes(damaged), bits, 1 << 30, tiff=tiff))
            except formats.Damaged:
                found.append(-1)
        assert found[0] == found[1]
        outcomes.add(found[0])
    assert len(outcomes) > 5


# ------------------------------------------------------------------------------- sizes


def stating(kind: str, height: int, width: int) -> bytes:
    """A small file whose header states a large picture."""
    if kind in ("jpeg", "progressive"):
        data = bytearray(encode(picture(16, 16), "420" if kind == "jpeg" else kind))
        at = next(n for n in range(len(data)) if data[n] == 0xFF and data[n + 1] in (0xC0, 0xC2))
        data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    elif kind == "png":
        data = bytearray(PNG)
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "webp":
        data = bytearray(WEBP)
        data[26:30] = struct.pack("<HH", width, height)
    elif kind == "webp lossless":
        data = bytearray(saved(PICTURE, "WEBP", lossless=True))
        data[21:25] = struct.pack("<I", width - 1 | height - 1 << 14)
    elif kind == "webp animated":
        data = bytearray(saved(PICTURE, "WEBP", save_all=True, append_images=[PICTURE.rotate(90)]))
        data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == "gif":
        data = bytearray(GIF)
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "bmp":
        data = bytearray(BMP)
        data[18:26] = struct.pack("<ii", width, height)
    else:
        data = bytearray(saved(PICTURE, "TIFF"))
        for tag, value in ((256, width), (257, height)):
            at = data.index(struct.pack("<H", tag) + b"\4\0\1\0\0\0")
            data[at + 8 : at + 12] = struct.pack("<I", value)
    return bytes(data)


SIZES = {
    "jpeg": (65_500, 65_500),
    "progressive": (65_500, 65_500),
    "png": (30_000, 30_001),
    "webp": (16_383, 16_382),
    "webp lossless": (16_383, 16_382),
    "webp animated": (16_777_216, 255),
    "gif": (65_535, 65_534),
    "bmp": (20_000, 20_001),
    "tiff": (20_000, 20_001),
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_picture_above_the_limit_is_refused_before_a_decoder_sees_it(
    way: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a decoder was called")

    monkeypatch.setattr(native.load_simplejpeg(), "decode_jpeg", never)
    monkeypatch.setattr(native.load_cv2(), "imdecode", never)
    monkeypatch.setattr(kernel, "regions", never)
    height, width = SIZES[kind]
    with pytest.raises(SourceError, match="the limit is 178,956,970") as caught:
        way(stating(kind, height, width))
    assert f"{width:,} x {height:,} = {height * width:,} pixels" in str(caught.value)
    assert "decode(max_pixels=...)" in str(caught.value)
    assert "PENSTOCK_MAX_PIXELS" in str(caught.value)


def test_the_limit_can_be_lowered_and_raised(
    way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(picture(60, 70))
    way(data, max_pixels=60 * 70)
    with pytest.raises(SourceError, match="the limit is 4,199"):
        way(data, max_pixels=60 * 70 - 1)
    monkeypatch.setenv("PENSTOCK_MAX_PIXELS", "4199")
    with pytest.raises(SourceError, match="the limit is 4,199"):
        way(data)
    way(data, max_pixels=4200)
    monkeypatch.setenv("PENSTOCK_MAX_PIXELS", "4200")
    way(data)


@pytest.mark.parametrize("given", ["many", "0", "-5", "1.5"])
def test_a_limit_that_is_not_a_number_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_PIXELS", given)
    with pytest.raises(PipelineError, match="PENSTOCK_MAX_PIXELS is"):
        config.max_pixels()


@pytest.mark.parametrize("given", [0, -1, 1.5, "100", True])
def test_an_argument_that_is_not_a_number_of_pixels_is_refused(given: Any) -> None:
    with pytest.raises(PipelineError, match="max_pixels is"):
        decode(max_pixels=given)


def test_the_limit_is_not_part_of_the_fingerprint() -> None:
    assert fingerprint(decode()) == fingerprint(decode(max_pixels=5))
    assert fingerprint(decode()) != fingerprint(decode("gray"))


# ------------------------------------------------------------------------------- good files


def peculiar_jpegs() -> dict[str, bytes]:
    """Headers that libjpeg warns about, and that some cameras write; the pixels are right."""
    plain = encode(picture(40, 50))
    scan = plain.index(b"\xff\xda")
    behind = scan + 2 + int.from_bytes(plain[scan + 2 : scan + 4], "big")
    return {
        "jpeg, unknown version": plain.replace(b"JFIF\0\1", b"JFIF\0\3", 1),
        "jpeg, filled stray bytes": plain[:2] + b"\xff\xff\0stray" + plain[2:],
        "jpeg, odd scan parameters": plain[: behind - 3] + bytes(3) + plain[behind:],
    }


@pytest.mark.parametrize("name", peculiar_jpegs())
def test_a_peculiar_header_is_no_reason_to_refuse_a_jpeg(
    way: Callable[..., Any], name: str
) -> None:
    data, plain = peculiar_jpegs()[name], encode(picture(40, 50))
    assert data != plain
    # The kernel leaves such files to the single operations, which resize a little differently.
    assert np.abs(way(data).astype(int) - way(plain).astype(int)).mean() < 2.0


def long_palette(colours: int, bits: int) -> bytes:
    """A PNG of few bits, with a palette of 256 colours."""
    chunks = png_chunks(saved(PICTURE.quantize(colours), "PNG", bits=bits))
    return png_of(
        [
            (name, content.ljust(768, b"x") if name == b"PLTE" else content)
            for name, content in chunks
        ]
    )


def odd_pngs() -> dict[str, bytes]:
    def longer(by: int) -> bytes:
        return png_with_stream(lambda stream: zlib.compress(zlib.decompress(stream) + bytes(by)))

    return {
        "png, palette too long for 4 bits": long_palette(12, 4),
        "png, palette too long for 1 bit": long_palette(2, 1),
        "png, a byte behind the last row": longer(1),
        "png, rows behind the last row": longer(1500),
        "png, a megabyte behind the last row": longer(1 << 20),
    }


@pytest.mark.parametrize("name", odd_pngs())
def test_a_png_with_more_than_it_needs_is_decoded(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = odd_pngs()[name]
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(alone(data), expected)
    assert capfd.readouterr() == ("", "")


def masked_bmp(header: int, masks: tuple[int, int, int, int], bits: int = 32) -> bytes:
    """A BMP whose pixels are red, green, blue and alpha, with a header of this length."""
    alpha = PICTURE.copy()
    alpha.putalpha(PICTURE.convert("L"))
    info = struct.pack("<IiiHHIIiiII", header, 50, -40, 1, bits, 3, 0, 0, 0, 0, 0)
    info = (info + struct.pack("<4I", *masks)).ljust(header, b"\0")
    pixels: bytes = alpha.tobytes()
    begin = 14 + len(info)
    return b"BM" + struct.pack("<IHHI", begin + len(pixels), 0, 0, begin) + info + pixels


RED_FIRST = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)


@pytest.mark.parametrize("header", [56, 108, 124])
def test_a_bmp_with_transparency_may_begin_with_red(
    header: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = masked_bmp(header, RED_FIRST)
    np.testing.assert_array_equal(alone(data), np.asarray(PICTURE))
    np.testing.assert_array_equal(PIL.Image.open(io.BytesIO(data)).convert("RGB"), PICTURE)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "data",
    [
        masked_bmp(108, (0xFF, 0xFF00, 0xFF0000, 0)),
        masked_bmp(108, (0xFF, 0xFF0000, 0xFF00, 0xFF000000)),
        masked_bmp(108, RED_FIRST, bits=16),
        # The fourth mask is not part of a header this short.
        masked_bmp(40, RED_FIRST),
    ],
)
def test_a_bmp_with_an_unknown_order_of_colours_is_refused(data: bytes) -> None:
    with pytest.raises(SourceError, match="unknown order of colours"):
        alone(data)


def tiff_of(pixels: bytes, *added: tuple[int, int, int, bytes], **changed: Any) -> bytes:
    """An RGB TIFF of 50 x 40 pixels; ``changed``: tags to add or to leave out, as in ``t277``."""
    usual: dict[str, Any] = {"t256": (50,), "t257": (40,), "t258": (8, 8, 8), "t259": (1,)}
    usual |= {"t262": (2,), "t273": (8,), "t277": (3,), "t278": (40,), "t279": (len(pixels),)}
    tags = [
        (int(name[1:]), 4, len(values), struct.pack(f"<{len(values)}I", *values))
        for name, values in (usual | changed).items()
        if values is not None
    ]
    tags = sorted([*tags, *added])
    at = 8 + len(pixels)
    values_at = at + 6 + 12 * len(tags)
    entries, content = struct.pack("<H", len(tags)), b""
    for number, kind, count, raw in tags:
        entries += struct.pack("<HHI", number, kind, count)
        if len(raw) > 4:
            entries += struct.pack("<I", values_at + len(content))
            content += raw
        else:
            entries += raw.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", at) + pixels + entries + bytes(4) + content


def odd_tiffs() -> dict[str, bytes]:
    rgb = PICTURE.tobytes()
    alpha = PICTURE.copy()
    alpha.putalpha(PICTURE.convert("L"))
    planes = b"".join(plane.tobytes() for plane in alpha.split())
    four: dict[str, Any] = {"t258": (8, 8, 8, 8), "t277": (4,)}
    starts = tuple(8 + 2000 * plane for plane in range(4))
    return {
        "tiff, transparency not declared": tiff_of(alpha.tobytes(), **four),
        "tiff, planes, transparency not declared": tiff_of(
            planes, **four, t273=starts, t279=(2000,) * 4, t284=(2,)
        ),
        "tiff, no lengths": tiff_of(rgb, t279=None),
        "tiff, no lengths of several strips": tiff_of(
            rgb, t278=(15,), t273=(8, 8 + 2250, 8 + 4500), t279=None
        ),
        "tiff, no lengths of planes": tiff_of(planes, **four, t273=starts, t279=None, t284=(2,)),
        "tiff, tag of an unknown type": tiff_of(rgb, (50000, 200, 1, b"\1")),
        "tiff, tag of type 0": tiff_of(rgb, (65000, 0, 1, b"\1")),
        "tiff, empty tag": tiff_of(rgb, (305, 2, 0, b"")),
        "tiff, repeated tag": tiff_of(rgb, (305, 2, 2, b"a\0"), (305, 2, 2, b"b\0")),
    }


@pytest.mark.parametrize("name", odd_tiffs())
def test_an_odd_directory_is_no_reason_to_refuse_a_tiff(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    np.testing.assert_array_equal(alone(odd_tiffs()[name]), np.asarray(PICTURE))
    assert capfd.readouterr() == ("", "")


DAMAGED_TIFFS = {
    "needed tag of an unknown type": tiff_of(PICTURE.tobytes(), (277, 200, 1, b"\3"), t277=None),
    "needed tag repeated": tiff_of(PICTURE.tobytes(), (277, 3, 1, b"\3\0")),
    "needed tag empty": tiff_of(PICTURE.tobytes(), (277, 3, 0, b""), t277=None),
    "two colours too many": tiff_of(PICTURE.tobytes() * 2, t258=(8,) * 5, t277=(5,)),
    "no lengths, cut short": tiff_of(PICTURE.tobytes()[:-600], t279=None, t257=(50,)),
    "no lengths, compressed": tiff_of(PICTURE.tobytes(), t279=None, t259=(5,)),
    "no lengths, no rows in a strip": tiff_of(PICTURE.tobytes(), t279=None, t278=(0,)),
    "no lengths, absurd bits": tiff_of(PICTURE.tobytes(), t279=None, t258=(1 << 31,) * 3),
}


@pytest.mark.parametrize("name", DAMAGED_TIFFS)
def test_a_tiff_with_a_damaged_directory_is_refused(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="bytes that begin"):
        alone(DAMAGED_TIFFS[name])
    assert capfd.readouterr() == ("", "")


def good_files() -> dict[str, bytes]:
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    grey = PICTURE.convert("L")
    rng = np.random.default_rng(0)
    deep = rng.integers(0, 65536, (20, 30, 3), dtype=np.uint16)
    return {
        "jpeg, bytes behind the end": encode(picture(40, 50)) + b"more" * 50,
        "jpeg, filled markers": encode(picture(40, 50)).replace(b"\xff\xda", b"\xff\xff\xff\xda"),
        "jpeg, comment behind the scan": encode(picture(40, 50))[:-2] + b"\xff\xfe\0\6word" + END,
        "jpeg, all metadata": saved(
            PICTURE, "JPEG", exif=exif, icc_profile=bytes(70_000), comment=b"words"
        ),
        **peculiar_jpegs(),
        "jpeg, 1 x 1": encode(picture(1, 1)),
        "jpeg, restarts": saved(grey, "JPEG", restart_marker_blocks=1),
        "png, bytes behind the end": PNG + b"more",
        "png, 1 x 1": saved(PICTURE.crop((0, 0, 1, 1)), "PNG"),
        "png, 16 bits": cv2.imencode(".png", deep)[1].tobytes(),
        **odd_pngs(),
        "webp, bytes behind the end": WEBP + b"more",
        "bmp, red first": masked_bmp(108, RED_FIRST),
        "gif, two frames": saved(
            PICTURE.quantize(), "GIF", save_all=True, append_images=[PICTURE.rotate(90).quantize()]
        ),
        **odd_tiffs(),
        "tiff, two pages": saved(PICTURE, "TIFF", save_all=True, append_images=[grey]),
        "tiff, fax": saved(grey.convert("1"), "TIFF", compression="group3"),
        "tiff, cmyk": saved(PICTURE.convert("CMYK"), "TIFF"),
        "tiff, many strips": saved(PICTURE, "TIFF", compression="tiff_lzw", tiffinfo={278: 3}),
    }


@pytest.mark.parametrize("data", good_files().values(), ids=good_files())
def test_unusual_but_good_files_are_decoded(setting: str, data: bytes) -> None:
    expected = PIL.Image.open(io.BytesIO(data))
    found = alone(data)
    assert found.shape == (expected.height, expected.width, 3)
    if expected.mode not in ("CMYK", "I;16"):
        assert np.abs(found - np.asarray(expected.convert("RGB")).astype(int)).max() <= 2


def test_a_few_hundred_damaged_files_get_the_verdict_of_pil_on_every_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "scripts/fuzz_images.py", "--inputs", "300", "--seed", "1"),
            *("--jobs", "1", "--findings", str(tmp_path / "findings")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both refuse" in done.stdout
    assert not (tmp_path / "findings").exists()
