"""WAV files built byte by byte, correct and broken ones, and sounds to put into them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def sound(frames: int, channels: int = 1, seed: int = 0) -> NDArray[np.float32]:
    """A few tones and noise, within -1 to 1: (channels, frames)."""
    rng = np.random.default_rng(seed)
    time = np.arange(frames) / 16_000
    tones = sum(0.15 * np.sin(2 * np.pi * rng.uniform(80, 7000) * time) for _ in range(5))
    noisy = tones + rng.normal(0, 0.02, (channels, frames))
    return np.clip(noisy, -0.999, 0.999).astype(np.float32)


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A chunk, padded to an even length. ``size``: the size its header states, if a wrong one."""
    stated = len(content) if size is None else size
    return name + struct.pack("<I", stated) + content + b"\x00" * (len(content) % 2)


def format_chunk(
    tag: int = 1,
    channels: int = 1,
    rate: int = 16_000,
    bits: int = 16,
    block: int | None = None,
    extensible: bool = False,
) -> bytes:
    block = channels * bits // 8 if block is None else block
    plain = struct.pack(
        "<HHIIHH",
        0xFFFE if extensible else tag,
        channels,
        rate,
        rate * block & 0xFFFFFFFF,
        block,
        bits,
    )
    if extensible:
        plain += struct.pack("<HHIH", 22, bits, 0, tag) + GUID_TAIL
    return chunk(b"fmt ", plain)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def numbers(bits: int, count: int, seed: int = 0) -> NDArray[Any]:
    """Random integers of ``bits`` bits, including the smallest and the largest."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    drawn = np.random.default_rng(seed).integers(low, high, count, endpoint=True)
    drawn[:2] = low, high
    return drawn


def packed(values: NDArray[Any], bits: int) -> bytes:
    """Integers as the bytes of a WAV file."""
    if bits == 8:
        return bytes((values + 128).astype(np.uint8))
    if bits == 24:
        return values.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return values.astype(f"<i{bits // 8}").tobytes()


def wav(waveform: NDArray[Any], rate: int = 16_000) -> bytes:
    """A plain 16-bit WAV file of a waveform (channels, frames)."""
    levels = np.round(waveform.T * 32767).astype("<i2")
    return riff(format_chunk(channels=len(waveform), rate=rate), chunk(b"data", levels.tobytes()))
