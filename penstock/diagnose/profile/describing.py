"""A short description of samples: their types, shapes and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.tree import flatten


def describe(samples: Sequence[Any]) -> tuple[str, int]:
    """Types and shapes of samples, ``?`` where they differ, and the mean size in bytes.

    Single numbers, such as labels, are left out if a sample has larger values too.

    >>> import numpy as np
    >>> describe([(np.zeros((4, 6, 3), np.uint8), 1), (np.zeros((5, 6, 3), np.uint8), 2)])
    ('uint8 ?x6x3', 81)
    """
    if not samples:
        return "", 0
    by_sample = [flatten(sample)[0] for sample in samples]
    size = sum(_nbytes(leaf) for leaves in by_sample for leaf in leaves) // len(samples)
    alike = [leaves for leaves in by_sample if len(leaves) == len(by_sample[0])]
    columns = [[leaves[i] for leaves in alike] for i in range(len(by_sample[0]))]
    large = [column for column in columns if not _is_number(column[0])]
    return ", ".join(_words(column) for column in large or columns), size


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) or getattr(leaf, "shape", None) == ()


def _words(leaves: Sequence[Any]) -> str:
    kinds = {_kind(leaf) for leaf in leaves}
    if len(kinds) > 1:
        return " or ".join(sorted(kinds))
    shapes = [_shape(leaf) for leaf in leaves]
    if len({len(shape) for shape in shapes}) > 1:
        return f"{kinds.pop()} ?"
    same = [str(sizes[0]) if len(set(sizes)) == 1 else "?" for sizes in zip(*shapes, strict=True)]
    return f"{kinds.pop()} {'x'.join(same)}".rstrip()


def _kind(leaf: Any) -> str:
    if is_pil(leaf):
        return f"PIL {leaf.mode}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None:
        return str(dtype).removeprefix("torch.")
    return "text" if isinstance(leaf, str) else type(leaf).__name__


def _shape(leaf: Any) -> tuple[int, ...]:
    if is_pil(leaf):
        return (leaf.size[1], leaf.size[0])
    return tuple(int(n) for n in getattr(leaf, "shape", ()))


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, (bytes, bytearray, str)):
        return len(leaf)
    if is_pil(leaf):
        return int(leaf.size[0] * leaf.size[1] * len(leaf.getbands()))
    nbytes = getattr(leaf, "nbytes", 0)
    return int(nbytes) if isinstance(nbytes, int) else 0


def is_pil(value: Any) -> bool:
    return (type(value).__module__ or "").startswith("PIL.")
