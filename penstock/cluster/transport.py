"""The contract between the nodes of a cluster: what a node serves, and how it calls another.

``cluster/flight.py`` is the body that crosses machines. Tests have another one, in one process
(``tests/support/fabric.py``). The tests of the contract run over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from penstock.cluster.protocol import (
    ANSWER_STATES,
    LARGEST_VALUE,
    AnswersHead,
    AnswerState,
    BatchHead,
    BatchPiece,
    Offered,
    RefusalKind,
    RemoteTask,
    WantedBatch,
    WantedValues,
    integers,
)
from penstock.errors import ClusterError

MESSAGE = 4 << 20
"""Bytes of values in one message, if no single value is larger."""

_MOST_ANSWERS = 4096
"""Answers in one message."""


class PeerFault(Exception):
    """A call to another machine has failed. ``str()`` names the machine and the reason."""


class PeerLost(PeerFault):
    """The machine cannot be reached, or the connection was reset."""


class PeerSlow(PeerFault):
    """The machine did not answer in time, or has too many calls at present."""


class PeerNonsense(PeerFault):
    """The machine sent a malformed or oversized reply, or failed to make one."""


class PeerRefused(PeerFault, ClusterError):
    """The machine refuses this one: another token, certificate or version. Never tried again."""


class PeerLacks(PeerFault):
    """The machine has no way to get the pipeline of a task."""


class PeerFailed(PeerFault):
    """The machine could not prepare samples of a task."""


class PeerDeadly(PeerFailed):
    """A sample of the task killed workers of the machine."""


class Refuse(Exception):
    """Raised by a handler that does not serve a call. ``reason`` is sent to the caller."""

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


FAULTS: dict[RefusalKind, Callable[[str], PeerFault]] = {
    "token": PeerRefused,
    "version": PeerRefused,
    "busy": PeerSlow,
    "nonsense": PeerRefused,
    "failed": PeerNonsense,
    "recipe": PeerLacks,
    "sample": PeerFailed,
    "deadly": PeerDeadly,
}
"""What a refusal is for the caller."""


class KeyAnswer(NamedTuple):
    """The answer for one key of a request; ``place`` is the key's position in the request.

    ``moved``: the machine ``moved_to`` has the value. ``later``: there was no room left for the
    value in the answer; ask again.
    """

    place: int
    state: AnswerState
    value: Any = None
    moved_to: str = ""


class RemoteRows(NamedTuple):
    """Prepared rows of a tiny-batch, as one buffer for each leaf, and a report in plain data."""

    first: int
    rows: int
    leaves: list[Any]
    report: dict[str, Any]


class Handler(Protocol):
    """What a machine serves. Called in several threads at once.

    ``peer``: the name of the calling machine, which has the token of this cluster. Values are
    buffers of bytes, and are sent without a copy: an object that is yielded must own its memory,
    and the memory must not change while the object is referenced. Not even the end of the iterator
    says that everything was sent. A handler that does not serve a call raises ``Refuse``.
    """

    def control(self, peer: str, message: Any) -> Any:
        """The answer to a control message (``protocol.CONTROL``, except ``Hello``)."""

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        """One answer for each key. Each list is sent at once: the answers that are ready first,
        those that have to wait later."""

    def put(self, peer: str, offered: Offered, values: Iterator[memoryview]) -> list[bool]:
        """Which of the offered values this machine keeps. They arrive as ``values`` is read."""

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]:
        """The rows of a tiny-batch, as they get ready."""

    def batch(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]:
        """A prepared batch: its head, and buffers of ``nbytes`` in all. Waits for it, but not
        longer than ``wanted.wait``."""


class Link(Protocol):
    """A connection to another machine. Several threads may use it at once.

    Every call has a ``timeout`` in seconds, and raises PeerFault. An iterator that is closed early
    ends the call. Received buffers stay valid as long as they are referenced.
    """

    machine: str
    incarnation: int

    def control(self, message: Any, *, timeout: float) -> Any:
        """Send a control message and return the answer."""

    def get(self, wanted: WantedValues, *, timeout: float) -> Iterator[KeyAnswer]:
        """The answers, exactly one for each key, in any order."""

    def put(self, offered: Offered, values: list[Any], *, timeout: float) -> list[bool]:
        """Offer values. Returns which of them the machine keeps."""

    def run(self, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        """Let the machine prepare a tiny-batch."""

    def batch(
        self, wanted: WantedBatch, *, timeout: float
    ) -> tuple[BatchHead, Iterator[memoryview]]:
        """Ask for a prepared batch. Waits for its head; the pieces, of ``nbytes`` in all, follow
        in order."""

    def close(self) -> None:
        """End the connection. Calls that are under way fail with PeerLost."""


class Received:
    """Checks answers as they arrive: one for each key, within the bytes that were asked for."""

    def __init__(self, keys: int, most_bytes: int) -> None:
        self._open = set(range(keys))
        self._most = most_bytes
        self._nbytes = 0

    def answer(self, answer: KeyAnswer) -> None:
        """Raises ValueError for an answer that was not asked for."""
        if answer.place not in self._open:
            raise ValueError(f"an answer for place {answer.place}, which is not open")
        self._open.remove(answer.place)
        if answer.value is not None:
            self.take(len(answer.value), alone=not self._nbytes)

    def take(self, nbytes: int, *, alone: bool = False) -> None:
        """Count received bytes. Raises ValueError for more than were asked for.

        ``alone``: the first value, which may be larger than that.
        """
        self._nbytes += nbytes
        if self._nbytes > self._most and not alone:
            raise ValueError("more bytes than were asked for")

    def end(self) -> None:
        """Raises ValueError if answers are missing."""
        if self._open:
            raise ValueError(f"no answer for {len(self._open)} samples")


def answer_messages(
    groups: Iterator[list[KeyAnswer]], most_bytes: int
) -> Iterator[tuple[AnswersHead, list[Any]]]:
    """The answers of a handler as messages of about ``MESSAGE`` bytes.

    Values that exceed ``most_bytes`` in all become ``later``. The first value is sent in any case,
    so that every value can be had. One that is too large for a message becomes ``absent``.
    """
    sent = 0
    for group in groups:
        joined: list[KeyAnswer] = []
        nbytes = 0
        for given in group:
            answer, size = given, 0
            if given.state == "present":
                size = len(given.value)
                if size > LARGEST_VALUE:
                    answer, size = KeyAnswer(given.place, "absent"), 0
                elif sent and sent + size > most_bytes:
                    answer, size = KeyAnswer(given.place, "later"), 0
            if joined and (nbytes + size > MESSAGE or len(joined) >= _MOST_ANSWERS):
                yield _message(joined)
                joined, nbytes = [], 0
            joined.append(answer)
            nbytes += size
            sent += size
        if joined:
            yield _message(joined)


def _message(answers: list[KeyAnswer]) -> tuple[AnswersHead, list[Any]]:
    places = b"".join(answer.place.to_bytes(8, "little") for answer in answers)
    states = bytes(ANSWER_STATES.index(answer.state) for answer in answers)
    moved_to = [answer.moved_to for answer in answers if answer.state == "moved"]
    values = [answer.value for answer in answers if answer.state == "present"]
    return AnswersHead(places, states, moved_to), values


def split_answers(head: AnswersHead, values: list[memoryview]) -> Iterator[KeyAnswer]:
    """The answers of a message. Raises ValueError."""
    if len(values) != head.states.count(ANSWER_STATES.index("present")):
        raise ValueError("another number of values than of present answers")
    value, moved_to = iter(values), iter(head.moved_to)
    for place, number in zip(integers(head.places).tolist(), head.states, strict=True):
        state = ANSWER_STATES[number]
        if state == "present":
            yield KeyAnswer(place, state, next(value))
        else:
            yield KeyAnswer(place, state, None, next(moved_to) if state == "moved" else "")


def batch_messages(
    head: BatchHead, buffers: list[Any], most_bytes: int
) -> Iterator[tuple[Any, list[Any]]]:
    """A batch as messages: its head alone, then its bytes in pieces of at most ``MESSAGE``.

    The head comes first and alone, so that the receiver can measure how long the bytes take.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if sum(map(len, views)) != head.nbytes:
        raise ValueError(f"a batch of {sum(map(len, views))} bytes, and not {head.nbytes}")
    if head.nbytes > most_bytes:
        yield BatchHead.without("unsendable"), []
        return
    yield head, []
    first = 0
    for view in views:
        for start in range(0, len(view), MESSAGE):
            piece = view[start : start + MESSAGE]
            yield BatchPiece(first), [piece]
            first += len(piece)


def batch_pieces(
    messages: Iterator[tuple[Any, list[memoryview]]], nbytes: int
) -> Iterator[memoryview]:
    """The pieces of a batch. Raises ValueError if they are not ``nbytes``, or not in order."""
    first = 0
    for head, buffers in messages:
        if not isinstance(head, BatchPiece) or head.first != first:
            raise ValueError("a piece of a batch out of order")
        for buffer in buffers:
            first += len(buffer)
            if first > nbytes:
                raise ValueError("more bytes than the head of the batch says")
            yield buffer
    if first != nbytes:
        raise ValueError(f"{first} bytes of a batch, and not {nbytes}")


def value_messages(values: list[Any]) -> Iterator[list[Any]]:
    """Offered values as messages of about ``MESSAGE`` bytes."""
    joined: list[Any] = []
    nbytes = 0
    for value in values:
        if joined and (nbytes + len(value) > MESSAGE or len(joined) >= _MOST_ANSWERS):
            yield joined
            joined, nbytes = [], 0
        joined.append(value)
        nbytes += len(value)
    if joined:
        yield joined


class Limits(NamedTuple):
    """What a node serves at the same time: calls of all machines, and of each machine.

    A machine asks each owner once per batch, and works a few batches ahead.
    """

    calls: int = 256
    calls_per_machine: int = 32
