"""``penstock watch``: running loaders on a web page."""

from __future__ import annotations

import argparse
import sys
import time

EXAMPLE = """\
examples:
  penstock watch               print the address of the page, serve it until Ctrl-C
  penstock watch --open        open the page in a browser too
  penstock watch --port 9000   serve on another port

The page is read-only and reachable from this machine only. From another machine, forward the port:
  ssh -L 8265:localhost:8265 machine-that-trains
Its /snapshot.json has the same data as `penstock top --json`; /metrics is for Prometheus.
"""

EVERY = 1.0
"""Seconds between two refreshes."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serves a web page with the status of your loaders on this machine."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="port to serve on (default: 8265, or the next free port)",
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
        sys.stdout.write(f"Watching at {address} (Ctrl-C to stop)\n")
        sys.stdout.flush()
        if arguments.open:
            import webbrowser

            webbrowser.open(address)
        while True:
            time.sleep(EVERY)
            view.look()
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal way to end this command
    finally:
        server.close()
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 0 to 65535")
    return port
