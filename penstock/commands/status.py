"""``penstock status``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.errors import WorkerError

if TYPE_CHECKING:
    from penstock.node.place import Place

EXAMPLE = """\
examples:
  penstock status          groups, members, what is staged, kept and saved
  penstock status --watch  the same, drawn anew every second until Ctrl-C
  penstock status --json   for scripts; `null` where no node is running

The node is the process that prepares batches for all jobs that have share="..." in common. The
first of them starts it, and it ends by itself when the last has gone.
"""

EVERY = 1.0
"""Seconds between two looks."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows what the node of this user on this machine is doing."
    parser.epilog = EXAMPLE
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="draw it anew every second")
    how.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.look import look
    from penstock.node.place import Place

    place = Place()
    if arguments.watch:
        _watch(place)
        return 0
    found = look(place)
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(_shown(place, found) + "\n")
    return 0


def _shown(place: Place, found: dict[str, Any] | None, before: dict[str, Any] | None = None) -> str:
    import penstock
    from penstock.node.rendering import lines_of

    if found is None:
        log = f" The log of the last one is {place.log}." if place.log.exists() else ""
        return f"No node is running.{log}"
    release = found.get("release")
    if release != penstock.__version__:
        raise WorkerError(
            f"the node (process {found.get('pid')}) is one of Penstock {release}, and this is "
            f"{penstock.__version__}. `penstock status --json` shows what it says."
        )
    return "\n".join(lines_of(found, time.time(), before))


def _watch(place: Place) -> None:
    from penstock.host.redraw import redraw
    from penstock.node.look import look

    before: dict[str, Any] | None = None

    def shown() -> str:
        nonlocal before
        found = look(place)
        text = _shown(place, found, before)
        before = found
        return text

    redraw(shown, EVERY)
