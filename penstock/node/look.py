"""Asking the node how it is, without becoming a member and without starting one."""

from __future__ import annotations

from typing import Any

from penstock.node.place import Place
from penstock.pools.wire import Wire


def look(place: Place | None = None) -> dict[str, Any] | None:
    """What ``status_of`` says of the node of this user; ``None`` where there is none."""
    return _ask(place or Place(), "look")


def stop(place: Place | None = None) -> dict[str, Any] | None:
    """End the node, and say how it was; members that are still there start another."""
    return _ask(place or Place(), "stop")


def _ask(place: Place, word: str) -> dict[str, Any] | None:
    sock = place.connect()
    if sock is None:
        return None
    wire = Wire(sock)
    try:
        wire.send([word])
        received = wire.receive()
    except (BrokenPipeError, ConnectionResetError):
        return None
    finally:
        wire.close()
    return None if received is None else received[0][1]
