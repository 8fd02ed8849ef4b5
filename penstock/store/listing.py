"""Stores as people read about them: what the catalogue found, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import show_size
from penstock.store.catalogue import Kept, Leftover, Proof

SHORT = 12
"""Characters of a fingerprint that are shown: enough to tell one from another."""

_UNITS = (("day", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def listed(stores: Sequence[Kept], left: Sequence[Leftover], now: float) -> list[str]:
    """All that is kept, by where it lies."""
    out: list[str] = []
    for title, found in _by_title(stores).items():
        rows = [("fingerprint", "kind", "samples", "size", "last use", ""), *_rows(found, now)]
        out += [title, *(f"  {line}" for line in aligned(rows, right={2, 3})), ""]
    if left:
        rows = [(str(one.place), show_size(one.nbytes)) for one in left]
        out += ["left in memory by dead processes: penstock store clear --all removes it"]
        out += [*(f"  {line}" for line in aligned(rows, right={1})), ""]
    if not out:
        return ["Nothing is kept."]
    return [*out, f"{_counted(stores, left)}, {show_size(_nbytes(stores) + _nbytes(left))}"]


def proved(one: Kept, proof: Proof) -> str:
    """What came of reading a store."""
    name = f"{short(one)}  {one.place}"
    if one.void:
        return f"{name}: not read, because {_void(one)}"
    if proof.wrong:
        return f"{name}: {proof.wrong}; it is started anew when it is next opened"
    if proof.damaged:
        return (
            f"{name}: {proof.damaged:,} of {proof.values:,} values damaged; they are prepared "
            "again when they are next needed"
        )
    return f"{name}: {proof.values:,} values, all sound"


def short(one: Kept) -> str:
    return one.identity[:SHORT]


def users(one: Kept) -> str:
    """Who has it open."""
    if not one.users:
        return "in use"
    shown = ", ".join(map(str, one.users[:3])) + (", ..." if len(one.users) > 3 else "")
    return f"in use by process {shown}"


def span(seconds: float, units: int = 2) -> str:
    """A time as people say it.

    >>> span(45.2), span(3_700), span(200_000), span(200_000, units=1)
    ('45 s', '1 h 1 min', '2 days 7 h', '2 days')
    """
    left = max(0, int(seconds))
    parts = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            plural = "s" if unit == "day" and count > 1 else ""
            parts.append(f"{count} {unit}{plural}")
        elif parts:
            break
    return " ".join(parts[:units]) or "0 s"


def aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Rows of cells as lines in which columns stand below each other.

    >>> aligned([("name", "size"), ("a", "10"), ("bcdef", "5")], right={1})
    ['name   size', 'a        10', 'bcdef     5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if at in right else text.ljust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _by_title(stores: Sequence[Kept]) -> dict[str, list[Kept]]:
    found: dict[str, list[Kept]] = {}
    for one in stores:
        # In memory every process has a directory of its own.
        disk = one.where == "disk"
        root = one.place.parent if disk else one.place.parent.parent
        found.setdefault(f"{'on disk' if disk else 'in memory'}, {root}", []).append(one)
    return found


def _rows(stores: Sequence[Kept], now: float) -> list[tuple[str, ...]]:
    return [
        (
            short(one),
            one.kind or "?",
            "?" if one.samples is None else f"{one.samples:,}",
            show_size(one.nbytes),
            "now" if one.in_use else f"{span(now - one.last_use, units=1)} ago",
            users(one) if one.in_use else _void(one),
        )
        for one in stores
    ]


def _void(one: Kept) -> str:
    return f"{one.void}: it is started anew when it is next opened" if one.void else ""


def _counted(stores: Sequence[Kept], left: Sequence[Leftover]) -> str:
    many = f"{len(stores)} store" + ("" if len(stores) == 1 else "s")
    return many + (f", {len(left)} left behind" if left else "")


def _nbytes(found: Sequence[Kept] | Sequence[Leftover]) -> int:
    return sum(one.nbytes for one in found)


def many(count: int, one: str, several: str = "") -> str:
    """So many of them, in words.

    >>> many(1, "sample"), many(2_000, "batch", "batches")
    ('1 sample', '2,000 batches')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"
