"""What a command shows anew again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def redraw(look: Callable[[], str], every: float, *, in_place: bool = True) -> None:
    """Show what ``look`` says, and again every so many seconds, until Ctrl-C.

    In a terminal it is drawn where it was; what is saved or piped keeps every look, one below the
    other, and so does everything without ``in_place``.
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
        pass  # that is how it is meant to end
