"""Records between machines: every field has a type and a limit, and nonsense is refused."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import protocol
from penstock.cluster.protocol import (
    LARGEST_RECORD,
    LARGEST_VALUE,
    LONGEST_NAME,
    MOST_KEYS,
    MOST_MACHINES,
    VOCABULARY,
    Acknowledged,
    AnswersHead,
    BatchHead,
    BatchPiece,
    GetGroupPosition,
    GetKeptSamples,
    GetMachineStatus,
    GroupPosition,
    HeartbeatReply,
    HeartbeatSent,
    Hello,
    HelloReply,
    Kept,
    KeptSamples,
    MachineStatus,
    Offered,
    Refusal,
    RemoteTask,
    RowsHead,
    Spilled,
    WantedBatch,
    WantedValues,
    decode,
    encode,
    pack_kept,
    unpack_kept,
)
from penstock.engine.pools.wire import ProtocolError

KEYS = np.array([3, 1], "<i8").tobytes()
STAMP = [2, 1, 7]
GROUP = ["n", "c", 64, 0, ["0/1 x 64"]]
ME = ["a", "x:1", 5, 8, 1 << 40, 1, "trains", [["c", "d", [0, 1]]], [GROUP]]
BATCH = WantedBatch("g", "0/1 x 2", 0, 3, "d", KEYS, None, None, 100, 2.5, 1, [0, 0, 7, 2])
HEAD = BatchHead("present", 2, 100, b"layout", b"beside", [[3, "file", "decode", "broken"]])
GOOD: list[tuple[Any, ...]] = [
    Hello(1, "0.1", "a", 5),
    HelloReply(1, "0.1", "b", (1 << 63) - 1),
    Refusal("busy", "later"),
    HeartbeatSent(ME, STAMP, "", 0, [1, 0.5], [["b", 3]], True),
    HeartbeatReply(ME, STAMP, "x:1", 1, None),
    HeartbeatReply(ME, STAMP, "x:1", 1, [STAMP, "x:1", STAMP, [ME], ["b"]]),
    Spilled("ab", KEYS, None, ["c", ""]),
    Acknowledged(),
    GetKeptSamples("ab"),
    GetGroupPosition("group", "part", 1),
    GroupPosition(7),
    KeptSamples(pack_kept(np.array([2, 9]))),
    GetMachineStatus(),
    MachineStatus({"a": [1, "b"]}),
    WantedValues("ab", KEYS, None, 100),
    WantedValues("ab", KEYS, KEYS, 100),
    AnswersHead(KEYS, b"\0\2", ["c"]),
    Offered("ab", KEYS, None, KEYS),
    Kept(b"\0\1"),
    RemoteTask("r", 0, KEYS, KEYS, 100, [], b""),
    RemoteTask("r", 0, KEYS, None, 100, ["a", "b"], bytes([0, 2])),
    RowsHead(0, 2, {}),
    BATCH,
    BATCH._replace(replicas=KEYS, spent=b""),
    HEAD,
    BatchHead.without("later"),
    BatchPiece(0),
]
KINDS = tuple(VOCABULARY._records.values())

BAD: list[tuple[Any, ...]] = [
    Hello(1, "0.1", "", 5),
    Hello(1, "0.1", "a" * (LONGEST_NAME + 1), 5),
    Hello(-1, "0.1", "a", 5),
    Hello(True, "0.1", "a", 5),
    Hello(1, "0.1", "a", 1 << 63),
    Refusal("odd", "x"),  # type: ignore[arg-type]
    HeartbeatSent(ME, STAMP, "", 0, [1, float("nan")], [], True),
    HeartbeatSent(ME, STAMP, "", 0, [-1, 0.5], [], True),
    HeartbeatSent(ME, STAMP, "", 0, [1, 0.5], [["b"]], True),
    HeartbeatSent(ME[:-1], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent(["", *ME[1:]], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent(ME, [1, 2], "", 0, [1, 0.5], [], True),
    HeartbeatSent(ME, [-2, 0, 0], "", 0, [1, 0.5], [], True),
    HeartbeatSent(ME, STAMP, "", 0, [1, 0.5], [["b", 3]] * (MOST_MACHINES + 1), True),
    HeartbeatReply(ME, STAMP, "", 1, []),
    HeartbeatReply(ME, STAMP, "", 1, [STAMP, "", None, None, []]),
    HeartbeatReply(ME, STAMP, "", 1, [STAMP, "", None, ["a"], []]),
    HeartbeatReply(ME, STAMP, "", 1, [STAMP, "", None, [], [7]]),
    HeartbeatReply(ME, STAMP, "", 1, [STAMP, "", 7, [], []]),
    HeartbeatReply(ME, STAMP, "", 1, [STAMP, "", None, [ME] * (MOST_MACHINES + 1), []]),
    Spilled("ab", KEYS, None, ["c"]),
    Spilled("ab", KEYS, None, ["c", 7]),  # type: ignore[list-item]
    WantedValues("ab", b"", None, 100),
    WantedValues("ab", KEYS[:-1], None, 100),
    WantedValues("ab", KEYS, KEYS[:8], 100),
    WantedValues("ab", KEYS * (MOST_KEYS // 2) + KEYS, None, 100),
    WantedValues("ab", np.array([-1], "<i8").tobytes(), None, 100),
    WantedValues("ab", KEYS, None, -1),
    WantedValues("ab", KEYS, None, (1 << 30) + 1),
    AnswersHead(KEYS, b"\0", []),
    AnswersHead(KEYS, b"\0\4", []),
    AnswersHead(KEYS, b"\2\2", ["c"]),
    AnswersHead(KEYS, b"\0\2", [""]),
    AnswersHead(KEYS, b"\0\2", [7]),  # type: ignore[list-item]
    Offered("ab", KEYS, None, KEYS[:8]),
    Offered("ab", KEYS, None, np.array([1, LARGEST_VALUE + 1], "<i8").tobytes()),
    Offered("ab", KEYS, None, np.array([1, -1], "<i8").tobytes()),
    Kept(b""),
    Kept(b"\2"),
    RemoteTask("r", 0, KEYS, KEYS[:8], 100, [], b""),
    RemoteTask("r", 0, KEYS, None, 100, ["a"], bytes([0])),
    RemoteTask("r", 0, KEYS, None, 100, ["a"], bytes([0, 2])),
    RemoteTask("r", 0, KEYS, None, 100, [""], bytes([0, 1])),
    RowsHead(0, 0, {}),
    HeartbeatSent([*ME[:8], [GROUP] * 257], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent([*ME[:8], [GROUP[:4]]], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent([*ME[:8], [["", *GROUP[1:]]]], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent([*ME[:8], [[*GROUP[:2], 0, 0, []]]], STAMP, "", 0, [1, 0.5], [], True),
    HeartbeatSent([*ME[:8], [[*GROUP[:4], [7]]]], STAMP, "", 0, [1, 0.5], [], True),
    BATCH._replace(number=-1),
    BATCH._replace(replicas=KEYS[:8]),
    BATCH._replace(spent=KEYS[:7]),
    BATCH._replace(most_bytes=(1 << 30) + 1),
    BATCH._replace(wait=61.0),
    BATCH._replace(wait=float("nan")),
    BATCH._replace(position=[0, 0, 7]),
    BATCH._replace(position=[0, 0, 7, -1]),
    HEAD._replace(state="odd"),  # type: ignore[arg-type]
    HEAD._replace(state="later"),
    HEAD._replace(layout=None),
    HEAD._replace(bad=[[3, "file", "decode"]]),
    HEAD._replace(bad=[[-1, "file", "decode", "broken"]]),
    HEAD._replace(nbytes=-1),
    BatchPiece(-1),
]


def test_every_kind_of_record_has_limits_and_a_good_example() -> None:
    assert {type(record) for record in GOOD} == set(KINDS) == set(protocol._LIMITS)


@pytest.mark.parametrize("record", GOOD, ids=lambda record: type(record).__name__)
def test_records_arrive_as_they_were_sent(record: tuple[Any, ...]) -> None:
    assert decode(encode(record), type(record)) == record
    with pytest.raises(ProtocolError, match=type(record).__name__):
        decode(encode(record), Spilled if type(record) is not Spilled else Hello)


@pytest.mark.parametrize("record", BAD, ids=lambda record: type(record).__name__)
def test_values_over_a_limit_are_refused_at_both_ends(record: tuple[Any, ...]) -> None:
    with pytest.raises((ProtocolError, OverflowError)):
        encode(record)
    with pytest.raises((ProtocolError, OverflowError)):
        decode(VOCABULARY.encode(record), type(record))


def test_offers_in_sum_over_the_limit_are_refused() -> None:
    indices = np.arange(20, dtype=np.int64)
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Offered.of("ab", indices, None, [LARGEST_VALUE] * 20))


def test_long_records_are_refused_before_they_are_read() -> None:
    with pytest.raises(ProtocolError, match=f"{LARGEST_RECORD} are allowed"):
        decode(b"\xc1" * (LARGEST_RECORD + 1), Hello)
    with pytest.raises(ProtocolError, match=f"{LARGEST_RECORD} are allowed"):
        encode(MachineStatus({"x": "y" * LARGEST_RECORD}))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_nonsense_is_refused_or_within_the_limits(data: st.DataObject) -> None:
    word = data.draw(st.sampled_from([*VOCABULARY._records, "odd"]))
    fields = data.draw(st.lists(values, max_size=8))
    body = msgpack.packb([word, *fields], use_bin_type=True)
    cut = data.draw(st.integers(0, len(body)))
    for given_body in (body, body[:cut], data.draw(st.binary(max_size=64))):
        try:
            record = decode(given_body, *KINDS)
        except ProtocolError:
            continue
        protocol.check(record)
        encode(record)


@given(st.sets(st.integers(0, 300)), st.integers(0, 301))
def test_kept_samples_are_read_up_to_the_number_of_samples(kept: set[int], samples: int) -> None:
    packed = pack_kept(np.array(sorted(kept), np.int64))
    found = unpack_kept(packed, samples).tolist()
    assert found == [index for index in sorted(kept) if index < samples]


def test_a_list_of_kept_samples_takes_no_more_memory_than_it_should() -> None:
    bomb = zlib.compress(bytes(100_000_000), 9)
    assert unpack_kept(bomb, 1000).tolist() == []
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack_kept(b"nonsense", 1000)
