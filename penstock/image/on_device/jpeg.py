"""From packed coefficients of JPEGs to pixels, in torch, on any device: the bits of the C kernel.

Two stages, each over a whole tiny-batch: all blocks at once (unpack, dequantize, transform), then
all pixels at once (upsample chroma, convert to RGB). All arithmetic is on integers of 32 bits.
``jpeg_triton`` does the same in two kernels, and is chosen on CUDA devices.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from penstock.image.coefficients import PICTURE, Coefficients
from penstock.image.on_device.ragged import Ragged

COLUMNS = {name: number for number, name in enumerate(PICTURE.names or ())}
"""The column of each number in the table of pictures."""


def _diagonally(place: int) -> tuple[int, int]:
    """Sorts places of a block, row by row, into the order of the file: in zigzag."""
    row, column = divmod(place, 8)
    return row + column, row if (row + column) % 2 else column


FILE_ORDER = sorted(range(64), key=_diagonally)
"""The place in the block, row by row, of each coefficient in the order of the file."""

FROM_FILE = [FILE_ORDER.index(place) for place in range(64)]
"""For each place in the block, its position in the order of the file."""


def fixed(value: float) -> int:
    """A factor of the inverse transform: 13 fractional bits."""
    return int(value * 8192 + 0.5)


def decode(
    packed: torch.Tensor, coefficients: Coefficients, *, backend: str | None = None
) -> Ragged:
    """Decode ``coefficients.packed``, copied to a device, to RGB pictures there.

    Picture ``i`` of the result is the box of file ``coefficients.numbers[i]``. The work runs on the
    current stream. Nothing waits for the device: the host knows all sizes.

    ``backend``: ``"triton"`` (``jpeg_triton``), ``"torch"``, or ``None``: Triton on CUDA if it is
    installed.

    >>> import cv2, numpy as np
    >>> from penstock.image.coefficients import read_coefficients
    >>> _, file = cv2.imencode(".jpg", np.full((32, 48, 3), 90, np.uint8))
    >>> read = read_coefficients([file.tobytes()], [(8, 8, 16, 20)])
    >>> decode(torch.from_numpy(read.packed), read).picture(0).shape
    torch.Size([16, 20, 3])
    """
    if backend is None:
        found = packed.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        backend = "triton" if found else "torch"
    if backend == "triton":
        from penstock.image.on_device import jpeg_triton

        return jpeg_triton.decode(packed, coefficients)
    parts = split(packed, coefficients)
    planes = _planes(parts, coefficients.blocks)
    pixels = _pixels(planes, parts.table, coefficients.pixel_bytes // 3)
    return regions(pixels, parts.table, coefficients)


class PackedParts(NamedTuple):
    """The parts of a packed buffer on a device.

    ``table``: (pictures, columns), int64. ``steps``: (3 * pictures, 64), int16. ``records``: int32,
    one for each block. ``data``: uint8.
    """

    table: torch.Tensor
    steps: torch.Tensor
    records: torch.Tensor
    data: torch.Tensor


def split(packed: torch.Tensor, coefficients: Coefficients) -> PackedParts:
    """The parts of a copy of ``coefficients.packed``."""
    table, steps, records, data = coefficients.parts
    return PackedParts(
        packed[table].view(torch.int64).view(-1, len(COLUMNS)),
        packed[steps].view(torch.int16).view(-1, 64),
        packed[records].view(torch.int32),
        packed[data],
    )


def regions(pixels: torch.Tensor, table: torch.Tensor, coefficients: Coefficients) -> Ragged:
    """The result: ``pixels`` of all boxes, one after the other."""
    host = coefficients.pictures.view(np.int64).reshape(len(table), len(COLUMNS))
    # The packed buffer may be used again: nothing in the result refers to it.
    return Ragged(pixels, host[:, :5].copy(), table[:, :5].clone())


def data_starts(records: torch.Tensor) -> torch.Tensor:
    """Where the data of each block begins (int64)."""
    lengths = (records >> 24) & 255
    return lengths.cumsum(0, dtype=torch.int64) - lengths


def _repeated(
    table: torch.Tensor, times: torch.Tensor, total: int, *names: str
) -> tuple[torch.Tensor, ...]:
    """Columns of the table, where the number of picture ``i`` stands ``times[i]`` times."""
    numbers = torch.stack([table[:, COLUMNS[name]] for name in names], dim=1).to(torch.int32)
    return tuple(numbers.repeat_interleave(times, dim=0, output_size=total).unbind(1))


# ------------------------------------------------------------------------------ blocks to samples


def _planes(parts: PackedParts, total: int) -> torch.Tensor:
    """The samples of all planes, 64 bytes for each block.

    The planes of a picture begin at 64 times its first block: luma, then both of chroma, each row
    by row, with the padding of the last blocks.
    """
    table, steps, records, data = parts
    device = table.device
    first, across, down, finer_across, finer_down, components = _repeated(
        table,
        table[:, COLUMNS["blocks"]],
        total,
        *("block", "across", "down", "finer_across", "finer_down", "components"),
    )
    pictures = torch.arange(len(table), device=device)
    picture = pictures.repeat_interleave(table[:, COLUMNS["blocks"]], output_size=total)

    # A unit has the blocks of luma, row by row, and one of either chroma.
    luma = finer_across * finer_down
    number = torch.arange(total, dtype=torch.int32, device=device) - first
    unit, within = _divided(number, luma + components - 1)
    row, column = _divided(unit, across)
    component = (within - luma + 1).clamp(min=0)
    inner_row, inner_column = _divided(within, finer_across)
    is_luma = component == 0
    row = torch.where(is_luma, row * finer_down + inner_row, row)
    column = torch.where(is_luma, column * finer_across + inner_column, column)
    stride = torch.where(is_luma, across * finer_across, across) * 8
    before = torch.where(is_luma, 0, across * down * (luma + component - 1))
    start = (first + before).long() * 64 + row.long() * 8 * stride + column * 8

    quantized = _unpack(records, data)[:, _from_file(device)]
    factors = steps[picture * 3 + component]
    # The kernel multiplies in 16 bits; the product of absurd numbers wraps.
    samples = _transform_blocks((quantized.to(torch.int16) * factors).to(torch.int32))

    lines = torch.arange(8, device=device)
    places = (start[:, None] + lines * stride[:, None])[:, :, None] + lines
    planes = torch.empty(total * 64, dtype=torch.uint8, device=device)
    planes[places.view(-1)] = samples.view(-1)
    return planes


@lru_cache
def _from_file(device: torch.device) -> torch.Tensor:
    return torch.tensor(FROM_FILE, device=device)


def _divided(number: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quotient = torch.div(number, by, rounding_mode="floor")
    return quotient, number - quotient * by


def _unpack(records: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The 64 coefficients of each block, in the order of the file. See native/jpeg/packed.h."""
    bits = torch.arange(8, dtype=torch.int32, device=records.device)
    lengths = (records >> 24) & 255
    start = data_starts(records)
    groups = (records[:, None] >> (16 + bits)) & 1
    earlier = groups.cumsum(1) - groups
    masks = data[start[:, None] + earlier].to(torch.int32) * groups
    present = ((masks[:, :, None] >> bits) & 1).view(-1, 64)
    group_bytes = groups.sum(1)
    wide = lengths > group_bytes + present.sum(1)
    ranks = present.cumsum(1) - present
    places = (start + group_bytes)[:, None] + ranks * (1 + wide.long())[:, None]
    # Places of coefficients that are 0 may lie one beyond the data of the block.
    low, high = data[places], data[places + wide.long()[:, None]]
    narrow = low.view(torch.int8).to(torch.int32)
    both = low.to(torch.int32) | (high.view(torch.int8).to(torch.int32) << 8)
    values = torch.where(wide[:, None], both, narrow) * present
    values[:, 0] = records.to(torch.int16)
    return values


def _transform_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse transform of blocks (n, 64): samples (n, 8, 8)."""
    rows = blocks.view(-1, 8, 8)
    half = torch.stack(_transform(list(rows.unbind(1)), 11), dim=1).clamp(-32768, 32767)
    whole = torch.stack(_transform(list(half.unbind(2)), 18), dim=2)
    return (whole + 128).clamp(0, 255).to(torch.uint8)


def _transform(v: list[torch.Tensor], shift: int) -> list[torch.Tensor]:
    """One pass over vectors of eight: ``transform`` in native/jpeg/transform.h."""
    z = (v[2] + v[6]) * fixed(0.541196100)
    t2, t3 = z - v[6] * fixed(1.847759065), z + v[2] * fixed(0.765366865)
    half = 1 << (shift - 1)
    t0, t1 = (v[0] + v[4]) * 8192 + half, (v[0] - v[4]) * 8192 + half
    a0, a3, a1, a2 = t0 + t3, t0 - t3, t1 + t2, t1 - t2

    z1, z2 = (v[7] + v[1]) * -fixed(0.899976223), (v[5] + v[3]) * -fixed(2.562915447)
    z3, z4 = _wrapped(v[7] + v[3]), _wrapped(v[5] + v[1])
    z5 = (z3 + z4) * fixed(1.175875602)
    z3, z4 = z3 * -fixed(1.961570560) + z5, z4 * -fixed(0.390180644) + z5
    t0 = v[7] * fixed(0.298631336) + z1 + z3
    t1 = v[5] * fixed(2.053119869) + z2 + z4
    t2 = v[3] * fixed(3.072711026) + z2 + z3
    t3 = v[1] * fixed(1.501321110) + z1 + z4
    sums = (a0 + t3, a1 + t2, a2 + t1, a3 + t0, a3 - t0, a2 - t1, a1 - t2, a0 - t3)
    return [one >> shift for one in sums]


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    """To 16 bits, as the kernel adds these: only the sums of absurd numbers change."""
    return values.to(torch.int16).to(torch.int32)


# ------------------------------------------------------------------------------- samples to pixels


def _pixels(planes: torch.Tensor, table: torch.Tensor, total: int) -> torch.Tensor:
    """RGB of all boxes from the planes; ``total`` pixels, one byte for each channel."""
    device = table.device
    areas = table[:, COLUMNS["height"]] * table[:, COLUMNS["width"]]
    first, across, down, finer_across, finer_down, components, pixel = _repeated(
        table,
        areas,
        total,
        *("block", "across", "down", "finer_across", "finer_down", "components", "pixel"),
    )
    unit_top, unit_left, top, left, width, full_height, full_width = _repeated(
        table,
        areas,
        total,
        *("unit_top", "unit_left", "top", "left", "width", "full_height", "full_width"),
    )
    number = torch.arange(total, dtype=torch.int32, device=device)
    y, x = _divided(number - torch.div(pixel, 3, rounding_mode="floor"), width)
    y, x = y + top, x + left

    start = first.long() * 64
    stride = across * finer_across * 8
    grey = planes[
        start + (y - unit_top * finer_down * 8) * stride + (x - unit_left * finer_across * 8)
    ].to(torch.int32)

    # Chroma: three parts the nearest sample and one part its neighbour, in either direction.
    tall, wide = finer_down == 2, finer_across == 2
    near_y, far_y = _neighbours(y, tall, full_height)
    near_x, far_x = _neighbours(x, wide, full_width)
    near_y, far_y = near_y - unit_top * 8, far_y - unit_top * 8
    near_x, far_x = near_x - unit_left * 8, far_x - unit_left * 8
    bias = torch.where(tall, 1 + (y & 1), torch.where(wide, 1 + (x & 1), 0))
    bias = torch.where(tall & wide, 8 - (x & 1), bias)
    shift = 2 * (tall.to(torch.int32) + wide.to(torch.int32))
    coloured = components == 3
    stride = across * 8
    differences = []
    for plane in range(2):
        begin = start + (across * down).long() * (finer_across * finer_down + plane) * 64
        # Grey pictures have no such planes.
        begin = torch.where(coloured, begin, 0)
        near_row, far_row = begin + near_y * stride, begin + far_y * stride

        def mixed(column: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            places = [torch.where(coloured, row + column, 0) for row in rows]
            near, far = (planes[place].to(torch.int32) for place in places)
            return torch.where(tall, 3 * near + far, near)

        rows = near_row, far_row
        near, far = mixed(near_x, rows), mixed(far_x, rows)
        level = (torch.where(wide, 3 * near + far, near) + bias) >> shift
        differences.append(torch.where(coloured, level - 128, 0))
    blue, red = differences
    channels = (
        grey + red + _part(red, 26345),
        grey + ((-22554 * blue - 46802 * red + 32768) >> 16),
        grey + 2 * blue + _part(blue, -14942),
    )
    return torch.stack(channels, dim=1).clamp(0, 255).to(torch.uint8).view(-1)


def _neighbours(
    at: torch.Tensor, halved: torch.Tensor, full: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chroma sample of each pixel along one axis, and the neighbour on the pixel's side."""
    last = torch.where(halved, (full - 1) >> 1, full - 1)
    near = torch.where(halved, at >> 1, at)
    far = torch.where(halved, near + 2 * (at & 1) - 1, near)
    return near, torch.minimum(far.clamp(min=0), last)


def _part(value: torch.Tensor, factor: int) -> torch.Tensor:
    """``value * factor / 65536``, rounded as in native/jpeg/planes.h."""
    return (((2 * value * factor) >> 16) + 1) >> 1
