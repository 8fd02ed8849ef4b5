"""``penstock top``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.watch.view import View

EXAMPLE = """\
examples:
  penstock top                 drawn anew every second until Ctrl-C
  penstock top --interval 5    every five seconds
  penstock top --once          one look
  penstock top --once --json   for scripts

Every process that iterates a loader says twice a second how it is, unless PENSTOCK_LIVE=0 is set
there. What is shown as `now` happened between the last two looks.
"""

EVERY = 1.0
"""Seconds between two looks."""

SHORTEST = 0.1

LOOKS = 3
"""How often ``--once`` looks again for what has happened meanwhile."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows how the loaders of this user on this machine are doing."
    parser.epilog = EXAMPLE
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each look")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=EVERY,
        metavar="S",
        help="seconds between two looks (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.watch.view import View

    view = View()
    try:
        if arguments.once:
            _look_twice(view, arguments.interval)
            sys.stdout.write(_shown(view, as_json=arguments.json) + "\n")
        else:
            _watch(view, arguments.interval, as_json=arguments.json)
    except KeyboardInterrupt:
        pass  # that is how it is meant to end
    return 0


def _look_twice(view: View, interval: float) -> None:
    """What happens now takes two looks to see, and a few more where batches take long."""
    view.look()
    for _ in range(LOOKS):
        if all(course.before is not None for course in view.courses):
            break
        time.sleep(interval)
        view.look()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not SHORTEST <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between {SHORTEST} s and a day")
    return seconds


def _watch(view: View, interval: float, *, as_json: bool) -> None:
    from penstock.host.redraw import redraw

    def shown() -> str:
        view.look()
        return _shown(view, as_json=as_json)

    redraw(shown, interval, in_place=not as_json)


def _shown(view: View, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(view.plain())
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return "\n".join(view.lines(plain=not encoding.startswith("utf")))
