"""Ports on which a test listens later."""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)
"""Below the ports that the kernel gives to connections, and to whoever asks for any."""


def free_port() -> int:
    """A port that nobody has, and that the kernel gives to nobody else until the test has it."""
    for port in random.SystemRandom().sample(RANGE, 1000):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"1000 ports of {RANGE} are taken")
