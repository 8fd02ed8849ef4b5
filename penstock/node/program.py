"""The node as a program: detached from whoever started it, with its log as its only output."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from penstock import config
from penstock.node.place import Place
from penstock.node.service import Service, say


def main() -> None:
    """Run a node in the directory that is the first argument, unless there is one already."""
    place = Place(Path(sys.argv[1]))
    claim = _claimed(place)
    if claim is None:
        return
    # Ctrl-C in the terminal of the job that started it is not meant for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = Service(
        place,
        workers=config.node_workers(),
        staging=config.node_staging(),
        idle=config.node_idle(),
        say=say,
    )
    try:
        service.run()
    finally:
        os.close(claim)


def _claimed(place: Place) -> int | None:
    """The right to be the node; ``None`` where another is, and answers.

    One that is about to end has closed its door, and keeps the right until its workers are done.
    """
    while (claim := place.claim()) is None:
        other = place.connect()
        if other is not None:
            other.close()
            return None
        time.sleep(0.05)
    return claim
