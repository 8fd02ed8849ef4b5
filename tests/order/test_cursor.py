"""The cursor: unchanged by a checkpoint, and invalid checkpoints are errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StateError
from penstock.order import Cursor

counts = st.integers(0, 2**60)


@settings(deadline=None)
@given(st.builds(Cursor, counts, counts, counts))
def test_a_cursor_survives_a_checkpoint_in_any_format(cursor: Cursor) -> None:
    assert Cursor.from_dict(json.loads(json.dumps(cursor.as_dict()))) == cursor


def test_a_run_begins_with_epoch_position_and_batch_0() -> None:
    assert Cursor() == (0, 0, 0)


def test_numpy_integers_become_python_ints() -> None:
    state = Cursor(np.int64(1), np.int64(2), np.int64(3)).as_dict()
    assert json.dumps(state) == '{"epoch": 1, "position": 2, "batch": 3}'
    assert type(Cursor.from_dict({**state, "epoch": np.int32(1)}).epoch) is int


def test_other_entries_of_the_dict_are_ignored() -> None:
    assert Cursor.from_dict({"seed": 3, "epoch": 1, "position": 2, "batch": 3}) == (1, 2, 3)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 1, "batch": 2}, r"has no 'position', only \['batch', 'epoch'\]"),
        ({"epoch": -1, "position": 0, "batch": 0}, "'epoch' = -1"),
        ({"epoch": 0, "position": 2.5, "batch": 0}, "'position' = 2.5"),
        ({"epoch": 0, "position": 0, "batch": True}, "'batch' = True"),
        ({"epoch": 0, "position": None, "batch": 0}, "'position' = None"),
        ([0, 0, 0], "of type list, not a dict"),
    ],
)
def test_an_invalid_cursor_is_an_error_that_names_the_entry(state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        Cursor.from_dict(state)
