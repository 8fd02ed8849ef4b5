"""Device operations in plain torch: any device, whole tiny-batches, the compiled kernel's bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.image.on_device import changes as kinds
from penstock.image.on_device.framing import FEW_TAPS, ONE
from penstock.image.on_device.parameters import Arrays
from penstock.image.on_device.ragged import Ragged

_I32 = torch.int32


class RowsOut(NamedTuple):
    """Where the last stage writes: ``rows[places]``, by the table of normalize if there is one."""

    rows: torch.Tensor
    places: torch.Tensor
    table: torch.Tensor | None
    channels_first: bool


def frame(
    pictures: Ragged, arrays: Arrays, host: Arrays, final: RowsOut | None = None
) -> Ragged | None:
    """Crop, resize and flip: rows first, then columns, as the kernel does."""
    out = host["out"]
    taps = arrays["taps"].to(_I32)
    rows = arrays["down_first"].long() - pictures.tops[:, None]
    columns = arrays["across_first"].long() - pictures.lefts[:, None]
    inside = (arrays["down_first"] >= 0)[:, :, None] & (arrays["across_first"] >= 0)[:, None, :]
    last_row, last_column = pictures.heights[:, None] - 1, pictures.widths[:, None] - 1
    # The columns of the pictures that any output pixel needs; narrower pictures repeat their last.
    width = int(pictures.host[:, 2].max())
    every = torch.arange(width, device=pictures.data.device)[None].minimum(last_column)
    start = pictures.offsets[:, None, None] + 3 * every[:, None, :]

    # (n, height out, width in, 3), then (n, height out, width out, 3)
    weights = arrays["down_weights"]
    sums = _start_of_sums(taps[:, 0])
    few = (taps[:, 0] <= FEW_TAPS)[:, None, None]
    channels = torch.arange(3, device=pictures.data.device)
    total: Any = None
    for k in range(weights.shape[2]):
        row = (rows + k).clamp(min=0).minimum(last_row)
        at = start + (3 * pictures.widths[:, None] * row)[:, :, None]
        level = pictures.data[at[..., None] + channels].to(_I32)
        total = _add(total, level, weights[:, :, k, None, None], few[..., None])
    blended = _level(total + sums[:, None, None, None], few[..., None])

    weights = arrays["across_weights"]
    sums = _start_of_sums(taps[:, 1])
    few = (taps[:, 1] <= FEW_TAPS)[:, None, None, None]
    height = blended.shape[1]
    total = None
    for k in range(weights.shape[2]):
        column = (columns + k).clamp(min=0).minimum(last_column)
        at = column[:, None, :, None].expand(-1, height, -1, 3)
        total = _add(total, blended.gather(2, at), weights[:, None, :, k, None], few)
    images = _level(total + sums[:, None, None, None], few)
    fill = arrays["fill"][:, None, None, :]
    images = torch.where(inside[..., None], images, fill).to(torch.uint8)
    return finish(_cut(images, out), final)


def _start_of_sums(taps: torch.Tensor) -> torch.Tensor:
    """``HALF`` of the kernel: half a unit, and half of what truncating each product loses."""
    return torch.where(taps <= FEW_TAPS, 64 + taps // 2, ONE // 2).to(_I32)


def _add(total: Any, levels: torch.Tensor, weights: torch.Tensor, few: torch.Tensor) -> Any:
    product = levels * weights
    product = torch.where(few, product >> 8, product)
    return product if total is None else total + product


def _level(sums: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    return torch.where(few, sums >> 7, sums >> 15)


def _cut(images: torch.Tensor, out: Any) -> Ragged:
    """Pictures of the sizes in ``out``: the upper left corners of ``images``, packed."""
    sizes = out[:, 1:]
    if (sizes == images.shape[1:3]).all():
        return Ragged.stacked(images)
    parts = [
        image[:height, :width].reshape(-1)
        for image, (height, width) in zip(images, sizes.tolist(), strict=True)
    ]
    return Ragged.packed(torch.cat(parts), sizes)


def change(
    pictures: Ragged, arrays: Arrays, host: Arrays, final: RowsOut | None = None
) -> Ragged | None:
    """Apply the changes of all pictures: those of one kind together, if pictures have one size."""
    images = pictures.images()
    if images is not None:
        return finish(Ragged.stacked(_change_all(images, arrays, host)), final)
    parts = []
    for number in range(len(pictures)):
        one = slice(number, number + 1)
        some, its = ({name: part[one] for name, part in each.items()} for each in (arrays, host))
        parts.append(_change_all(pictures.picture(number)[None], some, its).reshape(-1))
    return finish(Ragged.packed(torch.cat(parts), pictures.host[:, 1:3]), final)


def _change_all(images: torch.Tensor, arrays: Arrays, host: Arrays) -> torch.Tensor:
    kind = host["kind"]
    for step in range(kind.shape[1]):
        present = sorted(set(kind[:, step].tolist()) - {kinds.NOTHING})
        if not present:
            continue
        after = images.clone()
        for one in present:
            chosen = torch.from_numpy((kind[:, step] == one).nonzero()[0]).to(images.device)
            some = images[chosen]
            numbers = {name: part[chosen] for name, part in arrays.items()}
            after[chosen] = _CHANGES[one](some, numbers, step).to(torch.uint8)
        images = after
    return images


def _look_up(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Levels by tables (n, 3, 256)."""
    count = len(images)
    first = torch.arange(count * 3, device=images.device).view(count, 1, 1, 3) * 256
    return tables.reshape(-1)[images.long() + first]


def _by_table(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    return _look_up(images, numbers["table"][:, step, None].expand(-1, 3, -1))


def count_levels(images: torch.Tensor) -> torch.Tensor:
    """The number of pixels with each level: int64 (n, 3, 256)."""
    count = len(images)
    first = torch.arange(count * 3, device=images.device).view(count, 1, 1, 3) * 256
    levels = (images.long() + first).reshape(-1)
    return torch.bincount(levels, minlength=count * 768).view(count, 3, 256)


def counted_tables(
    kind: torch.Tensor, counts: torch.Tensor, slope: torch.Tensor, lean: torch.Tensor
) -> torch.Tensor:
    """The tables (n, 3, 256) of changes that depend on the number of pixels with each level."""
    tables = torch.where(
        (kind == kinds.EQUALIZE)[:, None, None], _equalizing(counts), _stretching(counts)
    )
    steep = _steepening(counts, slope, lean)[:, None].expand(-1, 3, -1)
    return torch.where((kind == kinds.CONTRAST)[:, None, None], steep, tables).to(torch.uint8)


def _by_counts(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    tables = counted_tables(
        numbers["kind"][:, step],
        count_levels(images),
        numbers["slope"][:, step],
        numbers["lean"][:, step],
    )
    return _look_up(images, tables)


def _levels(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(256, device=like.device)


def _steepening(counts: torch.Tensor, slope: torch.Tensor, lean: torch.Tensor) -> torch.Tensor:
    # Each operation on doubles is a call of its own, so that no compiler fuses two of them.
    sums = (counts * _levels(counts)).sum(dim=2).double()
    grey = sums[:, 0] * 0.2989
    grey = grey + sums[:, 1] * 0.587
    grey = grey + sums[:, 2] * 0.114
    middle = (grey / counts[:, 0].sum(dim=1).double() - 0.5).clamp(min=0.0)
    start = (middle * lean * 1024).round().long()
    values = (_levels(counts) * slope[:, None] + start[:, None]) >> 10
    return values.clamp(0, 255)


def _stretching(counts: torch.Tensor) -> torch.Tensor:
    levels = _levels(counts)
    present = counts > 0
    low = torch.where(present, levels, 256).amin(dim=2, keepdim=True)
    high = torch.where(present, levels, -1).amax(dim=2, keepdim=True)
    # The nearest float to 1 / 255, which is the kernel's constant.
    part = torch.tensor(1.0 / 255, dtype=torch.float32, device=counts.device)
    step = (high - low).float() * part
    stretched = ((levels - low).float() / step).nan_to_num(0.0).clamp(0.0, 255.0).long()
    return torch.where(low == high, levels, stretched)


def _equalizing(counts: torch.Tensor) -> torch.Tensor:
    levels = _levels(counts)
    upto = counts.cumsum(dim=2)
    last = torch.where(counts > 0, levels, 0).amax(dim=2, keepdim=True)
    step = (upto[..., -1:] - counts.gather(2, last)) // 255
    values = (upto - counts + step // 2) // step.clamp(min=1)
    return torch.where(step == 0, levels, values.clamp(max=255))


def _gather(
    images: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, fill: torch.Tensor
) -> torch.Tensor:
    """Pixels from these places (n, height, width), and ``fill`` (n, 3) for those outside."""
    count, height, width, _ = images.shape
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    number = torch.arange(count, device=images.device)[:, None, None]
    moved = images[number, rows.clamp(0, height - 1), columns.clamp(0, width - 1)]
    return torch.where(inside[..., None], moved.to(_I32), fill[:, None, None, :])


def _grid(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, height, width, _ = images.shape
    rows = torch.arange(height, device=images.device)[None, :, None]
    return rows, torch.arange(width, device=images.device)[None, None, :]


def _slide_rows(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    rows, columns = _grid(images)
    by = numbers["runs"][:, step, : images.shape[1], None].long()
    columns = columns + by
    return _gather(images, rows.expand_as(columns), columns, numbers["fill"])


def _slide_columns(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    rows, columns = _grid(images)
    by = numbers["runs"][:, step, None, : images.shape[2]].long()
    rows = rows + by
    return _gather(images, rows, columns.expand_as(rows), numbers["fill"])


def _shift(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    rows, columns = _grid(images)
    by = numbers["whole"][:, step, :, None, None].long()
    rows, columns = torch.broadcast_tensors(rows - by[:, 0], columns - by[:, 1])
    return _gather(images, rows, columns, numbers["fill"])


def _rotate(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    """``find_sources`` of the kernel: each operation on floats rounds."""
    _, height, width, _ = images.shape
    rows, columns = (axis.float() for axis in _grid(images))
    turn = numbers["turn"][:, step, :, None, None]
    right, below = columns - (width - 1) * 0.5, rows - (height - 1) * 0.5
    across = right * turn[:, 0] + below * turn[:, 2] + 1.0
    down = right * turn[:, 1] + below * turn[:, 3] + 1.0
    across = (across * (width * 0.5) - 0.5).round().long()
    down = (down * (height * 0.5) - 0.5).round().long()
    return _gather(images, down, across, numbers["fill"])


def _saturate(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    matrix = numbers["matrix"][:, step]
    levels = images.to(_I32)
    weights = matrix[:, :9].view(-1, 1, 1, 3, 3)
    sums = (levels[..., None, :] * weights).sum(dim=4, dtype=_I32)
    return ((sums + matrix[:, 9, None, None, None]) >> 10).clamp(0, 255)


def _sharpen(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    levels = images.to(_I32)
    rows = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    nine = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    inner = levels[:, 1:-1, 1:-1]
    apart = ((nine + 4) * 7282 >> 16) - inner
    blur = numbers["whole"][:, step, 0, None, None, None]
    levels[:, 1:-1, 1:-1] = (inner + (apart * blur >> 10)).clamp(0, 255)
    return levels


def _hue(images: torch.Tensor, numbers: Arrays, step: int) -> torch.Tensor:
    """Within one grey level of OpenCV's conversion to HSV and back."""
    pixels = images.float() * torch.tensor(1 / 255, dtype=torch.float32)
    value, darkest = pixels.amax(dim=3), pixels.amin(dim=3)
    red, green, blue = pixels.unbind(3)
    chroma = value - darkest
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sector = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe),
    )
    turned = sector + numbers["turn"][:, step, :1, None] / 60.0
    out = []
    for shift in (5.0, 3.0, 1.0):
        k = torch.remainder(turned + shift, 6.0)
        part = torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)
        out.append(value - chroma * part)
    return (torch.stack(out, dim=3) * 255.999).to(torch.uint8)


_CHANGES = {
    kinds.TABLE: _by_table,
    kinds.ROWS: _slide_rows,
    kinds.COLUMNS: _slide_columns,
    kinds.SHIFT: _shift,
    kinds.ROTATE: _rotate,
    kinds.SATURATE: _saturate,
    kinds.SHARPEN: _sharpen,
    kinds.CONTRAST: _by_counts,
    kinds.STRETCH: _by_counts,
    kinds.EQUALIZE: _by_counts,
    kinds.HUE: _hue,
}


def erase(
    pictures: Ragged, arrays: Arrays, host: Arrays, final: RowsOut | None = None
) -> Ragged | None:
    """Paint over a rectangle of each picture: (top, left, height, width), none if it is empty."""
    images = pictures.images()
    if images is not None:
        painted = Ragged.stacked(_paint(images, arrays, slice(None)))
    else:
        parts = [
            _paint(pictures.picture(number)[None], arrays, slice(number, number + 1)).reshape(-1)
            for number in range(len(pictures))
        ]
        painted = Ragged.packed(torch.cat(parts), pictures.host[:, 1:3])
    return finish(painted, final)


def _paint(images: torch.Tensor, arrays: Arrays, numbers: slice) -> torch.Tensor:
    patch, noise = arrays["patch"][numbers].long()[..., None, None], arrays["noise"]
    rows, columns = _grid(images)
    down, across = rows - patch[:, 0], columns - patch[:, 1]
    inside = (down >= 0) & (down < patch[:, 2]) & (across >= 0) & (across < patch[:, 3])
    paint = arrays["fill"]
    if noise.numel():
        at = arrays["start"][numbers, None, None] + (down * patch[:, 3] + across) * 3
        at = torch.where(inside, at, 0)[..., None] + torch.arange(3, device=images.device)
        paint = noise[at]
    return torch.where(inside[..., None], paint, images)


def finish(pictures: Ragged, final: RowsOut | None) -> Ragged | None:
    """Normalize and write to the rows of the batch; without ``final``, the pictures as they are."""
    if final is None:
        return pictures
    images = pictures.images()
    if images is None:
        raise ValueError("pictures of different sizes do not fit into the rows of a batch")
    if final.table is not None:
        first = torch.arange(3, device=images.device) * 256
        images = final.table.reshape(-1)[images.long() + first]
    final.rows[final.places] = images.permute(0, 3, 1, 2) if final.channels_first else images
    return None
