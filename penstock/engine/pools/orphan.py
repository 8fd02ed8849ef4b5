"""Ends a worker process with its parent. Imports little: a new worker calls it first of all."""

from __future__ import annotations

import ctypes
import os
import signal
import time

PR_SET_PDEATHSIG = 1
"""The constant of the kernel's headers."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends.

    A signal of the kernel also ends a worker that is stopped, or that holds the GIL in native code.
    The kernel sends it when the thread ends that started this process. ``parent``: process id.
    """
    # A system without prctl has watch_parent.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def watch_parent(parent: int) -> None:
    """End this process when its parent is gone: in a thread, where the kernel does not do it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
