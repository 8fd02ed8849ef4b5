"""Device operations as Triton kernels: one launch for a tiny-batch of pictures of different sizes.

``frame`` crops, resizes, flips and normalizes in one launch. ``change`` takes two launches for each
change of an augmentation, whichever changes the pictures have: one that counts levels, if any
picture needs that, and one that moves pixels, blends them, looks up levels and normalizes.

All arithmetic is on integers, except for the source positions of rotations. These are computed with
a rounding after each operation: the launch switches off fused multiply-add.

Importing this module needs Triton. Kernels have no annotations but ``constexpr``: Triton's compiler
reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.image.on_device import changes as kinds
from penstock.image.on_device import torch_ops
from penstock.image.on_device.parameters import Arrays
from penstock.image.on_device.ragged import Ragged
from penstock.image.on_device.torch_ops import RowsOut

_BLOCK = 1024

_TABLE = tl.constexpr(kinds.TABLE)
_ROWS = tl.constexpr(kinds.ROWS)
_COLUMNS = tl.constexpr(kinds.COLUMNS)
_SHIFT = tl.constexpr(kinds.SHIFT)
_ROTATE = tl.constexpr(kinds.ROTATE)
_SATURATE = tl.constexpr(kinds.SATURATE)
_SHARPEN = tl.constexpr(kinds.SHARPEN)
_CONTRAST = tl.constexpr(kinds.CONTRAST)
_EQUALIZE = tl.constexpr(kinds.EQUALIZE)

erase, finish = torch_ops.erase, torch_ops.finish


@triton.jit
def _write(
    out,
    row,
    y,
    x,
    height,
    width,
    red,
    green,
    blue,
    levels,
    mask,
    normal: tl.constexpr,
    channels_first: tl.constexpr,
):
    """Write pixels to a row of the batch, (height, width, 3) or (3, height, width)."""
    if normal:
        red = tl.load(levels + red)
        green = tl.load(levels + 256 + green)
        blue = tl.load(levels + 512 + blue)
    if channels_first:
        plane = height * width
        at = out + row * plane * 3 + y * width + x
    else:
        plane = 1
        at = out + ((row * height + y) * width + x) * 3
    tl.store(at, red.to(out.dtype.element_ty), mask=mask)
    tl.store(at + plane, green.to(out.dtype.element_ty), mask=mask)
    tl.store(at + 2 * plane, blue.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _frame_kernel(
    data,
    table,
    down_first,
    down_weights,
    across_first,
    across_weights,
    taps,
    fill,
    sizes,
    out,
    places,
    levels,
    most_rows,
    most_columns,
    down_taps,
    across_taps,
    to_rows: tl.constexpr,
    normal: tl.constexpr,
    channels_first: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    height = tl.load(sizes + number * 3 + 1).to(tl.int32)
    width = tl.load(sizes + number * 3 + 2).to(tl.int32)
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    mask = pixel < height * width
    pixel = tl.where(mask, pixel, 0)
    y = pixel // width
    x = pixel % width
    source = data + tl.load(table + number * 5)
    last_row = tl.load(table + number * 5 + 1).to(tl.int32) - 1
    stride = tl.load(table + number * 5 + 2).to(tl.int32)
    row_first = tl.load(down_first + number * most_rows + y)
    column_first = tl.load(across_first + number * most_columns + x)
    inside = (row_first >= 0) & (column_first >= 0)
    row_first -= tl.load(table + number * 5 + 3).to(tl.int32)
    column_first -= tl.load(table + number * 5 + 4).to(tl.int32)
    down = tl.load(taps + number * 2)
    across = tl.load(taps + number * 2 + 1)
    # Up to eight taps each product is truncated; with more, only the sum is.
    down_start = tl.where(down <= 8, 64 + down // 2, 16384)
    down_cut = tl.where(down <= 8, 8, 0)
    down_shift = tl.where(down <= 8, 7, 15)
    across_start = tl.where(across <= 8, 64 + across // 2, 16384)
    across_cut = tl.where(across <= 8, 8, 0)
    across_shift = tl.where(across <= 8, 7, 15)
    red = tl.zeros([block], tl.int32) + across_start
    green = tl.zeros([block], tl.int32) + across_start
    blue = tl.zeros([block], tl.int32) + across_start
    for k in range(across):
        column = tl.minimum(tl.maximum(column_first + k, 0), stride - 1)
        beside = tl.load(across_weights + (number * most_columns + x) * across_taps + k)
        r = tl.zeros([block], tl.int32) + down_start
        g = tl.zeros([block], tl.int32) + down_start
        b = tl.zeros([block], tl.int32) + down_start
        for j in range(down):
            row = tl.minimum(tl.maximum(row_first + j, 0), last_row)
            below = tl.load(down_weights + (number * most_rows + y) * down_taps + j)
            at = source + (row.to(tl.int64) * stride + column) * 3
            r += (tl.load(at).to(tl.int32) * below) >> down_cut
            g += (tl.load(at + 1).to(tl.int32) * below) >> down_cut
            b += (tl.load(at + 2).to(tl.int32) * below) >> down_cut
        red += ((r >> down_shift) * beside) >> across_cut
        green += ((g >> down_shift) * beside) >> across_cut
        blue += ((b >> down_shift) * beside) >> across_cut
    red = tl.where(inside, red >> across_shift, tl.load(fill + number * 3))
    green = tl.where(inside, green >> across_shift, tl.load(fill + number * 3 + 1))
    blue = tl.where(inside, blue >> across_shift, tl.load(fill + number * 3 + 2))
    if to_rows:
        row = tl.load(places + number)
        _write(
            out, row, y, x, height, width, red, green, blue, levels, mask, normal, channels_first
        )
    else:
        start = out + tl.load(sizes + number * 3)
        _write(start, 0, y, x, height, width, red, green, blue, levels, mask, False, False)


@triton.jit
def _count_kernel(data, table, kind, counts, steps, step, block: tl.constexpr):
    """Add the number of pixels with each level to ``counts`` (n, 3, 256)."""
    number = tl.program_id(1).to(tl.int64)
    code = tl.load(kind + number * steps + step)
    pixels = (tl.load(table + number * 5 + 1) * tl.load(table + number * 5 + 2)).to(tl.int32)
    first = tl.program_id(0) * block
    if (code >= _CONTRAST) & (code <= _EQUALIZE) & (first < pixels):
        pixel = first + tl.arange(0, block)
        mask = pixel < pixels
        beyond = tl.sum((pixel >= pixels).to(tl.int32), axis=0)
        source = data + tl.load(table + number * 5)
        bins = tl.arange(0, 256)
        for channel in tl.static_range(3):
            level = tl.load(source + pixel.to(tl.int64) * 3 + channel, mask=mask, other=0)
            # Places beyond the picture count as black; take them out again.
            found = tl.histogram(level.to(tl.int32), 256) - tl.where(bins == 0, beyond, 0)
            tl.atomic_add(counts + (number * 3 + channel) * 256 + bins, found)


@triton.jit
def _nearest(value):
    """The nearest integer, half to even: floats from 2**23 up have no fractional bits."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _sharpened(source, y, x, height, width, level, blur):
    """Blend levels with the mean of nine pixels; those at the border stay as they are."""
    inner = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    total = tl.zeros_like(level)
    for down in tl.static_range(-1, 2):
        for across in tl.static_range(-1, 2):
            row = tl.minimum(tl.maximum(y + down, 0), height - 1)
            column = tl.minimum(tl.maximum(x + across, 0), width - 1)
            total += tl.load(source + (row.to(tl.int64) * width + column) * 3).to(tl.int32)
    apart = (((total + 4) * 7282) >> 16) - level
    blended = tl.minimum(tl.maximum(level + ((apart * blur) >> 10), 0), 255)
    return tl.where(inner, blended, level)


@triton.jit
def _saturated(matrix, red, green, blue, lift):
    total = tl.load(matrix) * red + tl.load(matrix + 1) * green + tl.load(matrix + 2) * blue
    return tl.minimum(tl.maximum((total + lift) >> 10, 0), 255)


@triton.jit
def _change_kernel(
    data,
    table,
    kind,
    lookups,
    matrix,
    whole,
    turn,
    runs,
    fill,
    sizes,
    out,
    places,
    levels,
    steps,
    step,
    run_length,
    to_rows: tl.constexpr,
    normal: tl.constexpr,
    channels_first: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    which = number * steps + step
    code = tl.load(kind + which)
    height = tl.load(sizes + number * 3 + 1).to(tl.int32)
    width = tl.load(sizes + number * 3 + 2).to(tl.int32)
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    mask = pixel < height * width
    pixel = tl.where(mask, pixel, 0)
    y = pixel // width
    x = pixel % width
    source = data + tl.load(table + number * 5)
    row = y
    column = x
    if code == _ROWS:
        column = x + tl.load(runs + which * run_length + y)
    elif code == _COLUMNS:
        row = y + tl.load(runs + which * run_length + x)
    elif code == _SHIFT:
        row = y - tl.load(whole + which * 2)
        column = x - tl.load(whole + which * 2 + 1)
    elif code == _ROTATE:
        right = x.to(tl.float32) - (width - 1).to(tl.float32) * 0.5
        below = y.to(tl.float32) - (height - 1).to(tl.float32) * 0.5
        across = right * tl.load(turn + which * 4) + below * tl.load(turn + which * 4 + 2) + 1.0
        down = right * tl.load(turn + which * 4 + 1) + below * tl.load(turn + which * 4 + 3) + 1.0
        column = _nearest(across * (width.to(tl.float32) * 0.5) - 0.5)
        row = _nearest(down * (height.to(tl.float32) * 0.5) - 0.5)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    row = tl.where(inside, row, 0)
    column = tl.where(inside, column, 0)
    at = source + (row.to(tl.int64) * width + column) * 3
    red = tl.where(inside, tl.load(at).to(tl.int32), tl.load(fill + number * 3))
    green = tl.where(inside, tl.load(at + 1).to(tl.int32), tl.load(fill + number * 3 + 1))
    blue = tl.where(inside, tl.load(at + 2).to(tl.int32), tl.load(fill + number * 3 + 2))
    if code == _SATURATE:
        weights = matrix + which * 10
        lift = tl.load(weights + 9)
        r = _saturated(weights, red, green, blue, lift)
        g = _saturated(weights + 3, red, green, blue, lift)
        b = _saturated(weights + 6, red, green, blue, lift)
        red = r
        green = g
        blue = b
    elif code == _SHARPEN:
        blur = tl.load(whole + which * 2)
        red = _sharpened(source, y, x, height, width, red, blur)
        green = _sharpened(source + 1, y, x, height, width, green, blur)
        blue = _sharpened(source + 2, y, x, height, width, blue, blur)
    elif (code == _TABLE) | ((code >= _CONTRAST) & (code <= _EQUALIZE)):
        lookup = lookups + number * 768
        red = tl.load(lookup + red).to(tl.int32)
        green = tl.load(lookup + 256 + green).to(tl.int32)
        blue = tl.load(lookup + 512 + blue).to(tl.int32)
    if to_rows:
        place = tl.load(places + number)
        _write(
            out, place, y, x, height, width, red, green, blue, levels, mask, normal, channels_first
        )
    else:
        start = out + tl.load(sizes + number * 3)
        _write(start, 0, y, x, height, width, red, green, blue, levels, mask, False, False)


def _grid(host: Arrays) -> tuple[int, int]:
    pixels = int((host["out"][:, 1] * host["out"][:, 2]).max())
    # CUDA allows 65,535 programs along all axes but the first.
    return triton.cdiv(pixels, _BLOCK), len(host["out"])


def _targets(host: Arrays, device: Any, final: RowsOut | None) -> tuple[Any, Any, Any, Any]:
    """The tensor to write to, the rows of the pictures in it, the table of normalize; options."""
    if final is None:
        last, height, width = host["out"][-1].tolist()
        data = torch.empty(last + height * width * 3, dtype=torch.uint8, device=device)
        options = {"to_rows": False, "normal": False, "channels_first": False}
        return data, data, data, options
    levels = final.rows if final.table is None else final.table
    return (
        final.rows,
        final.places,
        levels,
        {
            "to_rows": True,
            "normal": final.table is not None,
            "channels_first": final.channels_first,
        },
    )


def frame(
    pictures: Ragged, arrays: Arrays, host: Arrays, final: RowsOut | None = None
) -> Ragged | None:
    """Crop, resize and flip; with ``final``, normalize too and write to the rows of the batch."""
    out, places, levels, options = _targets(host, pictures.data.device, final)
    _frame_kernel[_grid(host)](
        pictures.data,
        pictures.table,
        arrays["down_first"],
        arrays["down_weights"],
        arrays["across_first"],
        arrays["across_weights"],
        arrays["taps"],
        arrays["fill"],
        arrays["out"],
        out,
        places,
        levels,
        host["down_first"].shape[1],
        host["across_first"].shape[1],
        host["down_weights"].shape[2],
        host["across_weights"].shape[2],
        block=_BLOCK,
        enable_fp_fusion=False,
        **options,
    )
    return None if final is not None else Ragged.packed(out, host["out"][:, 1:])


def change(
    pictures: Ragged, arrays: Arrays, host: Arrays, final: RowsOut | None = None
) -> Ragged | None:
    """Apply the changes of all pictures, one launch for each in turn."""
    kind = host["kind"]
    steps = kind.shape[1]
    if (kind == kinds.HUE).any() or not steps:
        return torch_ops.change(pictures, arrays, host, final)
    for step in range(steps):
        lookups = _lookups(pictures, arrays, host, step)
        target = final if step == steps - 1 else None
        out, places, levels, options = _targets(host, pictures.data.device, target)
        _change_kernel[_grid(host)](
            pictures.data,
            pictures.table,
            arrays["kind"],
            lookups,
            arrays["matrix"],
            arrays["whole"],
            arrays["turn"],
            arrays["runs"],
            arrays["fill"],
            arrays["out"],
            out,
            places,
            levels,
            steps,
            step,
            host["runs"].shape[2],
            block=_BLOCK,
            enable_fp_fusion=False,
            **options,
        )
        if target is not None:
            return None
        pictures = Ragged.packed(out, host["out"][:, 1:])
    return pictures


def _lookups(pictures: Ragged, arrays: Arrays, host: Arrays, step: int) -> torch.Tensor:
    """The tables of levels (n, 3, 256) of one change."""
    given = arrays["table"][:, step, None].expand(-1, 3, -1)
    kind = host["kind"][:, step]
    if not ((kind >= kinds.CONTRAST) & (kind <= kinds.EQUALIZE)).any():
        return given.contiguous()
    count = len(kind)
    counts = torch.zeros((count, 3, 256), dtype=torch.int32, device=pictures.data.device)
    _count_kernel[_grid(host)](
        pictures.data,
        pictures.table,
        arrays["kind"],
        counts,
        host["kind"].shape[1],
        step,
        block=_BLOCK,
        enable_fp_fusion=False,
    )
    codes = arrays["kind"][:, step]
    made = torch_ops.counted_tables(
        codes, counts.long(), arrays["slope"][:, step], arrays["lean"][:, step]
    )
    return torch.where((codes == kinds.TABLE)[:, None, None], given, made).contiguous()
