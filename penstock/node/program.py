"""The node's program. It runs detached from the job that started it; its output is its log."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from penstock import config
from penstock.node.directory import NodeDirectory
from penstock.node.service import Service


class LogHandler(logging.Handler):
    """Writes log lines with date and time to a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk must not stop the node
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()


def main() -> None:
    """Run a node in the directory given as first argument, unless one is running there."""
    directory = NodeDirectory(Path(sys.argv[1]))
    claim = _claim(directory)
    if claim is None:
        return
    # Ctrl-C in the terminal of the job that started the node must not end the node.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # `kill -USR2` makes a node that hangs write the stacks of its threads to its log.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logger = logging.getLogger("penstock.node")
    logger.addHandler(LogHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    # User code in this process may set up the root logger, whose handlers would repeat each line.
    logger.propagate = False
    service = Service(
        directory,
        workers=config.node_workers(),
        staging=config.node_staging(),
        idle=config.node_idle(),
    )
    try:
        service.run()
    finally:
        os.close(claim)


def _claim(directory: NodeDirectory) -> int | None:
    """Claim the directory; ``None`` if a node is running there and accepts connections.

    A node that is about to end has closed its socket already, and holds the claim until its
    workers have finished. Wait for it.
    """
    while (claim := directory.claim()) is None:
        running = directory.connect()
        if running is not None:
            running.close()
            return None
        time.sleep(0.05)
    return claim
