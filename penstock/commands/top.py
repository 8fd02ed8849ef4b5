"""``penstock top``: running loaders in the terminal."""

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
  penstock top                 refreshed every second until Ctrl-C
  penstock top --interval 5    refreshed every five seconds
  penstock top --once          shown once
  penstock top --once --json   as JSON, for scripts

Every process that iterates a loader publishes its status twice a second, unless PENSTOCK_LIVE=0 is
set there. Figures marked `now` are averages over the time since the previous refresh.
"""

EVERY = 1.0
"""Default seconds between two refreshes."""

SHORTEST = 0.1

LOOKS = 3
"""Most further looks that ``--once`` takes to get a second snapshot of every loader."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows the status of your loaders on this machine."
    parser.epilog = EXAMPLE
    parser.add_argument("--once", action="store_true", help="print the status once and exit")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per refresh")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=EVERY,
        metavar="S",
        help="seconds between two refreshes (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.watch.view import View

    view = View()
    try:
        if arguments.once:
            _look_for_rates(view, arguments.interval)
            sys.stdout.write(_render(view, as_json=arguments.json) + "\n")
        else:
            _watch(view, arguments.interval, as_json=arguments.json)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal way to end this command
    return 0


def _look_for_rates(view: View, interval: float) -> None:
    """Look until every loader has two snapshots, or ``LOOKS`` times: rates need two snapshots."""
    view.look()
    for _ in range(LOOKS):
        if all(loader.before is not None for loader in view.loaders):
            break
        time.sleep(interval)
        view.look()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not SHORTEST <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between {SHORTEST} seconds and one day")
    return seconds


def _watch(view: View, interval: float, *, as_json: bool) -> None:
    from penstock.host.redraw import redraw

    def refreshed() -> str:
        view.look()
        return _render(view, as_json=as_json)

    redraw(refreshed, interval, in_place=not as_json)


def _render(view: View, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(view.as_dict())
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return "\n".join(view.lines(ascii_only=not encoding.startswith("utf")))
