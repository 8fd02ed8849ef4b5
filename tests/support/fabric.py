"""The transport of a cluster within one process, on a clock that tests move.

The calls of a link take no real time. Delays, losses and slow answers are set for each pair of
machines, and the clock moves by the time that a call would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.cluster.protocol import (
    CONTROL,
    REPLIES,
    AnswersHead,
    BatchHead,
    BatchPiece,
    Hello,
    HelloReply,
    Kept,
    Offered,
    RemoteTask,
    RowsHead,
    WantedBatch,
    WantedValues,
    decode,
    encode,
    integers,
)
from penstock.cluster.transport import (
    FAULTS,
    Handler,
    KeyAnswer,
    PeerFault,
    PeerLost,
    PeerNonsense,
    PeerRefused,
    PeerSlow,
    Received,
    Refuse,
    RemoteRows,
    answer_messages,
    batch_messages,
    batch_pieces,
    split_answers,
)
from penstock.engine.pools.wire import ProtocolError


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Path:
    """The way from one machine to another.

    ``delay``: seconds until the first answer. ``per_answer``: seconds for each group of answers.
    ``loses``: the next this many calls are reset. ``state``: a path that is ``silent`` swallows
    everything, so calls end at their deadline; one that is ``reset`` fails at once.
    """

    delay: float = 0.0
    per_answer: float = 0.0
    loses: int = 0
    state: Literal["open", "reset", "silent"] = "open"


@dataclass
class _Machine:
    hello: Hello
    handler: Handler
    token: bytes
    running: bool = True


@dataclass
class Fabric:
    """Machines in one process, and the paths between them."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    machines: dict[str, _Machine] = field(default_factory=dict)
    paths: dict[tuple[str, str], Path] = field(default_factory=dict)

    def serve(self, handler: Handler, hello: Hello, *, token: bytes = b"token") -> str:
        """Serve a handler; returns its address. A machine of the same name is replaced."""
        address = f"{hello.machine}:1"
        self.stop(address)
        self.machines[address] = _Machine(hello, handler, token)
        return address

    def stop(self, address: str) -> None:
        if address in self.machines:
            self.machines[address].running = False

    def path(self, caller: str, machine: str) -> Path:
        """The path that the calls of ``caller`` to ``machine`` take."""
        return self.paths.setdefault((caller, machine), Path())

    def connect(
        self, address: str, hello: Hello, *, timeout: float, token: bytes = b"token"
    ) -> FabricLink:
        machine = self.machines.get(address)
        if machine is None or not machine.running:
            raise PeerLost(f"{address} cannot be reached")
        if machine.token != token:
            raise PeerRefused(f"{address} refuses the call: the token is wrong; copy the secrets")
        mine = machine.hello
        if (mine.version, mine.release) != (hello.version, hello.release):
            raise PeerRefused(
                f"{address} refuses the call: it runs {mine.release}, version {mine.version}, and "
                f"{hello.machine} runs {hello.release}, version {hello.version}; install the same"
            )
        link = FabricLink(self, machine, hello)
        link.control(hello, timeout=timeout)
        return link


class FabricLink:
    """A connection of ``Fabric``. The handler runs in the thread of the caller."""

    def __init__(self, fabric: Fabric, machine: _Machine, hello: Hello) -> None:
        self.machine = machine.hello.machine
        self.incarnation = machine.hello.incarnation
        self._fabric = fabric
        self._other = machine
        self._me = hello.machine
        self._closed = False

    def control(self, message: Any, *, timeout: float) -> Any:
        self._travel(timeout)
        with self._told():
            received = decode(encode(message), *CONTROL)
            if isinstance(received, Hello):
                reply: Any = HelloReply(*self._other.hello)
            else:
                reply = self._served(lambda: self._other.handler.control(self._me, received))
            return decode(encode(reply), *REPLIES)

    def get(self, wanted: WantedValues, *, timeout: float) -> Iterator[KeyAnswer]:
        deadline = self._travel(timeout)
        with self._told():
            asked = decode(encode(wanted), WantedValues)
        return self._answers(asked, deadline)

    def _answers(self, wanted: WantedValues, deadline: float) -> Iterator[KeyAnswer]:
        received = Received(len(wanted.indices) // 8, wanted.most_bytes)
        with self._told():
            groups = self._items(self._other.handler.get(self._me, wanted), deadline)
            for head, values in answer_messages(groups, wanted.most_bytes):
                copies = [memoryview(bytes(value)) for value in values]
                for answer in split_answers(decode(encode(head), AnswersHead), copies):
                    received.answer(answer)
                    yield answer
            received.end()

    def put(self, offered: Offered, values: list[Any], *, timeout: float) -> list[bool]:
        self._travel(timeout)
        with self._told():
            asked = decode(encode(offered), Offered)
            if [len(value) for value in values] != integers(asked.sizes).tolist():
                raise PeerRefused(f"{self.machine} refuses the call: other sizes than offered")
            sent = (memoryview(bytes(value)) for value in values)
            kept = self._served(lambda: self._other.handler.put(self._me, asked, sent))
            flags = decode(encode(Kept(bytes(kept))), Kept).kept
            if len(flags) != len(values):
                raise ProtocolError(f"{len(flags)} flags for {len(values)} values")
            return [bool(flag) for flag in flags]

    def run(self, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        deadline = self._travel(timeout)
        with self._told():
            asked = decode(encode(task), RemoteTask)
        return self._rows(asked, deadline)

    def _rows(self, task: RemoteTask, deadline: float) -> Iterator[RemoteRows]:
        received = Received(len(task.indices) // 8, task.most_bytes)
        with self._told():
            for part in self._items(self._other.handler.run(self._me, task), deadline):
                head = decode(encode(RowsHead(part.first, part.rows, part.report)), RowsHead)
                leaves = [memoryview(bytes(leaf)) for leaf in part.leaves]
                received.take(sum(map(len, leaves)))
                for row in range(head.first, head.first + head.rows):
                    received.answer(KeyAnswer(row, "present"))
                yield RemoteRows(head.first, head.rows, leaves, head.report)
            received.end()

    def batch(
        self, wanted: WantedBatch, *, timeout: float
    ) -> tuple[BatchHead, Iterator[memoryview]]:
        deadline = self._travel(timeout)
        with self._told():
            asked = decode(encode(wanted), WantedBatch)
            head, rows = self._served(lambda: self._other.handler.batch(self._me, asked))
            messages = self._items(
                self._encoded(batch_messages(head, rows, asked.most_bytes)), deadline
            )
            head, buffers = next(messages, (None, []))
            if not isinstance(head, BatchHead) or buffers or head.nbytes > wanted.most_bytes:
                raise ProtocolError("no head of a batch, or one of too many bytes")
        return head, self._pieces(head.nbytes, messages)

    def _encoded(self, messages: Iterator[Any]) -> Iterator[Any]:
        for head, buffers in messages:
            copies = [memoryview(bytes(buffer)) for buffer in buffers]
            yield decode(encode(head), BatchHead, BatchPiece), copies

    def _pieces(self, nbytes: int, messages: Iterator[Any]) -> Iterator[memoryview]:
        with self._told():
            yield from batch_pieces(messages, nbytes)

    def close(self) -> None:
        self._closed = True

    def _items(self, items: Iterator[Any], deadline: float) -> Iterator[Any]:
        """The answers of the handler, each after the time that it takes."""
        while True:
            self._check_open()
            try:
                item = self._served(lambda: next(items, None))
            except ProtocolError as error:
                raise PeerNonsense(f"{self.machine}: {error}") from None
            if item is None:
                return
            per_answer = self._fabric.path(self._me, self.machine).per_answer
            if self._fabric.clock.now + per_answer > deadline:
                self._fabric.clock.now = deadline
                raise PeerSlow(f"{self.machine} did not answer in time")
            self._fabric.clock.advance(per_answer)
            yield item

    def _travel(self, timeout: float) -> float:
        """Let a call reach the other machine; returns its deadline."""
        clock, path = self._fabric.clock, self._fabric.path(self._me, self.machine)
        self._check_open()
        if path.loses:
            path.loses -= 1
            raise PeerLost(f"{self.machine} cannot be reached: reset")
        if timeout <= 0 or path.state == "silent" or path.delay > timeout:
            clock.advance(max(0.0, timeout))
            raise PeerSlow(f"{self.machine} did not answer in time")
        clock.advance(path.delay)
        return clock.now - path.delay + timeout

    def _check_open(self) -> None:
        path = self._fabric.path(self._me, self.machine)
        if self._closed or not self._other.running or path.state == "reset":
            raise PeerLost(f"{self.machine} cannot be reached")

    def _served(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Refuse as refusal:
            raise FAULTS[refusal.kind](f"{self.machine}: {refusal.reason}") from None
        except Exception as error:
            raise PeerNonsense(f"{self.machine}: {type(error).__name__}") from None

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except PeerFault:
            raise
        except (ProtocolError, ValueError) as error:
            raise PeerNonsense(f"{self.machine} sent no valid reply: {error}") from None
