"""Processes that benchmarks start besides ``run_alone``: waiting for them, and ending them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

POLL_INTERVAL = 0.002
"""Seconds between two checks of a condition."""

NODE_END_TIMEOUT = 5.0
"""Seconds that a node may take to end."""

PR_SET_PDEATHSIG = 1
"""The constant of the kernel's headers."""


def wait_until(
    reached: Callable[[], bool], check: Callable[[], None], timeout: float, failure: str
) -> None:
    """Wait until ``reached()`` is true. ``check`` raises if that has become impossible.

    ``failure`` says in the error message what has not happened.
    """
    give_up = time.monotonic() + timeout
    while not reached():
        check()
        if time.monotonic() > give_up:
            raise TimeoutError(f"{failure} after {timeout:.0f} s")
        time.sleep(POLL_INTERVAL)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by SIGKILL. Signals to the
    parent's session do not reach this process, which may be in its own session."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_node(directory: Path) -> None:
    """End the node that uses a runtime directory, and wait until it has ended."""
    from penstock.node.client import request_end
    from penstock.node.directory import NodeDirectory

    node_state = None
    with contextlib.suppress(OSError):
        node_state = request_end(NodeDirectory(directory))
    if node_state is None:
        return
    # The node is not our child: it may stay a zombie until its parent reaps it.
    give_up = time.monotonic() + NODE_END_TIMEOUT
    with contextlib.suppress(psutil.NoSuchProcess):
        node = psutil.Process(int(node_state["pid"]))
        while node.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up:
            time.sleep(POLL_INTERVAL)
