"""Text for the terminal: durations and tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.host.text import aligned, span


@given(st.floats(0, 1e9))
def test_a_duration_has_at_most_two_units(seconds: float) -> None:
    assert len(span(seconds).split()) in (2, 4)
    assert span(seconds).startswith(span(seconds, units=1))


@given(st.lists(st.tuples(st.text("ab", max_size=5), st.text("cd", min_size=1)), min_size=1))
def test_the_columns_of_a_table_are_aligned(rows: list[tuple[str, str]]) -> None:
    width = max(len(first) for first, _ in rows)
    for line, (first, second) in zip(aligned(rows), rows, strict=True):
        assert (line[:width].strip(), line[width:].strip()) == (first, second)
