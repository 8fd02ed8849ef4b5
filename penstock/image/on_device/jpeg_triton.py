"""The same as ``jpeg``, as two Triton kernels: blocks to samples, samples to pixels.

Each program of the first unpacks, dequantizes and transforms a few blocks of one picture; each
program of the second makes some pixels of one picture. ``TRITON_INTERPRET=1``, set before this
module is imported, runs them on the CPU. Kernels have no annotations but ``constexpr``: Triton's
compiler reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from penstock.image.coefficients import Coefficients
from penstock.image.on_device import jpeg
from penstock.image.on_device.ragged import Ragged

BLOCKS = 16
"""Blocks of a program, 64 coefficients each."""

PIXELS = 512
"""Pixels of a program."""

# Kernels may use global values only if they are marked as constants.
_F0_298 = tl.constexpr(jpeg.fixed(0.298631336))
_F0_390 = tl.constexpr(-jpeg.fixed(0.390180644))
_F0_541 = tl.constexpr(jpeg.fixed(0.541196100))
_F0_765 = tl.constexpr(jpeg.fixed(0.765366865))
_F0_899 = tl.constexpr(-jpeg.fixed(0.899976223))
_F1_175 = tl.constexpr(jpeg.fixed(1.175875602))
_F1_501 = tl.constexpr(jpeg.fixed(1.501321110))
_F1_847 = tl.constexpr(-jpeg.fixed(1.847759065))
_F1_961 = tl.constexpr(-jpeg.fixed(1.961570560))
_F2_053 = tl.constexpr(jpeg.fixed(2.053119869))
_F2_562 = tl.constexpr(-jpeg.fixed(2.562915447))
_F3_072 = tl.constexpr(jpeg.fixed(3.072711026))

_COLUMNS = tl.constexpr(len(jpeg.COLUMNS))
_PIXEL = tl.constexpr(jpeg.COLUMNS["pixel"])
_HEIGHT = tl.constexpr(jpeg.COLUMNS["height"])
_WIDTH = tl.constexpr(jpeg.COLUMNS["width"])
_TOP = tl.constexpr(jpeg.COLUMNS["top"])
_LEFT = tl.constexpr(jpeg.COLUMNS["left"])
_BLOCK = tl.constexpr(jpeg.COLUMNS["block"])
_BLOCKS = tl.constexpr(jpeg.COLUMNS["blocks"])
_ACROSS = tl.constexpr(jpeg.COLUMNS["across"])
_DOWN = tl.constexpr(jpeg.COLUMNS["down"])
_FINER_ACROSS = tl.constexpr(jpeg.COLUMNS["finer_across"])
_FINER_DOWN = tl.constexpr(jpeg.COLUMNS["finer_down"])
_COMPONENTS = tl.constexpr(jpeg.COLUMNS["components"])
_UNIT_TOP = tl.constexpr(jpeg.COLUMNS["unit_top"])
_UNIT_LEFT = tl.constexpr(jpeg.COLUMNS["unit_left"])
_FULL_HEIGHT = tl.constexpr(jpeg.COLUMNS["full_height"])
_FULL_WIDTH = tl.constexpr(jpeg.COLUMNS["full_width"])


def decode(
    packed: torch.Tensor, coefficients: Coefficients, blocks: int = BLOCKS, count: int = PIXELS
) -> Ragged:
    """Like ``jpeg.decode``, for a device that Triton compiles for.

    ``blocks``: blocks that one program of the first kernel transforms. ``count``: pixels that one
    program of the second kernel converts. Both are powers of two.
    """
    parts = jpeg.split(packed, coefficients)
    host = coefficients.pictures
    device = packed.device
    planes = torch.empty(coefficients.blocks * 64, dtype=torch.uint8, device=device)
    pixels = torch.empty(coefficients.pixel_bytes, dtype=torch.uint8, device=device)
    if len(host):
        most_blocks = int(host["blocks"].max())
        most_pixels = int((host["height"] * host["width"]).max())
        # Pictures are the second axis: CUDA limits it to 65,535 programs, and not the first.
        _blocks_to_samples[(-(-most_blocks // blocks), len(host))](
            parts.table,
            parts.steps,
            parts.records,
            jpeg.data_starts(parts.records),
            parts.data,
            _from_file(device),
            planes,
            count=blocks,
        )
        _samples_to_pixels[(-(-most_pixels // count), len(host))](
            parts.table, planes, pixels, count=count
        )
    return jpeg.regions(pixels, parts.table, coefficients)


@lru_cache
def _from_file(device: torch.device) -> torch.Tensor:
    return torch.tensor(jpeg.FROM_FILE, dtype=torch.int32, device=device)


@triton.jit
def _ones(byte):
    """The number of ones in the bits of a byte."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _wrapped(value):
    """To 16 bits, as the C kernel does: only absurd numbers change."""
    return (value << 16) >> 16


@triton.jit
def _clipped(value):
    return tl.minimum(tl.maximum(value, -32768), 32767)


@triton.jit
def _level(value):
    return tl.minimum(tl.maximum(value, 0), 255).to(tl.uint8)


@triton.jit
def _coefficients(
    data,
    record,
    masks,
    before,
    values,
    wide,
    steps,
    order,
    row: tl.constexpr,
):
    """One row of every block: (blocks, 8) dequantized coefficients.

    ``masks`` and ``before`` have 8 bits for each group: which coefficients are not 0, and how many
    are not in the groups before. ``values``: where the values of each block are.
    """
    column = tl.arange(0, 8)
    at = tl.load(order + row * 8 + column)[None, :].to(tl.int64)
    group = (at >> 3) * 8
    mask = ((masks[:, None] >> group) & 255).to(tl.int32)
    earlier = mask & ((1 << (at & 7).to(tl.int32)) - 1)
    rank = ((before[:, None] >> group) & 255).to(tl.int32) + _ones(earlier)
    present = ((mask >> (at & 7).to(tl.int32)) & 1) == 1
    place = values[:, None] + rank * (1 + wide[:, None])
    two = present & (wide[:, None] == 1)
    low = tl.load(data + place, mask=present, other=0).to(tl.int32)
    high = tl.load(data + place + 1, mask=two, other=0).to(tl.int32)
    value = tl.where(two, _wrapped(low | (high << 8)), (low << 24) >> 24)
    value = tl.where(at == 0, _wrapped(record)[:, None], value)
    step = tl.load(steps[:, None] + row * 8 + column[None, :]).to(tl.int32)
    return _wrapped(value * step)


@triton.jit
def _transform(
    v0,
    v1,
    v2,
    v3,
    v4,
    v5,
    v6,
    v7,
    shift: tl.constexpr,
):
    z = (v2 + v6) * _F0_541
    t2 = z + v6 * _F1_847
    t3 = z + v2 * _F0_765
    half: tl.constexpr = 1 << (shift - 1)
    t0 = (v0 + v4) * 8192 + half
    t1 = (v0 - v4) * 8192 + half
    a0 = t0 + t3
    a3 = t0 - t3
    a1 = t1 + t2
    a2 = t1 - t2
    z1 = (v7 + v1) * _F0_899
    z2 = (v5 + v3) * _F2_562
    z3 = _wrapped(v7 + v3)
    z4 = _wrapped(v5 + v1)
    z5 = (z3 + z4) * _F1_175
    z3 = z3 * _F1_961 + z5
    z4 = z4 * _F0_390 + z5
    b0 = v7 * _F0_298 + z1 + z3
    b1 = v5 * _F2_053 + z2 + z4
    b2 = v3 * _F3_072 + z2 + z3
    b3 = v1 * _F1_501 + z1 + z4
    return (
        (a0 + b3) >> shift,
        (a1 + b2) >> shift,
        (a2 + b1) >> shift,
        (a3 + b0) >> shift,
        (a3 - b0) >> shift,
        (a2 - b1) >> shift,
        (a1 - b2) >> shift,
        (a0 - b3) >> shift,
    )


@triton.jit
def _joined(
    v0,
    v1,
    v2,
    v3,
    v4,
    v5,
    v6,
    v7,
    count: tl.constexpr,
):
    """Eight vectors (count, 8) as (count, 8, 8); the number of the vector is the last axis."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (count, 8, 8))


@triton.jit
def _blocks_to_samples(
    table,
    steps,
    records,
    starts,
    data,
    order,
    planes,
    count: tl.constexpr,
):
    picture = tl.program_id(1)
    numbers = table + picture * _COLUMNS
    first = tl.load(numbers + _BLOCK)
    number = tl.program_id(0) * count + tl.arange(0, count)
    inside = number < tl.load(numbers + _BLOCKS).to(tl.int32)
    across = tl.load(numbers + _ACROSS).to(tl.int32)
    down = tl.load(numbers + _DOWN).to(tl.int32)
    finer_across = tl.load(numbers + _FINER_ACROSS).to(tl.int32)
    finer_down = tl.load(numbers + _FINER_DOWN).to(tl.int32)
    components = tl.load(numbers + _COMPONENTS).to(tl.int32)

    luma = finer_across * finer_down
    in_unit = luma + components - 1
    unit = number // in_unit
    within = number - unit * in_unit
    row = unit // across
    column = unit - row * across
    component = tl.maximum(within - luma + 1, 0)
    is_luma = component == 0
    inner = within // finer_across
    row = tl.where(is_luma, row * finer_down + inner, row)
    column = tl.where(is_luma, column * finer_across + within - inner * finer_across, column)
    stride = tl.where(is_luma, across * finer_across, across) * 8
    before = tl.where(is_luma, 0, across * down * (luma + component - 1))
    start = (first + before) * 64 + row.to(tl.int64) * 8 * stride + column * 8

    record = tl.load(records + first + number, mask=inside, other=0)
    values = tl.load(starts + first + number, mask=inside, other=0)
    groups = (record >> 16) & 255
    masks = tl.full((count,), 0, tl.int64)
    earlier = tl.full((count,), 0, tl.int64)
    found = tl.full((count,), 0, tl.int32)
    group_bytes = tl.full((count,), 0, tl.int32)
    for group in tl.static_range(8):
        there = (groups >> group) & 1
        mask = tl.load(data + values + group_bytes, mask=there == 1, other=0).to(tl.int32)
        masks |= mask.to(tl.int64) << (8 * group)
        earlier |= found.to(tl.int64) << (8 * group)
        found += _ones(mask)
        group_bytes += there
    wide = (((record >> 24) & 255) > group_bytes + found).to(tl.int32)
    values += group_bytes
    factors = steps + (picture * 3 + component) * 64

    v0 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 0)
    v1 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 1)
    v2 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 2)
    v3 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 3)
    v4 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 4)
    v5 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 5)
    v6 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 6)
    v7 = _coefficients(data, record, masks, earlier, values, wide, factors, order, 7)
    v0, v1, v2, v3, v4, v5, v6, v7 = _transform(v0, v1, v2, v3, v4, v5, v6, v7, 11)

    # (block, column, row) becomes (block, row, column), and each column a vector.
    half = _clipped(_joined(v0, v1, v2, v3, v4, v5, v6, v7, count))
    half = tl.reshape(tl.permute(half, (0, 2, 1)), (count, 8, 2, 2, 2))
    even, odd = tl.split(half)
    c04, c26 = tl.split(even)
    c15, c37 = tl.split(odd)
    v0, v4 = tl.split(c04)
    v2, v6 = tl.split(c26)
    v1, v5 = tl.split(c15)
    v3, v7 = tl.split(c37)
    v0, v1, v2, v3, v4, v5, v6, v7 = _transform(v0, v1, v2, v3, v4, v5, v6, v7, 18)
    samples = _level(_joined(v0, v1, v2, v3, v4, v5, v6, v7, count) + 128)

    side = tl.arange(0, 8)
    lines = start[:, None] + side[None, :] * stride[:, None]
    places = lines[:, :, None] + side[None, None, :]
    tl.store(planes + places, samples, mask=inside[:, None, None])


@triton.jit
def _last(full, finer):
    """The last chroma sample along an axis of ``full`` pixels."""
    return (full + finer - 1) // finer - 1


@triton.jit
def _mixed(near, far, finer):
    return tl.where(finer == 2, 3 * near + far, near)


@triton.jit
def _part(value, factor: tl.constexpr):
    return (((2 * value * factor) >> 16) + 1) >> 1


@triton.jit
def _chroma(
    plane,
    near_row,
    far_row,
    near,
    far,
    finer_across,
    finer_down,
    bias,
    shift,
    inside,
):
    tall = inside & (finer_down == 2)
    wide = inside & (finer_across == 2)
    both = tall & wide
    a = tl.load(plane + near_row + near, mask=inside, other=128).to(tl.int32)
    b = tl.load(plane + far_row + near, mask=tall, other=0).to(tl.int32)
    c = tl.load(plane + near_row + far, mask=wide, other=0).to(tl.int32)
    d = tl.load(plane + far_row + far, mask=both, other=0).to(tl.int32)
    own = _mixed(a, b, finer_down)
    other = _mixed(c, d, finer_down)
    return ((_mixed(own, other, finer_across) + bias) >> shift) - 128


@triton.jit
def _samples_to_pixels(table, planes, pixels, count: tl.constexpr):
    numbers = table + tl.program_id(1) * _COLUMNS
    height = tl.load(numbers + _HEIGHT).to(tl.int32)
    width = tl.load(numbers + _WIDTH).to(tl.int32)
    across = tl.load(numbers + _ACROSS).to(tl.int32)
    down = tl.load(numbers + _DOWN).to(tl.int32)
    every = tl.full((count,), 0, tl.int32)
    finer_across = tl.load(numbers + _FINER_ACROSS).to(tl.int32) + every
    finer_down = tl.load(numbers + _FINER_DOWN).to(tl.int32) + every
    unit_top = tl.load(numbers + _UNIT_TOP).to(tl.int32)
    unit_left = tl.load(numbers + _UNIT_LEFT).to(tl.int32)
    number = tl.program_id(0) * count + tl.arange(0, count)
    inside = number < height * width
    y = number // width
    x = number - y * width + tl.load(numbers + _LEFT).to(tl.int32)
    y += tl.load(numbers + _TOP).to(tl.int32)

    begin = planes + tl.load(numbers + _BLOCK) * 64
    line = (y - unit_top * finer_down * 8) * (across * finer_across * 8)
    grey = tl.load(begin + line + x - unit_left * finer_across * 8, mask=inside, other=0)
    grey = grey.to(tl.int32)

    near_y = tl.where(finer_down == 2, y >> 1, y)
    near_x = tl.where(finer_across == 2, x >> 1, x)
    full_height = tl.load(numbers + _FULL_HEIGHT).to(tl.int32)
    full_width = tl.load(numbers + _FULL_WIDTH).to(tl.int32)
    far_y = tl.maximum(tl.minimum(near_y + 2 * (y & 1) - 1, _last(full_height, finer_down)), 0)
    far_x = tl.maximum(tl.minimum(near_x + 2 * (x & 1) - 1, _last(full_width, finer_across)), 0)
    bias = tl.where(finer_across == 2, 1 + (x & 1), 0)
    down_bias = tl.where(finer_across == 2, 8 - (x & 1), 1 + (y & 1))
    bias = tl.where(finer_down == 2, down_bias, bias)
    coloured = inside & (tl.load(numbers + _COMPONENTS) + every == 3)
    # Grey pictures have no chroma: all their differences are 0.
    bias = tl.where(coloured, bias, 0)
    shift = tl.where(coloured, 2 * (finer_across + finer_down - 2), 0)
    near_line = (near_y - unit_top * 8) * (across * 8)
    far_line = (far_y - unit_top * 8) * (across * 8)
    near_x -= unit_left * 8
    far_x -= unit_left * 8
    plane = begin + across.to(tl.int64) * down * finer_across * finer_down * 64
    size = across.to(tl.int64) * down * 64
    blue = _chroma(
        plane, near_line, far_line, near_x, far_x, finer_across, finer_down, bias, shift, coloured
    )
    red = _chroma(
        plane + size, near_line, far_line, near_x, far_x, finer_across, finer_down, bias, shift,
        coloured,
    )  # fmt: skip
    to = pixels + tl.load(numbers + _PIXEL) + number.to(tl.int64) * 3
    tl.store(to, _level(grey + red + _part(red, 26345)), mask=inside)
    green = (-22554 * blue - 46802 * red + 32768) >> 16
    tl.store(to + 1, _level(grey + green), mask=inside)
    tl.store(to + 2, _level(grey + 2 * blue + _part(blue, -14942)), mask=inside)
