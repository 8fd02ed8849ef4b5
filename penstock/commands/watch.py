"""``penstock watch``."""

from __future__ import annotations

import argparse
import sys
import time

EXAMPLE = """\
examples:
  penstock watch               prints the page's address; Ctrl-C ends it
  penstock watch --open        opens it in a browser too
  penstock watch --port 9000   on another port

The page can only be read, and only from this machine. From another one, forward the port:
  ssh -L 8265:localhost:8265 machine-that-trains
Its /snapshot.json is what `penstock top --json` prints; /metrics is for Prometheus.
"""

EVERY = 1.0
"""Seconds between two looks."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serves a page that shows how the loaders of this machine are doing."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="the port to serve on; by default 8265, or the next one that is free",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(arguments: argparse.Namespace) -> int:
    from penstock.watch.site import serve
    from penstock.watch.view import View

    view = View()
    view.look()
    server = serve(view, arguments.port)
    try:
        address = f"http://127.0.0.1:{server.port}/"
        sys.stdout.write(f"Watching at {address} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if arguments.open:
            import webbrowser

            webbrowser.open(address)
        while True:
            time.sleep(EVERY)
            view.look()
    except KeyboardInterrupt:
        pass  # that is how it is meant to end
    finally:
        server.close()
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number up to 65535")
    return port
