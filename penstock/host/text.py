"""Text for the terminal: durations, aligned tables, and counts with their noun."""

from __future__ import annotations

from collections.abc import Container, Sequence

_UNITS = (("day", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def span(seconds: float, units: int = 2) -> str:
    """A duration in its largest units, at most ``units`` of them.

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


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The rows of a table as lines with aligned columns; those in ``right`` to the right.

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


def printable(text: str, encoding: str | None) -> str:
    """The text with characters escaped that a stream of this encoding cannot write.

    Names of files may have bytes that are not valid UTF-8.

    >>> printable("caf\\udce9 é", "utf-8"), printable("é", "ascii")
    ('caf\\\\udce9 é', '\\\\xe9')
    """
    known = encoding or "utf-8"
    return text.encode(known, "backslashreplace").decode(known)


def many(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun in the singular or plural.

    >>> many(1, "sample"), many(2_000, "batch", "batches")
    ('1 sample', '2,000 batches')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def percent(share: float) -> str:
    """A share, 0 to 1, in percent.

    >>> percent(0.553)
    '55 %'
    """
    return f"{100 * share:.0f} %"
