"""``penstock status``: the status of the node."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import WorkerError

if TYPE_CHECKING:
    from penstock.node.directory import NodeDirectory

EXAMPLE = """\
examples:
  penstock status          groups and members, staged batches, caches, saved preparations
  penstock status --watch  the same, refreshed every second until Ctrl-C
  penstock status --json   as JSON, for scripts; `null` if no node is running

The node is the process that prepares batches for all jobs with the same share="...". The first of
these jobs starts it, and it ends by itself after the last job has left.
"""

EVERY = 1.0
"""Seconds between two refreshes."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows the status of your node on this machine."
    parser.epilog = EXAMPLE
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--watch", action="store_true", help="refresh every second")
    output.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.client import request_status
    from penstock.node.directory import NodeDirectory

    directory = NodeDirectory()
    if arguments.watch:
        _watch(directory)
        return 0
    status = request_status(directory)
    if arguments.json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
    else:
        sys.stdout.write(_render(directory, status) + "\n")
    return 0


def _render(
    directory: NodeDirectory, status: dict[str, Any] | None, before: dict[str, Any] | None = None
) -> str:
    import penstock
    from penstock.host.text import printable
    from penstock.node.status import lines_of

    if status is None:
        log = f" The log of the last one is {directory.log}." if directory.log.exists() else ""
        return f"No node is running.{log}"
    release = status.get("release")
    if release != penstock.__version__:
        raise WorkerError(
            f"the node (process {status.get('pid')}) runs Penstock {release}, and this is "
            f"Penstock {penstock.__version__}, which may misread its status. `penstock status "
            "--json` prints the status as it is."
        )
    return printable("\n".join(lines_of(status, time.time(), before)), sys.stdout.encoding)


def _watch(directory: NodeDirectory) -> None:
    from penstock.host.redraw import redraw
    from penstock.node.client import request_status

    before: dict[str, Any] | None = None

    def refreshed() -> str:
        nonlocal before
        status = request_status(directory)
        text = _render(directory, status, before)
        before = status
        return text

    redraw(refreshed, EVERY)
