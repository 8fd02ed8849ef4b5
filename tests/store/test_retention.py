"""A policy removes what it says, and never what is in use, pinned or packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.retention import Candidate, Policy, choose, replaced_by

OFF = Policy(budget=None, unused=None, age=None, obsolete=None)


def _thing(key: str, **changes: object) -> Candidate:
    made = Candidate(key, "cache", f"identity-{key}", "", 10, created=0.0, last_use=0.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def _keys(kept: list[Candidate], policy: Policy, now: float) -> list[str]:
    return [one.key for one, _ in choose(kept, policy, now)]


def test_what_was_not_used_for_longer_than_allowed_goes() -> None:
    kept = [_thing("a", last_use=0.0), _thing("b", last_use=60.0)]
    assert _keys(kept, replace(OFF, unused=50.0), 100.0) == ["a"]
    assert _keys(kept, OFF, 1e9) == []


def test_age_counts_from_the_making_whatever_the_use() -> None:
    kept = [_thing("a", created=0.0, last_use=99.0), _thing("b", created=60.0, last_use=60.0)]
    assert _keys(kept, replace(OFF, age=50.0), 100.0) == ["a"]


def test_what_has_expired_goes_under_any_policy() -> None:
    kept = [_thing("a", expires=50.0), _thing("b", expires=150.0), _thing("c")]
    assert _keys(kept, OFF, 100.0) == ["a"]


def test_over_budget_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    kept = [_thing(key, last_use=at, nbytes=10) for key, at in (("a", 3), ("b", 1), ("c", 2))]
    assert _keys(kept, replace(OFF, budget=20), 10.0) == ["b"]
    assert _keys(kept, replace(OFF, budget=10), 10.0) == ["b", "c"]
    assert _keys(kept, replace(OFF, budget=30), 10.0) == []


def test_packed_shards_count_for_no_budget() -> None:
    kept = [_thing("a", kind="packed", nbytes=1000), _thing("b", nbytes=10)]
    assert _keys(kept, replace(OFF, budget=10), 1.0) == []


@pytest.mark.parametrize(
    ("new", "goes"),
    [
        ({}, True),
        ({"line": "other"}, False),
        ({"line": ""}, False),
        # Two pipelines that take turns: the old one was used after the new one was made.
        ({"created": 5.0}, False),
        # A single use may be a trial.
        ({"opened": 1}, False),
        ({"identity": "identity-a"}, False),
    ],
)
def test_a_newer_thing_of_the_same_line_replaces_an_older_one(
    new: dict[str, object], goes: bool
) -> None:
    old = _thing("a", line="photos", last_use=10.0)
    newer = _thing("b", line="photos", created=20.0, last_use=90.0, opened=2)
    newer = replace(newer, **new)  # type: ignore[arg-type]
    assert (_keys([old, newer], replace(OFF, obsolete=50.0), 100.0) == ["a"]) is goes
    # It is not removed before the time that the policy grants.
    assert _keys([old, newer], replace(OFF, obsolete=95.0), 100.0) == []


def test_the_newest_replacement_is_named() -> None:
    old = _thing("a", line="x", last_use=1.0)
    newer = [_thing(key, line="x", created=at, opened=2) for key, at in (("b", 2.0), ("c", 3.0))]
    assert replaced_by([old, *newer])["a"].key == "c"
    (_, reason), *_ = choose([old, *newer], replace(OFF, obsolete=5.0), 100.0)
    assert reason == "replaced by identity-c, and not used for 1 min"


things = st.builds(
    Candidate,
    key=st.uuids().map(str),
    kind=st.sampled_from(["cache", "refurbish", "packed", "index"]),
    identity=st.text("ab", min_size=1, max_size=2),
    line=st.sampled_from(["", "x", "y"]),
    nbytes=st.integers(0, 100),
    created=st.floats(0, 100),
    last_use=st.floats(0, 100),
    opened=st.integers(0, 3),
    in_use=st.booleans(),
    pinned=st.booleans(),
    expires=st.none() | st.floats(0, 100),
)
limits = st.none() | st.floats(0, 100)


@given(
    st.lists(things, max_size=8),
    st.builds(
        Policy, budget=st.none() | st.integers(0, 400), unused=limits, age=limits, obsolete=limits
    ),
)
def test_no_policy_touches_what_is_in_use_pinned_or_packed(
    kept: list[Candidate], policy: Policy
) -> None:
    chosen = [one for one, _ in choose(kept, policy, 100.0)]
    assert not any(one.in_use or one.pinned or one.kind == "packed" for one in chosen)
    assert len({one.key for one in chosen}) == len(chosen)
    left = [one for one in kept if one not in chosen and one.kind != "packed"]
    total = sum(one.nbytes for one in left)
    if policy.budget is not None and total > policy.budget:
        assert all(one.in_use or one.pinned for one in left)
