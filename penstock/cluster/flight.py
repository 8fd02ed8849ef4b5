"""The transport between machines: Arrow Flight over TLS.

Control messages are Flight actions. Values and rows come by DoGet, offers go by DoPut: each Flight
message has a record in its metadata, and the buffers that belong to it as one Arrow column. The
column (type ``binary_view``) refers to the buffers where they are, so sending copies nothing.

gRPC receives the whole body of an action or a ticket before any code of ours can look at the token,
and pyarrow cannot limit the size of what a server receives. So TLS is not optional, and the server
accepts only clients that show the certificate of the cluster: others cannot send a request at all.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from penstock import config
from penstock.cluster.protocol import (
    CONTROL,
    LARGEST_RECORD,
    LARGEST_VALUE,
    LONGEST_REASON,
    MOST_LEAVES,
    REPLIES,
    AnswersHead,
    BatchHead,
    BatchPiece,
    Hello,
    HelloReply,
    Kept,
    Offered,
    Refusal,
    RefusalKind,
    RemoteTask,
    RowsHead,
    WantedBatch,
    WantedValues,
    decode,
    encode,
    integers,
)
from penstock.cluster.secrets import SERVER_NAME, Secrets
from penstock.cluster.transport import (
    FAULTS,
    Handler,
    KeyAnswer,
    Limits,
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
    value_messages,
)
from penstock.engine.pools.wire import ProtocolError
from penstock.errors import ClusterError, MissingExtraError

config.quiet_grpc()
try:
    import pyarrow as pa
    from pyarrow import flight
except ImportError as error:
    raise MissingExtraError.of("cluster=", "pyarrow", "cluster") from error

_log = logging.getLogger("penstock.cluster")

_TOKEN_HEADER, _HELLO_HEADER = "authorization", "penstock-hello-bin"
_ACTION = "control"
_CALLER = "caller"

_SCHEMA = pa.schema([pa.field("buffers", pa.binary_view(), nullable=False)])
_LONGEST_INLINE = 12
"""Bytes of the longest value that is part of its view."""

_LARGEST_MESSAGE = LARGEST_VALUE + LARGEST_RECORD + (1 << 20)

SILENCE = 10.0
"""Seconds after which a connection is lost if the other machine does not confirm what was sent."""


# ------------------------------------------------------------------------------------- messages


def _batch(buffers: Sequence[Any]) -> Any:
    """An Arrow batch with one value for each buffer, without a copy of those over 12 bytes."""
    views: list[bytes] = []
    held: list[Any] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if len(view) <= _LONGEST_INLINE:
            views.append(struct.pack("<i12s", len(view), bytes(view)))
        else:
            views.append(struct.pack("<i4sii", len(view), bytes(view[:4]), len(held), 0))
            held.append(pa.py_buffer(view))
    parts = [None, pa.py_buffer(b"".join(views)), *held]
    column = pa.Array.from_buffers(pa.binary_view(), len(buffers), parts)
    return pa.RecordBatch.from_arrays([column], schema=_SCHEMA)


def _buffers(batch: Any) -> list[memoryview]:
    """The buffers of a received batch, as views of its memory. Raises ValueError."""
    if not batch.schema.equals(_SCHEMA):
        raise ValueError("a batch of another type")
    batch.validate(full=True)  # the views come from another machine
    column = batch.column(0)
    if column.null_count:
        raise ValueError("a value that is missing")
    return [memoryview(value.as_buffer()) for value in column]


# --------------------------------------------------------------------------------------- server


class FlightServer:
    """Serves a handler to the machines that have the secrets, until ``close``.

    ``host``: the address to listen at. ``port`` 0 chooses a free one. ``hello``: this machine.
    """

    def __init__(
        self,
        handler: Handler,
        hello: Hello,
        secrets: Secrets,
        *,
        host: str,
        port: int = 0,
        limits: Limits = Limits(),  # noqa: B008
    ) -> None:
        try:
            self._service = _FlightService(
                handler, hello, secrets, _location(_join(host, port)), limits
            )
        except (OSError, pa.ArrowException) as error:
            raise ClusterError(
                f"the node cannot listen at {_join(host, port)}: {error}. Choose an address of "
                "this machine and a port that is free."
            ) from None
        self.port: int = self._service.port
        self.address = _join(host, self.port)

    def close(self, limit: float = 5.0) -> bool:
        """Stop serving. Calls end at their next message. Returns whether all ended in time."""
        self._service.closing = True
        # It waits for every call, even for one whose client does not read.
        thread = threading.Thread(
            target=self._service.shutdown, name="penstock-flight-close", daemon=True
        )
        thread.start()
        thread.join(limit)
        return not thread.is_alive()


class _FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight methods of a node. gRPC calls them in threads of its own."""

    def __init__(
        self, handler: Handler, hello: Hello, secrets: Secrets, location: str, limits: Limits
    ) -> None:
        self._handler = handler
        self._hello = hello
        self._calls = _Calls(limits)
        self.closing = False
        super().__init__(
            location,
            tls_certificates=[(secrets.certificate, secrets.key)],
            verify_client=True,
            root_certificates=secrets.certificate,
            middleware={_CALLER: _Gate(hello, secrets.token)},
        )

    def do_action(self, context: Any, action: Any) -> list[Any]:
        with self._serving(context) as peer:
            if action.type != _ACTION:
                raise _refused("nonsense", "this node has no such action")
            message = _request(_view(action.body), *CONTROL)
            if isinstance(message, Hello):
                reply: Any = HelloReply(*self._hello)
            else:
                reply = self._handler.control(peer, message)
            return [flight.Result(pa.py_buffer(encode(reply)))]

    def do_get(self, context: Any, ticket: Any) -> Any:
        peer = context.get_middleware(_CALLER).machine
        return flight.GeneratorStream(_SCHEMA, self._messages(peer, ticket.ticket))

    def _messages(self, peer: str, body: bytes) -> Iterator[Any]:
        # All of it happens in the generator, which ends in any case; do_get may not be followed
        # by anything if the client has gone.
        with self._serving_peer(peer):
            request = _request(body, WantedValues, RemoteTask, WantedBatch)
            heads: Iterator[tuple[Any, list[Any]]]
            if isinstance(request, WantedValues):
                heads = answer_messages(self._handler.get(peer, request), request.most_bytes)
            elif isinstance(request, WantedBatch):
                heads = batch_messages(*self._handler.batch(peer, request), request.most_bytes)
            else:
                heads = self._rows(peer, request)
            for head, buffers in heads:
                self._check_open()
                yield _batch(buffers), encode(head)

    def _rows(self, peer: str, task: RemoteTask) -> Iterator[tuple[RowsHead, list[Any]]]:
        counted = Received(0, task.most_bytes)
        for part in self._handler.run(peer, task):
            counted.take(sum(memoryview(leaf).nbytes for leaf in part.leaves))
            yield RowsHead(part.first, part.rows, part.report), part.leaves

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context) as peer:
            offered = _request(descriptor.command or b"", Offered)
            values = self._values(offered, reader)
            kept = self._handler.put(peer, offered, values)
            for _ in values:
                pass  # a client that is still sending would not read the reply
            writer.write(pa.py_buffer(encode(Kept(bytes(kept)))))

    def _values(self, offered: Offered, reader: Any) -> Iterator[memoryview]:
        """The offered values, as they arrive."""
        if not reader.schema.equals(_SCHEMA):
            raise _refused("nonsense", "values of another type")
        sizes = iter(integers(offered.sizes).tolist())
        with suppress(StopIteration):
            while True:
                self._check_open()
                try:
                    values = _buffers(reader.read_chunk().data)
                except (ValueError, AttributeError) as error:
                    raise _refused("nonsense", f"a message without values: {error}") from None
                for value in values:
                    if len(value) != next(sizes, -1):
                        _release_memory()
                        raise _refused("nonsense", "a value of another size than offered")
                    yield value
        if next(sizes, None) is not None:
            raise _refused("nonsense", "fewer values than offered")

    def do_exchange(self, context: Any, *_: Any) -> None:
        raise _refused("nonsense", "this node has no such call")

    list_actions = list_flights = get_flight_info = get_schema = do_exchange

    def _check_open(self) -> None:
        if self.closing:
            raise _refused("busy", "the node is shutting down")

    def _serving(self, context: Any) -> Any:
        return self._serving_peer(context.get_middleware(_CALLER).machine)

    @contextmanager
    def _serving_peer(self, peer: str) -> Iterator[str]:
        """Count a call, and tell its errors to the client in words."""
        with self._calls.counted(peer):
            try:
                self._check_open()
                yield peer
            except (flight.FlightError, GeneratorExit):
                raise
            except Refuse as refusal:
                raise _refused(refusal.kind, refusal.reason) from None
            except Exception as error:
                _log.exception("a call of machine %s has failed", peer)
                raise _refused("failed", type(error).__name__) from None


class _Calls:
    """Counts the calls that are being served."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, peer: str) -> Iterator[None]:
        limits = self._limits
        with self._lock:
            if self._of.total() >= limits.calls or self._of[peer] >= limits.calls_per_machine:
                raise _refused("busy", f"it serves {self._of.total()} calls")
            self._of[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._of[peer] -= 1
                if not self._of[peer]:
                    del self._of[peer]


class _Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks token, version and release of every call before it is served."""

    def __init__(self, hello: Hello, token: bytes) -> None:
        super().__init__()
        self._hello = hello
        self._expected = _bearer(token)

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> Any:
        given = [_as_bytes(value) for value in headers.get(_TOKEN_HEADER, ())]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            raise _refused("token", _WRONG_TOKEN)
        try:
            hello = decode(b"".join(map(_as_bytes, headers.get(_HELLO_HEADER, []))), Hello)
        except ProtocolError:
            raise _refused("nonsense", "the call does not say which machine it is from") from None
        mine = self._hello
        if (hello.version, hello.release) != (mine.version, mine.release):
            raise _refused("version", _versions(mine, hello))
        return _Caller(hello.machine)


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """The machine that a call comes from."""

    def __init__(self, machine: str) -> None:
        super().__init__()
        self.machine = machine


_WRONG_TOKEN = (
    "the token is missing or is not that of its cluster. Copy the secrets of the cluster to this "
    "machine again (PENSTOCK_CLUSTER_SECRET names their directory) and restart its node"
)


def _versions(mine: Hello, other: Hello) -> str:
    return (
        f"it runs Penstock {mine.release} (messages of version {mine.version}), and machine "
        f"{other.machine} runs Penstock {other.release} (version {other.version}). Install the "
        "same release of Penstock and Python on all machines"
    )


def _refused(kind: RefusalKind, reason: str) -> Exception:
    """The Flight error for a refusal. Its record travels as data, not as text to be parsed."""
    raised: Callable[..., Exception] = {
        "token": flight.FlightUnauthenticatedError,
        "version": flight.FlightUnauthorizedError,
        "busy": flight.FlightUnavailableError,
    }.get(kind, flight.FlightServerError)
    return raised(reason, encode(Refusal(kind, reason[:LONGEST_REASON])))


def _request(body: Any, *expected: type[tuple[Any, ...]]) -> Any:
    """The record of a request. Raises the Flight error of a refusal."""
    if len(body) > LARGEST_RECORD:
        _release_memory()
    try:
        return decode(body, *expected)
    except ProtocolError as error:
        raise _refused("nonsense", str(error)) from None


def _release_memory() -> None:
    """Return freed memory to the system. After 20 bodies of 32 MB, which gRPC receives in many
    pieces, the allocator would keep 350 MB."""
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _bearer(token: bytes) -> bytes:
    return b"Bearer " + token.hex().encode()


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")


def _view(buffer: Any) -> memoryview:
    return memoryview(b"" if buffer is None else buffer)


# --------------------------------------------------------------------------------------- client


def connect(
    address: str, secrets: Secrets, hello: Hello, *, timeout: float, silence: float = SILENCE
) -> FlightLink:
    """Connect to the node at ``address`` (host:port) and check that both fit. Raises PeerFault.

    ``silence``: seconds without confirmation from the other machine until the connection is lost.
    """
    deadline = time.monotonic() + timeout
    link = FlightLink(address, secrets, hello, silence)
    try:
        reply = link.control(hello, timeout=timeout)
        if not isinstance(reply, HelloReply):
            raise PeerNonsense(f"{address}: no HelloReply, but {type(reply).__name__}")
        link.machine, link.incarnation = reply.machine, reply.incarnation
        return link
    except PeerLost as lost:
        link.close()
        raise _tls_problem(address, secrets, deadline - time.monotonic()) or lost from None
    except BaseException:
        link.close()
        raise


class FlightLink:
    """A connection to the node of another machine; made by ``connect``."""

    def __init__(self, address: str, secrets: Secrets, hello: Hello, silence: float) -> None:
        self.machine = ""
        self.incarnation = 0
        self._address = address
        self._headers = [
            (_TOKEN_HEADER.encode(), _bearer(secrets.token)),
            (_HELLO_HEADER.encode(), encode(hello)),
        ]
        self._closed = False
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
        self._client = flight.FlightClient(
            _location(address),
            tls_root_certs=secrets.certificate,
            cert_chain=secrets.certificate,
            private_key=secrets.key,
            override_hostname=SERVER_NAME,
            generic_options=_channel_options(silence),
        )

    def control(self, message: Any, *, timeout: float) -> Any:
        with self._told():
            action = flight.Action(_ACTION, encode(message))
            for result in self._client.do_action(action, self._options(timeout)):
                return decode(_view(result.body), *REPLIES)
            raise ProtocolError("an empty reply")

    def get(self, wanted: WantedValues, *, timeout: float) -> Iterator[KeyAnswer]:
        # The call begins here, not with the first answer: several machines can be asked at once.
        return self._answers(wanted, self._stream(wanted, timeout))

    def _answers(self, wanted: WantedValues, stream: _Stream) -> Iterator[KeyAnswer]:
        received = Received(len(wanted.indices) // 8, wanted.most_bytes)
        with stream, self._told():
            for head, buffers in stream.messages(AnswersHead):
                for answer in split_answers(head, buffers):
                    received.answer(answer)
                    yield answer
            received.end()

    def run(self, task: RemoteTask, *, timeout: float) -> Iterator[RemoteRows]:
        return self._rows(task, self._stream(task, timeout))

    def _rows(self, task: RemoteTask, stream: _Stream) -> Iterator[RemoteRows]:
        received = Received(len(task.indices) // 8, task.most_bytes)
        with stream, self._told():
            for head, leaves in stream.messages(RowsHead):
                if len(leaves) > MOST_LEAVES:
                    raise ValueError(f"{len(leaves)} leaves")
                received.take(sum(map(len, leaves)))
                for row in range(head.first, head.first + head.rows):
                    received.answer(KeyAnswer(row, "present"))
                yield RemoteRows(head.first, head.rows, leaves, head.report)
            received.end()

    def batch(
        self, wanted: WantedBatch, *, timeout: float
    ) -> tuple[BatchHead, Iterator[memoryview]]:
        stream = self._stream(wanted, timeout)
        with self._told():
            messages = stream.messages(BatchHead, BatchPiece)
            head, buffers = next(messages, (None, []))
            if not isinstance(head, BatchHead) or buffers or head.nbytes > wanted.most_bytes:
                stream.close()
                raise ProtocolError("no head of a batch, or one of too many bytes")
        return head, self._pieces(head.nbytes, messages, stream)

    def _pieces(
        self, nbytes: int, messages: Iterator[Any], stream: _Stream
    ) -> Iterator[memoryview]:
        with stream, self._told():
            yield from batch_pieces(messages, nbytes)

    def put(self, offered: Offered, values: list[Any], *, timeout: float) -> list[bool]:
        with self._told():
            descriptor = flight.FlightDescriptor.for_command(encode(offered))
            writer, reader = self._client.do_put(descriptor, _SCHEMA, self._options(timeout))
            try:
                for group in value_messages(values):
                    writer.write_batch(_batch(group))
                writer.done_writing()
                reply = reader.read()
            finally:
                # If the node has refused the call, this raises its refusal; write_batch says only
                # that the stream has ended.
                writer.close()
            kept = decode(_view(reply), Kept).kept
            if len(kept) != len(values):
                raise ProtocolError(f"{len(kept)} flags for {len(values)} values")
            return [bool(flag) for flag in kept]

    def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.close()
        self._client.close()

    def _stream(self, request: WantedValues | RemoteTask | WantedBatch, timeout: float) -> _Stream:
        with self._told():
            ticket = flight.Ticket(encode(request))
            stream = _Stream(self._client.do_get(ticket, self._options(timeout)))
        self._streams.add(stream)
        if self._closed:
            stream.close()
        return stream

    def _options(self, timeout: float) -> Any:
        if self._closed:
            raise PeerLost(f"{self._name()}: the connection is closed")
        if timeout <= 0:
            raise PeerSlow(f"{self._name()}: no time is left for the call")
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn errors of gRPC, Arrow and our checks into PeerFault."""
        try:
            yield
        except (flight.FlightError, pa.ArrowException, ProtocolError, ValueError, OSError) as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> PeerFault:
        name = self._name()
        with suppress(ProtocolError):
            refusal = decode(getattr(error, "extra_info", b"") or b"", Refusal)
            reason = refusal.reason.removesuffix(".")
            return FAULTS[refusal.kind](f"{name} refuses the call: {reason}.")
        if self._closed:
            return PeerLost(f"{name}: the connection is closed")
        if isinstance(error, flight.FlightTimedOutError):
            return PeerSlow(f"{name} did not answer in time")
        if isinstance(error, flight.FlightUnavailableError):
            return PeerLost(f"{name} cannot be reached: {_first_line(error)}")
        # gRPC cancels a call itself if a message is larger than the limit.
        return PeerNonsense(f"{name} sent no valid reply: {_first_line(error)}")

    def _name(self) -> str:
        return f"{self.machine} ({self._address})" if self.machine else self._address


class _Stream:
    """The messages of one DoGet. The call ends when this is closed or collected."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def messages(self, *kinds: type[tuple[Any, ...]]) -> Iterator[tuple[Any, list[memoryview]]]:
        if not self._reader.schema.equals(_SCHEMA):
            raise ValueError("values of another type")
        for chunk in self._reader:
            if chunk.data is None:
                raise ValueError("a message without values")
            yield decode(_view(chunk.app_metadata), *kinds), _buffers(chunk.data)

    def close(self) -> None:
        self._reader.cancel()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _channel_options(silence: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
        ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        # The node decides what is tried again, and where.
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # Machines of a cluster are not behind the proxy of http_proxy.
        ("grpc.enable_http_proxy", 0),
        # With keepalive gRPC sets TCP_USER_TIMEOUT: a cut link ends the connection after
        # ``silence``. gRPC's own pings do not help: a server tolerates one in five minutes.
        ("grpc.keepalive_time_ms", 330_000),
        ("grpc.keepalive_timeout_ms", int(silence * 1000)),
        # A machine that is back is to be reached soon; the default grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def _tls_problem(address: str, secrets: Secrets, timeout: float) -> PeerRefused | None:
    """Why TLS with the node at ``address`` fails; ``None`` if it does not.

    gRPC reports a wrong certificate as a machine that cannot be reached.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    host, _, port = address.rpartition(":")
    try:
        context.load_verify_locations(cadata=secrets.certificate.decode("ascii"))
        target = (host.strip("[]"), int(port))
        with (
            socket.create_connection(target, timeout=max(0.1, timeout)) as plain,
            context.wrap_socket(plain, server_hostname=SERVER_NAME),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return PeerRefused(
            f"{address} shows another certificate than that of this machine's cluster "
            f"({error.verify_message}). Copy the secrets of the cluster to both machines again "
            "(PENSTOCK_CLUSTER_SECRET names their directory), check that their clocks are right, "
            "and restart their nodes."
        )
    except ssl.SSLError as error:
        return PeerRefused(
            f"{address} is not a node of a cluster: TLS fails ({error.reason}). Check the address "
            "and the port."
        )
    except (OSError, ValueError):
        return None


def _location(address: str) -> str:
    return f"grpc+tls://{address}"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _first_line(error: Exception) -> str:
    # What follows is gRPC's context, for people who debug gRPC.
    return str(error).partition(". gRPC client debug context")[0].partition("\n")[0][:300]
