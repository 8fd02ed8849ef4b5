"""The messages between the nodes of a cluster, as small records with a limit for every field.

A node that connects to another, or wants to know whether it is alive, sends ``Hello`` and gets
``HelloReply``. Heartbeats are ``HeartbeatSent``, their answers ``HeartbeatReply``. ``Spilled``
tells the owner of samples where they are kept; ``GetKeptSamples`` asks a machine what it keeps,
and is answered with ``KeptSamples``. ``GetGroupPosition`` asks where the members of a group are,
and is answered with ``GroupPosition``. Values are requested with ``WantedValues`` and come back
behind ``AnswersHead``; values that another machine is to keep are sent behind ``Offered``, and
``Kept`` says which of them it keeps. A task for the workers of another machine is ``RemoteTask``;
its rows come back behind ``RowsHead``. A batch of a group that has members on both machines is
requested with ``WantedBatch``; ``BatchHead`` comes back, and its bytes behind ``BatchPiece``.

All records are plain data: nothing that another machine sends is ever unpickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.pools.wire import (
    ProtocolError,
    Vocabulary,
    check_types,
    pack_integers,
    unpack_integers,
)

VERSION = 2
"""Version of these messages. A node refuses machines of another version."""

LARGEST_RECORD = 4 << 20
"""Bytes of the longest record. The longest is a request for MOST_KEYS samples: 16 bytes each."""

MOST_KEYS = 1 << 16
"""Samples of one request. A request is made for each batch and owner."""

LARGEST_VALUE = 64 << 20
"""Bytes of the largest value, and of the rows in one message. Larger ones are not sent."""

LARGEST_ANSWER = 1 << 30
"""Bytes of values that one request may ask for, or one offer may contain."""

LARGEST_KEPT = 3 << 20
"""Bytes in which a machine says which samples it keeps: one bit each, compressed."""

MOST_MACHINES = 4096
LONGEST_NAME = 255
"""Characters of a name: a machine, a recipe. Host names have at most 253."""

MOST_RANKS = 4096
"""Ranks that train on one machine."""

MOST_GROUPS, MOST_PARTS = 256, 1024
"""Groups with members on one machine, and parts of a group."""

MOST_CACHES_USED = 250
"""Caches of one pipeline."""

READ = 255
"""In ``RemoteTask.held``: the sample is read, and not sent back."""

LARGEST_LAYOUT = 1 << 20
"""Bytes that describe the arrays of a batch."""

LONGEST_WAIT = 60.0
"""Seconds that a machine may be asked to hold a request for a batch."""

MOST_BAD = 1024
"""Bad samples of a batch. A batch with more is not sent."""

ROLES = ("trains", "helps")

LONGEST_REASON = 2000
MOST_LEAVES = 1024
"""Arrays of one batch."""

_LAST = (1 << 63) - 1


class Hello(NamedTuple):
    """A node introduces itself. ``incarnation`` changes with every start of a node."""

    version: int
    release: str
    machine: str
    incarnation: int


class HelloReply(NamedTuple):
    """The other node introduces itself."""

    version: int
    release: str
    machine: str
    incarnation: int


class Refusal(NamedTuple):
    """Why a node does not serve a call. The text is for users."""

    kind: RefusalKind
    reason: str


RefusalKind = Literal[
    "token", "version", "busy", "nonsense", "failed", "recipe", "sample", "deadly"
]
REFUSAL_KINDS = ("token", "version", "busy", "nonsense", "failed", "recipe", "sample", "deadly")
"""``token``: it is missing or wrong. ``version``: of these messages, or of Penstock. ``busy``: too
many calls at the same time. ``nonsense``: a malformed call. ``failed``: an error in this node.
``recipe``: this machine has no way to get the pipeline. ``sample``: samples of the task could not
be prepared here. ``deadly``: one of them kills workers."""


class HeartbeatSent(NamedTuple):
    """A heartbeat: the sender, the stamp of its view, the head that it follows, the size of its
    view, [free bytes, idle cores], [name, incarnation] of each suspect, and whether it leaves."""

    sender: WireMachine
    stamp: WireStamp
    head: str
    size: int
    load: list[Any]
    suspects: list[list[Any]]
    leaving: bool


class HeartbeatReply(NamedTuple):
    """The answer to a heartbeat. ``update``: [stamp, head, stamp of the older view or None,
    machines, names of machines that are gone], if the sender of the heartbeat lacks something."""

    sender: WireMachine
    stamp: WireStamp
    head: str
    size: int
    update: list[Any] | None


WireMachine = list[Any]
"""The fields of a machine: name, address, incarnation, cores, cache bytes, version, role, ranks,
groups."""

WireStamp = list[int]
"""The fields of a stamp: term, incarnation, version."""


class Spilled(NamedTuple):
    """Tells the owner of samples which machine keeps each; an empty name if none has room.

    The name of the owner: the sender has not kept the sample that it was to read and offer.
    """

    fingerprint: str
    indices: bytes
    generations: bytes | None
    holders: list[str]


class Acknowledged(NamedTuple):
    """The answer to a message that needs no other answer."""


class GetKeptSamples(NamedTuple):
    """Asks which samples of a cache a machine keeps."""

    fingerprint: str


class KeptSamples(NamedTuple):
    """The samples of a cache that a machine keeps, as ``pack_kept`` packs them."""

    kept: bytes


class GetGroupPosition(NamedTuple):
    """Asks where the members of a group are in an epoch. ``group``, ``part``: see WantedBatch."""

    group: str
    part: str
    epoch: int


class GroupPosition(NamedTuple):
    """``first``: the first batch of the epoch that is still kept; 0 if no member is in it."""

    first: int


class GetMachineStatus(NamedTuple):
    """Asks for the status of a node in the cluster."""


class MachineStatus(NamedTuple):
    """The status of a node in the cluster, as plain data."""

    status: dict[str, Any]


class WantedValues(NamedTuple):
    """Asks for values by (fingerprint, index, generation). Without generations all are 0.

    ``most_bytes``: the answers may contain at most this many bytes of values. ``lent``: the values
    are for a ``RemoteTask`` of the machine that is asked. It answers with what it has, at once.
    """

    fingerprint: str
    indices: bytes
    generations: bytes | None
    most_bytes: int
    lent: bool = False

    @classmethod
    def of(
        cls,
        fingerprint: str,
        indices: NDArray[np.int64],
        generations: NDArray[np.int64] | None = None,
        *,
        most_bytes: int = LARGEST_ANSWER,
        lent: bool = False,
    ) -> WantedValues:
        packed = pack_integers(indices) or b""
        return cls(fingerprint, packed, pack_integers(generations), most_bytes, lent)


AnswerState = Literal["present", "absent", "moved", "later"]
ANSWER_STATES: tuple[AnswerState, ...] = ("present", "absent", "moved", "later")


class AnswersHead(NamedTuple):
    """Answers to a request; the values of those that are present follow in the same order.

    ``places``: positions in the request. ``states``: one byte each, a position in ANSWER_STATES.
    ``moved_to``: the machines of the answers that are "moved".
    """

    places: bytes
    states: bytes
    moved_to: list[str]


class Offered(NamedTuple):
    """Values that the receiver may keep follow, in this order, of these ``sizes`` in bytes."""

    fingerprint: str
    indices: bytes
    generations: bytes | None
    sizes: bytes

    @classmethod
    def of(
        cls,
        fingerprint: str,
        indices: NDArray[np.int64],
        generations: NDArray[np.int64] | None,
        sizes: Sequence[int],
    ) -> Offered:
        return cls(
            fingerprint,
            pack_integers(indices) or b"",
            pack_integers(generations),
            pack_integers(np.array(sizes, np.int64)) or b"",
        )


class Kept(NamedTuple):
    """Which of the offered values were kept: one byte each, 0 or 1."""

    kept: bytes


class RemoteTask(NamedTuple):
    """A tiny-batch for another machine's workers. ``recipe``: the pipeline, which it has already.

    - ``most_bytes``: the answer may have at most this many bytes.
    - ``caches``: the fingerprint of each cache of the pipeline, from the first to the last.
    - ``held``: one byte for each sample: 1 + the number of the cache in which the asking machine
      has it; 0 for a sample that is to be read from storage, and sent back; READ for one that is
      only to be read, because no machine has room for it. Empty without caches.
    """

    recipe: str
    epoch: int
    indices: bytes
    replicas: bytes | None
    most_bytes: int
    caches: list[str]
    held: bytes


class RowsHead(NamedTuple):
    """Rows ``first`` to ``first + rows`` of a tiny-batch; the buffer of each leaf follows.

    ``report``: times and counters, as plain data. Where it names samples that were read for caches
    of the asking machine, one more buffer has their values.
    """

    first: int
    rows: int
    report: dict[str, Any]


class WantedBatch(NamedTuple):
    """Asks for a prepared batch of a group.

    - ``group``: digest of the group's name and of what it prepares. ``part`` to ``digest``: the
      name of the batch. ``indices``, ``replicas``, ``spent``: its samples (see ``BatchKeys``).
    - ``most_bytes``: the batch may have at most this many bytes. ``wait``: seconds within which it
      must be ready; after that it is refused.
    - ``ahead``: batches that the member who wants it takes before. ``position``: [epoch, first
      batch, batches of the epoch, batches done] of the member that is furthest behind.
    """

    group: str
    part: str
    epoch: int
    number: int
    digest: str
    indices: bytes
    replicas: bytes | None
    spent: bytes | None
    most_bytes: int
    wait: float
    ahead: int
    position: list[int]


BatchState = Literal["present", "absent", "later", "failed", "unsendable"]
BATCH_STATES: tuple[BatchState, ...] = ("present", "absent", "later", "failed", "unsendable")
"""``absent``: this machine does not prepare the batch. ``later``: it was not ready in time.
``failed``: it could not be prepared. ``unsendable``: it is not plain data."""


class BatchHead(NamedTuple):
    """The answer to ``WantedBatch``. If it is present, ``nbytes`` follow, behind ``BatchPiece``.

    - ``layout``: the arrays of the batch, as plain data; ``None`` if a packed value follows.
    - ``beside``: fields of text or bytes, as plain data, or ``None``.
    - ``bad``: [index, name, stage, error] of its bad samples.
    """

    state: BatchState
    rows: int
    nbytes: int
    layout: bytes | None
    beside: bytes | None
    bad: list[list[Any]]

    @classmethod
    def without(cls, state: BatchState) -> BatchHead:
        """An answer without a batch."""
        return cls(state, 0, 0, None, None, [])


class BatchPiece(NamedTuple):
    """Bytes of a batch follow, those from ``first`` on."""

    first: int


VOCABULARY = Vocabulary(
    hello=Hello,
    hello_reply=HelloReply,
    refusal=Refusal,
    heartbeat=HeartbeatSent,
    heartbeat_reply=HeartbeatReply,
    spilled=Spilled,
    acknowledged=Acknowledged,
    get_kept=GetKeptSamples,
    kept_samples=KeptSamples,
    get_position=GetGroupPosition,
    position=GroupPosition,
    look=GetMachineStatus,
    status=MachineStatus,
    wanted=WantedValues,
    answers=AnswersHead,
    offered=Offered,
    kept=Kept,
    task=RemoteTask,
    rows=RowsHead,
    want_batch=WantedBatch,
    batch=BatchHead,
    piece=BatchPiece,
)

CONTROL = (Hello, HeartbeatSent, Spilled, GetKeptSamples, GetGroupPosition, GetMachineStatus)
"""The messages that a node answers with one message."""

REPLIES = (HelloReply, HeartbeatReply, Acknowledged, KeptSamples, GroupPosition, MachineStatus)
"""The answers to these messages."""


def encode(record: tuple[Any, ...]) -> bytes:
    """The record as bytes. Raises ProtocolError if it breaks a limit: the receiver would refuse it.

    >>> decode(encode(Refusal("busy", "256 calls")), Refusal)
    Refusal(kind='busy', reason='256 calls')
    """
    check(record)
    body = VOCABULARY.encode(record)
    _check_length(body)
    return body


def decode(body: Any, *expected: type[tuple[Any, ...]]) -> Any:
    """The record that was encoded, one of the ``expected`` kinds. Raises ProtocolError."""
    _check_length(body)
    record = VOCABULARY.decode(body)
    if type(record) not in expected:
        names = " or ".join(kind.__name__ for kind in expected)
        raise ProtocolError(f"{type(record).__name__} in place of {names}")
    check(record)
    return record


def check(record: tuple[Any, ...]) -> None:
    """Raise ProtocolError if a field has the wrong type or is over its limit."""
    kind = type(record)
    limits = _LIMITS[kind]
    check_types(record, [limit.types for limit in limits])
    for value, limit, field in zip(record, limits, kind._fields, strict=True):  # type: ignore[attr-defined]
        size = value if isinstance(value, (int, float)) else len(value or ())
        if value is not None and not limit.least <= size <= limit.most:
            raise ProtocolError(
                f"{kind.__name__} with {field} of {size}: {limit.least} to {limit.most} is allowed"
            )
    problem = _problem(record)
    if problem:
        raise ProtocolError(f"{kind.__name__} with {problem}")


class _FieldLimit(NamedTuple):
    """Types of a field, and its smallest and largest value or length."""

    types: tuple[type, ...]
    least: float
    most: float


_NONE = type(None)
_NAME = _FieldLimit((str,), 1, LONGEST_NAME)
_REASON = _FieldLimit((str,), 0, LONGEST_REASON)
_NUMBER = _FieldLimit((int,), 0, _LAST)
_BYTES = _FieldLimit((int,), 0, LARGEST_ANSWER)
_KEYS = _FieldLimit((bytes,), 8, 8 * MOST_KEYS)
_KEYS_OR_NONE = _FieldLimit((bytes, _NONE), 8, 8 * MOST_KEYS)
_SENDER = (
    _FieldLimit((list,), 9, 9),
    _FieldLimit((list,), 3, 3),
    _FieldLimit((str,), 0, LONGEST_NAME),
    _FieldLimit((int,), 0, MOST_MACHINES),
)
_INTRODUCTION = (_NUMBER, _NAME, _NAME, _NUMBER)

_LIMITS: dict[type, tuple[_FieldLimit, ...]] = {
    Hello: _INTRODUCTION,
    HelloReply: _INTRODUCTION,
    Refusal: (_NAME, _REASON),
    HeartbeatSent: (
        *_SENDER,
        _FieldLimit((list,), 2, 2),
        _FieldLimit((list,), 0, MOST_MACHINES),
        _FieldLimit((bool,), 0, 1),
    ),
    HeartbeatReply: (*_SENDER, _FieldLimit((list, _NONE), 5, 5)),
    Spilled: (_NAME, _KEYS, _KEYS_OR_NONE, _FieldLimit((list,), 1, MOST_KEYS)),
    Acknowledged: (),
    GetKeptSamples: (_NAME,),
    KeptSamples: (_FieldLimit((bytes,), 0, LARGEST_KEPT),),
    GetGroupPosition: (_NAME, _NAME, _NUMBER),
    GroupPosition: (_NUMBER,),
    GetMachineStatus: (),
    MachineStatus: (_FieldLimit((dict,), 0, 1024),),
    WantedValues: (_NAME, _KEYS, _KEYS_OR_NONE, _BYTES, _FieldLimit((bool,), 0, 1)),
    AnswersHead: (
        _KEYS,
        _FieldLimit((bytes,), 1, MOST_KEYS),
        _FieldLimit((list,), 0, MOST_KEYS),
    ),
    Offered: (_NAME, _KEYS, _KEYS_OR_NONE, _KEYS),
    Kept: (_FieldLimit((bytes,), 1, MOST_KEYS),),
    RemoteTask: (
        *(_NAME, _NUMBER, _KEYS, _KEYS_OR_NONE, _BYTES),
        _FieldLimit((list,), 0, MOST_CACHES_USED),
        _FieldLimit((bytes,), 0, MOST_KEYS),
    ),
    RowsHead: (
        _FieldLimit((int,), 0, MOST_KEYS),
        _FieldLimit((int,), 1, MOST_KEYS),
        _FieldLimit((dict,), 0, 1024),
    ),
    WantedBatch: (
        *(_NAME, _NAME, _NUMBER, _NUMBER, _NAME, _KEYS, _KEYS_OR_NONE),
        _FieldLimit((bytes, _NONE), 0, 8 * MOST_KEYS),
        *(_BYTES, _FieldLimit((int, float), 0, LONGEST_WAIT), _NUMBER),
        _FieldLimit((list,), 4, 4),
    ),
    BatchHead: (
        *(_NAME, _FieldLimit((int,), 0, MOST_KEYS), _BYTES),
        _FieldLimit((bytes, _NONE), 1, LARGEST_LAYOUT),
        _FieldLimit((bytes, _NONE), 1, LARGEST_RECORD // 2),
        _FieldLimit((list,), 0, MOST_BAD),
    ),
    BatchPiece: (_BYTES,),
}


def _problem(record: tuple[Any, ...]) -> str:
    """What is wrong with the values of a record; empty if nothing is."""
    if isinstance(record, (WantedValues, Offered, Spilled, RemoteTask, WantedBatch)):
        problem = _wrong_keys(record)
        if problem:
            return problem
    if isinstance(record, Offered):
        if len(record.sizes) != len(record.indices):
            return "another number of sizes than of indices"
        sizes = integers(record.sizes)
        if sizes.min() < 0 or sizes.max() > LARGEST_VALUE or sizes.sum() > LARGEST_ANSWER:
            return "sizes over the limit"
    elif isinstance(record, Spilled):
        if 8 * len(record.holders) != len(record.indices) or not _are_names(record.holders, 0):
            return "holders that are not one name for each index"
    elif isinstance(record, RemoteTask):
        if not _are_names(record.caches):
            return "caches that are not names"
        if len(record.held) != (len(record.indices) // 8 if record.caches else 0):
            return "another number of places than of indices"
        if any(len(record.caches) < held != READ for held in record.held):
            return "places in caches that it does not name"
    elif isinstance(record, AnswersHead):
        return _wrong_answers(record)
    elif isinstance(record, Kept):
        if record.kept.strip(b"\0\1"):
            return "flags that are neither 0 nor 1"
    elif isinstance(record, Refusal):
        if record.kind not in REFUSAL_KINDS:
            return f"unknown kind {record.kind!r}"
    elif isinstance(record, (HeartbeatSent, HeartbeatReply)):
        return _wrong_heartbeat(record)
    elif isinstance(record, WantedBatch):
        if not _fits(record.position, (int, int, int, int)):
            return "a position that is not four numbers"
        if len(record.spent or b"") % 8:
            return "arrays of the wrong length"
    elif isinstance(record, BatchHead):
        return _wrong_batch(record)
    return ""


def _wrong_heartbeat(record: HeartbeatSent | HeartbeatReply) -> str:
    if not _is_machine(record.sender) or not _is_stamp(record.stamp):
        return "a sender that is not a machine with a stamp"
    if isinstance(record, HeartbeatSent):
        if not _fits(record.load, (int, float)):
            return "a load that is not bytes and cores"
        if not all(_fits(suspect, (str, int)) for suspect in record.suspects):
            return "suspects that are not names with incarnations"
    elif record.update is not None:
        stamp, head, since, machines, gone = record.update
        if type(machines) is not list or type(gone) is not list:
            return "an update without lists"
        if max(len(machines), len(gone)) > MOST_MACHINES:
            return "an update of too many machines"
        if not (_is_stamp(stamp) and (since is None or _is_stamp(since))):
            return "an update without stamps"
        if not (_are_names([head, *gone], 0) and all(map(_is_machine, machines))):
            return "an update of something other than machines"
    return ""


def _wrong_batch(record: BatchHead) -> str:
    if record.state not in BATCH_STATES:
        return f"unknown state {record.state!r}"
    if record.state != "present" and record != BatchHead.without(record.state):
        return "a batch that is not present"
    if record.layout is None and record.beside is not None:
        return "fields beside a packed value"
    for bad in record.bad:
        if type(bad) is not list or [*map(type, bad)] != [int, str, str, str] or bad[0] < 0:
            return "bad samples that are not [index, name, stage, error]"
    return ""


def _is_machine(fields: Any) -> bool:
    if type(fields) is not list or len(fields) != 9:
        return False
    if type(fields[7]) is not list or type(fields[8]) is not list or len(fields[8]) > MOST_GROUPS:
        return False
    known = _fits(fields[:7], (str, str, int, int, int, int, str)) and bool(fields[0])
    known = known and fields[6] in ROLES and all(map(_are_ranks, fields[7]))
    return known and all(map(_is_group, fields[8]))


def _is_group(hosted: Any) -> bool:
    """Whether a list says what group a machine hosts: [name, content, unit, speed, parts]."""
    if type(hosted) is not list or len(hosted) != 5 or type(hosted[4]) is not list:
        return False
    parts = hosted[4]
    named = _fits(hosted[:4], (str, str, int, int)) and all(hosted[:3])
    return named and len(parts) <= MOST_PARTS and _are_names(parts)


def _are_ranks(hosted: Any) -> bool:
    """Whether a list says which ranks a machine trains: [content, digest, ranks]."""
    if type(hosted) is not list or len(hosted) != 3 or type(hosted[2]) is not list:
        return False
    ranks = hosted[2]
    return _are_names(hosted[:2]) and len(ranks) <= MOST_RANKS and _fits(ranks, (int,) * len(ranks))


def _is_stamp(fields: Any) -> bool:
    # The term before the first view is -1.
    return _fits(fields, (int, int, int), least=-1)


def _fits(fields: Any, types: tuple[type, ...], *, least: int = 0) -> bool:
    """Whether a list has these types, names within their limit and numbers from ``least`` on."""
    if type(fields) is not list or tuple(map(type, fields)) != types:
        return False
    return all(
        len(value) <= LONGEST_NAME if isinstance(value, str) else least <= value <= _LAST
        for value in fields
    )


def _are_names(names: list[Any], least: int = 1) -> bool:
    return all(type(name) is str and least <= len(name) <= LONGEST_NAME for name in names)


def _wrong_keys(record: WantedValues | Offered | Spilled | RemoteTask | WantedBatch) -> str:
    indices = record.indices
    versions = (
        record.replicas if isinstance(record, (RemoteTask, WantedBatch)) else record.generations
    )
    if len(indices) % 8 or (versions is not None and len(versions) != len(indices)):
        return "arrays of the wrong length"
    if any(integers(data).min() < 0 for data in (indices, versions) if data is not None):
        return "negative numbers"
    return ""


def _wrong_answers(record: AnswersHead) -> str:
    if len(record.places) != 8 * len(record.states):
        return "another number of places than of states"
    if max(record.states) >= len(ANSWER_STATES):
        return "unknown states"
    if len(record.moved_to) != record.states.count(ANSWER_STATES.index("moved")):
        return "another number of machines than of moved answers"
    if not _are_names(record.moved_to):
        return "machines that are not names"
    return ""


def pack_kept(indices: NDArray[np.int64]) -> bytes:
    """Indices of samples as compressed bits. Empty, as if there were none, if they are too many.

    >>> unpack_kept(pack_kept(np.array([2, 9])), samples=10).tolist()
    [2, 9]
    """
    if not len(indices):
        return b""
    bits = np.zeros(int(indices.max()) + 1, np.bool_)
    bits[indices] = True
    packed = zlib.compress(np.packbits(bits, bitorder="little").tobytes(), 1)
    return packed if len(packed) <= LARGEST_KEPT else b""


def unpack_kept(packed: bytes, samples: int) -> NDArray[np.int64]:
    """The indices below ``samples`` that ``pack_kept`` has packed. Raises ProtocolError."""
    try:
        # Not more than there are samples, whatever the other machine has compressed.
        data = zlib.decompressobj().decompress(packed, samples // 8 + 1) if packed else b""
    except zlib.error as error:
        raise ProtocolError(f"samples that cannot be read: {error}") from None
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:samples]
    return np.flatnonzero(bits)


def integers(data: bytes) -> NDArray[np.int64]:
    """The integers in a field of a record."""
    found = unpack_integers(data)
    assert found is not None
    return found


def _check_length(body: Any) -> None:
    if len(body) > LARGEST_RECORD:
        raise ProtocolError(f"a record of {len(body)} bytes; {LARGEST_RECORD} are allowed")
