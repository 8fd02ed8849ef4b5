"""Redraw the output of a command in the terminal at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def redraw(look: Callable[[], str], every: float, *, in_place: bool = True) -> None:
    """Show the text that ``look`` returns, every ``every`` seconds, until Ctrl-C.

    In a terminal the text replaces the one before. If the output is saved or piped, or
    ``in_place`` is false, each text is printed below the one before.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    redraws = console.is_terminal and not console.is_dumb_terminal and in_place
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                shown = look()
                if redraws:
                    live.update(Text(shown), refresh=True)
                else:
                    sys.stdout.write(shown + ("\n\n" if in_place else "\n"))
                    sys.stdout.flush()
                time.sleep(every)
    except KeyboardInterrupt:
        pass  # the normal way to end it
