"""Admission: the first samples that fit are kept; the first that does not closes it for good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PipelineError
from penstock.store.admission import Admission

offers = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=60)


@settings(deadline=None)
@given(budget=st.integers(0, 150), offered=offers)
def test_exactly_the_first_samples_that_fit_are_kept(
    budget: int, offered: list[tuple[int, int]]
) -> None:
    sizes = dict(reversed(offered))
    distinct = list(dict.fromkeys(key for key, _ in offered))
    kept: set[int] = set()
    for count in range(len(distinct) + 1):
        if sum(sizes[key] for key in distinct[:count]) <= budget:
            kept = set(distinct[:count])

    admission = Admission(budget)
    for key, _ in offered:
        before = admission.used
        assert admission.offer(key, sizes[key]) == (key in kept)
        assert before <= admission.used <= budget
    assert admission.used == sum(sizes[key] for key in kept)
    assert admission.admitted == len(kept)
    assert admission.closed == (len(kept) < len(distinct))


@settings(deadline=None)
@given(budget=st.integers(0, 150), offered=offers)
def test_every_later_epoch_hits_what_the_first_admitted(
    budget: int, offered: list[tuple[int, int]]
) -> None:
    admission = Admission(budget)
    first = {key: admission.offer(key, cost) for key, cost in offered}
    # One more sample that cannot fit, so that the answer does not depend on the room left.
    assert not admission.offer(99, budget + 1)
    state = (admission.used, admission.admitted)
    assert {key: admission.offer(key, cost) for key, cost in reversed(offered)} == first
    assert (admission.used, admission.admitted) == state


def test_a_small_sample_after_the_close_is_refused() -> None:
    admission = Admission(10)
    offered = [(1, 8), (2, 3), (3, 1), (1, 8)]
    answers = [(admission.offer(key, cost), admission.closed) for key, cost in offered]
    assert answers == [(True, False), (False, True), (False, True), (True, True)]
    assert (admission.used, admission.admitted) == (8, 1)
    assert repr(admission) == "<Admission closed: 1 samples, 8 of 10 bytes>"


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(PipelineError, match="-1 bytes; it cannot be negative"):
        Admission(-1)
    with pytest.raises(PipelineError, match="cost of sample 4 is -2 bytes"):
        Admission(1).offer(4, -2)


@settings(deadline=None)
@given(budget=st.integers(0, 300), offered=offers, size=st.integers(1, 20))
def test_offering_many_at_once_is_offering_one_after_the_other(
    budget: int, offered: list[tuple[int, int]], size: int
) -> None:
    one, many = Admission(budget), Admission(budget)
    for first in range(0, len(offered), size):
        some = offered[first : first + size]
        refused = [key for key, cost in some if not one.offer(key, cost)]
        assert many.offer_many(some) == refused
        assert (many.used, many.admitted, many.closed) == (one.used, one.admitted, one.closed)
    assert all((key in many) == (key in one) for key in range(13))
    assert many.offer_many([]) == []
