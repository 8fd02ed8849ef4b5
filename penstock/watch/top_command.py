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
            _write(view, as_json=arguments.json)
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
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    redraws = console.is_terminal and not console.is_dumb_terminal and not as_json
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view.look()
            if redraws:
                live.update(Text(_shown(view)), refresh=True)
            else:
                # What is saved or piped keeps every look, one below the other.
                _write(view, as_json=as_json, gap=True)
            time.sleep(interval)


def _write(view: View, *, as_json: bool, gap: bool = False) -> None:
    shown = json.dumps(view.plain()) if as_json else _shown(view) + ("\n" if gap else "")
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()


def _shown(view: View) -> str:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return "\n".join(view.lines(plain=not encoding.startswith("utf")))
