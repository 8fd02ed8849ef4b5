"""WebP: chunks in a RIFF container; one picture, or the frames of an animation."""

from __future__ import annotations

import struct
from typing import NamedTuple

from penstock.image.formats.damaged import Damaged

_CHUNKS_AT = 12
_FRAME_HEADER = 16
_PIXELS = (b"VP8 ", b"VP8L")
_FRAGMENTS, _ANIMATED = 0x01, 0x02
_KEY_FRAME = b"\x9d\x01\x2a"
_LOSSLESS = 0x2F


class _RiffChunk(NamedTuple):
    name: bytes
    content: memoryview


def size(data: memoryview) -> tuple[int, int]:
    name = bytes(data[_CHUNKS_AT : _CHUNKS_AT + 4])
    content = data[_CHUNKS_AT + 8 :]
    return _canvas(content) if name == b"VP8X" else _picture_size(_RiffChunk(name, content))


def checked(data: memoryview) -> bytes:
    (length,) = struct.unpack_from("<I", data, 4)
    end = 8 + length
    if end > data.nbytes:
        raise Damaged(f"it is cut short: {end:,} bytes are stated, {data.nbytes:,} are there")
    chunks = _chunks(data[_CHUNKS_AT:end])
    if not chunks:
        raise Damaged("it has no pixels")
    if chunks[0].name != b"VP8X":
        if chunks[0].name not in _PIXELS:
            raise Damaged(f"it begins with chunk {chunks[0].name!r}")
        _picture_size(chunks[0])
        kept = 1
    elif chunks[0].content[0] & _ANIMATED:
        _check_frames(chunks, _canvas(chunks[0].content))
        kept = len(chunks)
    else:
        _check_picture(chunks[1:], _canvas(chunks[0].content))
        kept = 1 + next(n for n, chunk in enumerate(chunks) if chunk.name in _PIXELS)
    # libwebp reads pixels that are cut short from the chunks behind them, so these are left out.
    packed = b"WEBP" + b"".join(_packed(chunk) for chunk in chunks[:kept])
    return b"RIFF" + struct.pack("<I", len(packed)) + packed


def _packed(chunk: _RiffChunk) -> bytes:
    length = chunk.content.nbytes
    return struct.pack("<4sI", chunk.name, length) + bytes(chunk.content) + bytes(length % 2)


def _chunks(data: memoryview) -> list[_RiffChunk]:
    chunks = []
    at = 0
    while at < data.nbytes:
        if at + 8 > data.nbytes:
            raise Damaged("it is cut short between two chunks")
        name, length = struct.unpack_from("<4sI", data, at)
        end = at + 8 + length
        if end + length % 2 > data.nbytes:
            raise Damaged(f"chunk {name!r} is longer than the file")
        chunks.append(_RiffChunk(name, data[at + 8 : end]))
        at = end + length % 2
    return chunks


def _canvas(content: memoryview) -> tuple[int, int]:
    if content.nbytes < 10:
        raise Damaged("its header is cut short")
    if content[0] & _FRAGMENTS:
        raise Damaged("its header states that it is in fragments, which do not exist any more")
    return _number(content, 7) + 1, _number(content, 4) + 1


def _number(content: memoryview, at: int) -> int:
    return int.from_bytes(content[at : at + 3], "little")


def _picture_size(chunk: _RiffChunk) -> tuple[int, int]:
    content = chunk.content
    if content.nbytes < 10:
        raise Damaged("its header is cut short")
    if chunk.name == b"VP8 ":
        if content[0] & 1 or bytes(content[3:6]) != _KEY_FRAME:
            raise Damaged("its picture does not begin like one")
        width, height = struct.unpack_from("<HH", content, 6)
        height, width = height & 0x3FFF, width & 0x3FFF
        if _number(content, 0) >> 5 > content.nbytes - 10:
            raise Damaged("its picture is cut short")
    elif chunk.name == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 1)
        if content[0] != _LOSSLESS or bits >> 29:
            raise Damaged("its picture does not begin like one")
        height, width = (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    else:
        raise Damaged(f"it has chunk {chunk.name!r} where its picture should be")
    if not height or not width:
        raise Damaged(f"its header states {width} x {height} pixels")
    return height, width


def _check_picture(chunks: list[_RiffChunk], canvas: tuple[int, int]) -> None:
    pictures = [chunk for chunk in chunks if chunk.name in _PIXELS]
    if len(pictures) != 1:
        raise Damaged(f"it has {len(pictures)} pictures, and is not an animation")
    if _picture_size(pictures[0]) != canvas:
        raise Damaged("its picture has another size than its header states")
    names = [chunk.name for chunk in chunks]
    if b"ALPH" in names and (
        names.count(b"ALPH") > 1 or names.index(b"ALPH") > names.index(pictures[0].name)
    ):
        raise Damaged("its transparency is in a wrong place")
    if b"ANMF" in names or b"ANIM" in names or b"VP8X" in names:
        raise Damaged("it has frames, and is not an animation")


def _check_frames(chunks: list[_RiffChunk], canvas: tuple[int, int]) -> None:
    names = [chunk.name for chunk in chunks]
    frames = [chunk.content for chunk in chunks if chunk.name == b"ANMF"]
    if not frames or b"ANIM" not in names[: names.index(b"ANMF")]:
        raise Damaged("its animation has no frames, or no header")
    if any(name in _PIXELS for name in names):
        raise Damaged("it has a picture outside the frames of its animation")
    for frame in frames:
        if frame.nbytes < _FRAME_HEADER:
            raise Damaged("a frame of its animation is cut short")
        left, top = 2 * _number(frame, 0), 2 * _number(frame, 3)
        width, height = _number(frame, 6) + 1, _number(frame, 9) + 1
        if top + height > canvas[0] or left + width > canvas[1]:
            raise Damaged("a frame of its animation lies outside the picture")
        _check_picture(_chunks(frame[_FRAME_HEADER:]), (height, width))
