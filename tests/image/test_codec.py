"""Decoding files of every kind, and refusing the broken ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest

from penstock import native
from penstock.errors import MissingExtraError, PipelineError, SourceError
from penstock.image import decode
from penstock.operation import ArraySpec, BytesSpec


def encode(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def by_pil(data: bytes, mode: str = "RGB") -> np.ndarray[Any, Any]:
    pixels = np.asarray(PIL.Image.open(io.BytesIO(data)).convert(mode)).astype(int)
    return pixels.reshape(*pixels.shape[:2], -1)


@pytest.fixture
def picture(photo: Any) -> PIL.Image.Image:
    return PIL.Image.fromarray(photo)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_gives_the_pixels_that_pil_gives(picture: Any, options: dict[str, Any]) -> None:
    data = encode(picture, "JPEG", quality=90, **options)
    found = decode().apply(data, None)
    assert found.shape == (240, 320, 3)
    assert found.dtype == np.uint8
    assert np.abs(found - by_pil(data)).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_other_formats_give_rgb_without_loss(picture: Any, kind: str) -> None:
    data = encode(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(decode().apply(data, None), np.asarray(picture))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1"])
def test_every_kind_of_png_becomes_three_channels(picture: Any, mode: str) -> None:
    data = encode(picture.convert(mode), "PNG")
    np.testing.assert_array_equal(decode().apply(data, None), by_pil(data))


def test_transparency_is_dropped_and_not_blended(picture: Any) -> None:
    picture.putalpha(0)
    np.testing.assert_array_equal(
        decode().apply(encode(picture, "PNG"), None), np.asarray(picture)[..., :3]
    )


def test_sixteen_bits_are_cut_to_eight(photo: Any) -> None:
    deep = PIL.Image.fromarray(photo[..., 0].astype(np.uint16) * 257)
    found = decode().apply(encode(deep, "PNG"), None)
    np.testing.assert_array_equal(found, np.repeat(photo[..., :1], 3, axis=2))


def test_a_grey_jpeg_is_repeated_in_three_channels(picture: Any) -> None:
    data = encode(picture.convert("L"), "JPEG", quality=95)
    found = decode().apply(data, None)
    assert found.shape == (240, 320, 3)
    assert np.abs(found - by_pil(data)).max() <= 2


def test_a_cmyk_jpeg_becomes_rgb(picture: Any) -> None:
    data = encode(picture.convert("CMYK"), "JPEG", quality=95)
    assert np.abs(decode().apply(data, None) - by_pil(data)).max() <= 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_mode_gray_gives_one_channel(picture: Any, kind: str) -> None:
    data = encode(picture, kind)
    found = decode(mode="gray").apply(data, None)
    assert found.shape == (240, 320, 1)
    # The grey of a JPEG differs from that of its RGB if its colours are outside RGB.
    assert np.abs(found - by_pil(data, "L")).mean() <= 0.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_exif_orientation_is_not_followed(picture: Any, kind: str) -> None:
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    assert decode().apply(encode(picture, kind, exif=exif), None).shape == (240, 320, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_any_container_of_bytes_is_accepted(picture: Any, kind: str) -> None:
    data = encode(picture, kind)
    expected = decode().apply(data, None)
    spread = np.zeros(2 * len(data), np.uint8)
    spread[::2] = np.frombuffer(data, np.uint8)
    for given in (
        bytearray(data),
        memoryview(data),
        memoryview(spread.tobytes())[::2],
        memoryview(data).cast("b"),
        np.frombuffer(data, np.uint8),
        spread[::2],
    ):
        np.testing.assert_array_equal(decode().apply(given, None), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
def test_a_file_cut_short_is_refused(picture: Any, kind: str, part: float) -> None:
    data = encode(picture, kind)
    cut = data[: int(len(data) * part)]
    with pytest.raises(SourceError, match=f"{len(cut):,} bytes that begin") as caught:
        decode().apply(cut, None)
    assert repr(cut[:8]) in str(caught.value)
    assert "or leave it out." in str(caught.value)
    if kind == "JPEG" and part >= 0.5:
        # From the strict decoder. Other decoders fill the missing part with grey.
        assert "remature end" in str(caught.value)


def test_a_damaged_png_is_refused(picture: Any) -> None:
    data = encode(picture, "PNG")
    with pytest.raises(SourceError, match="begin"):
        decode().apply(data[:200] + bytes(40) + data[240:], None)


def test_stray_bytes_in_a_jpeg_are_ignored(picture: Any) -> None:
    data = encode(picture, "JPEG")
    stray = data[:-2] + bytes(range(1, 60)) + data[-2:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        native.load_simplejpeg().decode_jpeg(stray)
    np.testing.assert_array_equal(decode().apply(stray, None), decode().apply(data, None))
    np.testing.assert_array_equal(decode().apply(data + b"more", None), decode().apply(data, None))


def test_what_simplejpeg_refuses_goes_to_no_other_decoder(
    picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("an unknown error of simplejpeg")

    monkeypatch.setattr(native.load_simplejpeg(), "decode_jpeg", refuse)
    with pytest.raises(SourceError, match="an unknown error of simplejpeg"):
        decode().apply(encode(picture, "JPEG"), None)


@pytest.mark.parametrize("given", [b"", bytearray(), np.zeros(0, np.uint8)])
def test_no_bytes_are_refused(given: Any) -> None:
    with pytest.raises(SourceError, match="0 bytes: the file is empty"):
        decode().apply(given, None)


@pytest.mark.parametrize("given", [b"<html>404</html>", b"\xff\xd8\xff", b"\x00"])
def test_files_that_are_not_images_are_refused(given: bytes) -> None:
    with pytest.raises(SourceError, match=f"{len(given)} bytes that begin"):
        decode().apply(given, None)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("photo.jpg", "got str"),
        (None, "got NoneType"),
        (np.zeros((4, 4, 3), np.uint8), r"shape \(4, 4, 3\)"),
        (np.zeros(9, np.float32), "float32"),
    ],
)
def test_values_that_are_not_bytes_are_refused_with_their_type(given: Any, found: str) -> None:
    with pytest.raises(SourceError, match=found):
        decode().apply(given, None)


def test_the_output_is_known_but_for_the_size() -> None:
    assert decode().output(BytesSpec()) == ArraySpec.of((None, None, 3), np.uint8)
    assert decode().output(None) == ArraySpec.of((None, None, 3), np.uint8)
    assert decode("gray").output(ArraySpec.of((None,), np.uint8)) == ArraySpec.of(
        (None, None, 1), np.uint8
    )


def test_decoding_twice_is_refused_when_built() -> None:
    with pytest.raises(PipelineError, match="decoded already, leave it out"):
        decode().output(decode().output(BytesSpec()))


def test_a_missing_library_names_its_install_command(
    picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(picture, "JPEG")
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    native.load_simplejpeg.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r'pip install "penstock\[image\]"'):
            decode().apply(data, None)
    finally:
        native.load_simplejpeg.cache_clear()


def test_opencv_uses_only_the_calling_thread() -> None:
    assert native.load_cv2().getNumThreads() == 1
