"""The node's program. It runs detached from the job that started it; its output is its log."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from penstock import config
from penstock.node.directory import NodeDirectory
from penstock.node.log import LogHandler, log_stream
from penstock.node.service import Service


def main() -> None:
    """Run a node, unless one is running in its directory.

    Arguments: the directory, the import path (see ``client``), and the descriptor of a pipe for the
    reason why the node cannot start. The disk of the log may be full.
    """
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)
    reasons = int(sys.argv[3])
    try:
        service, claim = _prepare(NodeDirectory(Path(sys.argv[1])))
    except BaseException:
        report = traceback.format_exc()
        sys.stderr.write(report)
        with suppress(OSError):
            os.write(reasons, report.encode(errors="backslashreplace")[-60_000:])
        raise SystemExit(1) from None
    if service is None or claim is None:
        return
    try:
        service.run()
    finally:
        os.close(claim)


def _prepare(directory: NodeDirectory) -> tuple[Service | None, int | None]:
    """A service that listens, and the claim to its directory; ``None`` if another node runs."""
    claim = _claim(directory)
    if claim is None:
        return None, None
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
        descriptors=raise_descriptor_limit(),
    )
    service.listen()
    return service, claim


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as this user may. Returns the limit.

    A shell's limit is often 1,024, and each staged batch takes descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


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
