"""The pages of ``penstock watch``: the web page, its data as JSON, and Prometheus metrics."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files

from penstock.errors import PipelineError
from penstock.watch.metrics import CONTENT_TYPE, exposition
from penstock.watch.serving import ADDRESS, Page, Pages, PageServer
from penstock.watch.view import View

PORT, PORTS_TRIED = 8265, 20
"""The default port, and the number of ports tried from there on if it is taken."""

_FILES = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/chart.js", "chart.js", "text/javascript; charset=utf-8"),
    ("/style.css", "style.css", "text/css; charset=utf-8"),
)


def pages(view: View) -> Pages:
    """All pages for a view. The caller keeps the view up to date by calling ``view.look()``."""
    served = {path: Page(kind, partial(_file, name)) for path, name, kind in _FILES}
    served["/snapshot.json"] = Page(
        "application/json", lambda: json.dumps(view.as_dict(), allow_nan=False).encode()
    )
    served["/metrics"] = Page(
        CONTENT_TYPE,
        lambda: exposition(view.snapshots(), pids=True, cluster=view.cluster_status()).encode(),
    )
    return served


def serve(view: View, port: int | None = None) -> PageServer:
    """Serve a view on a port; without one, on the first free port from ``PORT`` on."""
    ports = [port] if port is not None else range(PORT, PORT + PORTS_TRIED)
    for candidate in ports:
        try:
            return PageServer(candidate, pages(view), "penstock-watch")
        except OSError as error:
            problem = error
    where = f"{ADDRESS}:{ports[0]}" + (f" to {ports[-1]}" if len(ports) > 1 else "")
    raise PipelineError(
        f"cannot bind the web server to {where}: {problem.strerror}. Give another --port; "
        "--port 0 takes any free port."
    )


def _file(name: str) -> bytes:
    return (files("penstock.watch") / "page" / name).read_bytes()
