"""Asking the node how it is, without becoming a member and without starting one."""

from __future__ import annotations

import os
import select
import time
from typing import Any

from penstock.engine.pools.wire import Wire
from penstock.errors import WorkerError
from penstock.node.place import Place, peer_of
from penstock.node.protocol import VOCABULARY, EndNode, Look

PATIENCE = 30.0
"""Seconds that a node may take to answer, or to end: it may be waiting for the disk."""

_STEP = 0.05


def look(place: Place | None = None, *, patience: float = PATIENCE) -> dict[str, Any] | None:
    """What ``status_of`` says of the node of this user; ``None`` where there is none."""
    return _ask(place or Place(), Look(), patience)


def stop(place: Place | None = None, *, patience: float = PATIENCE) -> dict[str, Any] | None:
    """End the node, and say how it was; members that are still there start another."""
    return _ask(place or Place(), EndNode(), patience)


def gone(pid: int, patience: float = PATIENCE) -> bool:
    """Wait until a process has ended; false where it has not within ``patience`` seconds.

    With it goes its lock. Trying for that instead would keep a node from starting that members
    may be starting at this moment.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # an old kernel or Python, or a container that forbids it
        return _vanished(pid, patience)
    try:
        ended, _, _ = select.select([fd], [], [], patience)
        return bool(ended)
    finally:
        os.close(fd)


def _vanished(pid: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(_STEP)
    return False


def _ask(place: Place, question: Look | EndNode, patience: float) -> dict[str, Any] | None:
    sock = place.connect()
    if sock is None:
        return None
    pid, _ = peer_of(sock)
    sock.settimeout(patience)
    wire = Wire(sock, VOCABULARY)
    try:
        wire.send(question)
        received = wire.receive()
    except (BrokenPipeError, ConnectionResetError):
        return None
    except TimeoutError:
        raise WorkerError(
            f"the node (process {pid}) does not answer within {patience:g} s. Its log is "
            f"{place.log}. If it hangs, end it with `kill -9 {pid}`: its members start another "
            "and lose nothing."
        ) from None
    finally:
        wire.close()
    return None if received is None else received[0].status
