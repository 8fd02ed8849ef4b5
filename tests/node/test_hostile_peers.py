"""Processes of the same user that send nonsense, or never read, disturb no other job."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.pools.wire import Wire
from penstock.node import protocol
from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory
from penstock.node.protocol import (
    RELEASE,
    VERSION,
    VOCABULARY,
    BeginEpoch,
    GetStatus,
    Join,
    Refused,
    Want,
)
from penstock.node.service import Service
from tests.support import ROOT


def connected(directory: NodeDirectory) -> socket.socket:
    sock = directory.connect()
    assert sock is not None
    return sock


def rows(epoch: Any, count: int) -> list[float]:
    return [value for _ in range(count) for value in next(epoch).tolist()]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, -1])
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)

WORDS = list(VOCABULARY._records)


@st.composite
def records(draw: Any) -> list[Any]:
    """A word of the protocol, with fields of any types: as many as it has, or not."""
    word = draw(st.sampled_from([word for word in WORDS if word not in ("end", "several")]))
    count = len(VOCABULARY._records[word]._fields)
    count += draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    return [word, *draw(st.lists(values, min_size=max(0, count), max_size=max(0, count)))]


several = st.lists(records() | values, max_size=3).map(lambda inner: ["several", inner])


def encoded(message: Any) -> bytes:
    return b"\0" + bytes(msgpack.packb(message, use_bin_type=True))


packets = (
    st.binary(max_size=64)
    | values.map(encoded)
    | records().map(encoded)
    | several.map(encoded)
    | st.just(b"\1")
    | st.just(b"\0" + b"\x91" * 2000 + b"\x01")
    | st.just(b"\0" + bytes(1 << 17))
)


def send(sock: socket.socket, packet: bytes, descriptors: int) -> None:
    """Send a packet with descriptors of an empty file; stop if the node has closed the socket."""
    with tempfile.TemporaryFile() as file:
        fds = array("i", [file.fileno()] * descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if descriptors else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendmsg([packet], ancillary)


def test_nonsense_disturbs_no_other_job(service: Service) -> None:
    """Random bytes, well-formed records of wrong types, missing and surplus descriptors."""
    directory = service.directory
    pipeline = ps.from_dataset(np.arange(64.0)).batch(4)
    with pipeline.loader(seed=0, share="a", shuffle=False) as loader:
        epoch = iter(loader)
        assert rows(epoch, 1) == [0.0, 1.0, 2.0, 3.0]
        description = dict(service.groups["a"].description)

        @settings(
            max_examples=150,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
        )
        @given(st.lists(st.tuples(packets, st.integers(0, 12)), max_size=6), st.booleans())
        def attack(sent: list[tuple[bytes, int]], member: bool) -> None:
            with connected(directory) as sock:
                if member:
                    # In the group of the others, whose state must stay as it is.
                    join = Join(VERSION, RELEASE, "a", description, "0/1", 4, True, None, "detach")
                    Wire(sock, VOCABULARY).send(join)
                for packet, descriptors in sent:
                    send(sock, packet, descriptors)
            assert request_status(directory) is not None

        attack()
        assert rows(epoch, 15) == [float(value) for value in range(4, 64)]
        again = iter(loader)
        assert rows(again, 16) == [float(value) for value in range(64)]
        assert loader.stats().pool.restarts == 0


def test_values_that_would_spoil_the_group_are_refused(service: Service) -> None:
    """Records of the right shape whose values would fail later, in the turn of another member."""
    with ps.from_dataset(np.arange(64.0)).batch(4).loader(seed=0, share="a") as loader:
        epoch = iter(loader)
        next(epoch)
        description = dict(service.groups["a"].description)
        for bad in [
            Want("zero", 0, bytes(8), None, None),  # type: ignore[arg-type]
            Want(0, 1, bytes(7), None, None),
            Want(0, 1, bytes(16), bytes(8), None),
            BeginEpoch(0, -1, None, 0),
            BeginEpoch(0, "16", None, 0),  # type: ignore[arg-type]
        ]:
            with connected(service.directory) as sock:
                wire = Wire(sock, VOCABULARY)
                wire.send(Join(VERSION, RELEASE, "a", description, "0/1", 4, True, None, "detach"))
                assert wire.receive() is not None
                wire.send(bad)
                answer = wire.receive()
                assert answer is not None
                assert isinstance(answer[0], Refused), answer
        assert len(list(epoch)) == 15


def test_a_member_may_not_want_batches_without_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.group.MOST_WANTED", 8)
    with ps.from_dataset(np.arange(64.0)).batch(4).loader(seed=0, share="a") as loader:
        next(iter(loader))
        description = dict(service.groups["a"].description)
        with connected(service.directory) as sock:
            wire = Wire(sock, VOCABULARY)
            wire.send(Join(VERSION, RELEASE, "a", description, "5/9", 4, True, None, "wait"))
            for number in range(30):
                wire.send(Want(0, number, bytes(8 * 4), None, None))
            answers: list[Any] = []
            while not any(isinstance(answer, Refused) for answer in answers):
                received = wire.receive()
                assert received is not None
                answers.append(received[0])
                for fd in received[1]:
                    os.close(fd)
        assert protocol.MOST_WANTED > 8


def test_a_process_that_never_reads_is_disconnected_and_delays_nobody(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with ps.from_dataset(np.arange(64.0)).batch(4).loader(seed=0, share="a") as loader:
        epoch = iter(loader)
        next(epoch)
        with connected(service.directory) as deaf:
            wire = Wire(deaf, VOCABULARY)
            deaf.settimeout(60)  # a guard: a node that waits for us reads nothing any more
            with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012
                while True:
                    wire.send(GetStatus())
            assert len(list(epoch)) == 15
            assert request_status(service.directory) is not None
    assert "it reads no messages" in caplog.text


LIMITED = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from penstock.node.client import connect_or_start
from penstock.node.directory import NodeDirectory
connect_or_start(NodeDirectory())
"""


def start_limited(soft: int, hard: int) -> None:
    subprocess.run(
        [sys.executable, "-c", LIMITED.format(soft=soft, hard=hard)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_NODE_IDLE": "60"},
    )


def test_a_node_raises_its_limit_of_open_files(node_directory: NodeDirectory) -> None:
    start_limited(soft=50, hard=400)
    status = request_status(node_directory)
    assert status is not None
    assert status["descriptors"]["limit"] == 400
    assert 0 < status["descriptors"]["open"] < 50
    assert "may have 400 open files (ulimit -Hn)" in node_directory.log.read_text()
    # Fewer batches are staged than wanted, and all of them come.
    with ps.from_dataset(np.arange(150.0)).batch(1).loader(seed=0, share="a", prefetch=100) as one:
        assert sorted(batch.tolist()[0] for batch in one) == list(range(150))
        status = request_status(node_directory)
    assert status is not None
    assert status["groups"][0]["staged_batches"] <= 51


def test_without_free_descriptors_a_node_refuses_and_goes_on(
    node_directory: NodeDirectory,
) -> None:
    start_limited(soft=60, hard=60)
    before = request_status(node_directory)
    assert before is not None
    refused: list[str] = []
    connections = []
    while not refused:
        sock = connected(node_directory)
        connections.append(sock)
        assert len(connections) < 100
        wire = Wire(sock, VOCABULARY)
        with contextlib.suppress(BrokenPipeError):  # refused before it was asked
            wire.send(GetStatus())
        sock.settimeout(60)
        received = wire.receive()
        assert received is not None
        if isinstance(received[0], Refused):
            refused.append(received[0].reason)
    assert "60 open files" in refused[0]
    for sock in connections:
        sock.close()
    # It sees that they have gone when it comes to read from them.
    deadline = time.monotonic() + 60
    after = None
    while after is None and time.monotonic() < deadline:
        with connected(node_directory) as sock:
            wire = Wire(sock, VOCABULARY)
            with contextlib.suppress(BrokenPipeError):
                wire.send(GetStatus())
            received = wire.receive()
            if received is not None and not isinstance(received[0], Refused):
                after = received[0].status
    assert after is not None
    assert after["pid"] == before["pid"]
