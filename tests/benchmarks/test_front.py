"""The picture of the README shows the figures of docs/benchmarks.md."""

from __future__ import annotations

import pytest

from benchmarks import front


def test_the_picture_has_the_figures_of_the_benchmarks_page() -> None:
    drawn = front.picture(front.PAGE.read_text())
    assert front.PICTURE.read_text() == drawn, "draw it again: python -m benchmarks.front"


def test_a_table_without_a_contestant_is_refused() -> None:
    page = front.PAGE.read_text().replace("| tf.data |", "| renamed |")
    with pytest.raises(ValueError, match=r"has no row 'tf\.data'"):
        front.picture(page)


def test_a_cell_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'soon' is not a number"):
        front.column("| speed | images/s |\n| --- | --- |\n| ours | soon |\n", "speed", "images/s")
