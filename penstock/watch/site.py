"""The pages of ``penstock watch``: one to look at, and what it shows as data."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files

from penstock.errors import PipelineError
from penstock.watch.exposition import CONTENT_TYPE, exposition
from penstock.watch.serving import ADDRESS, Page, Pages, PageServer
from penstock.watch.view import View

PORT, TRIED = 8265, 20
"""The port that is served on unless one is given, and how many are tried from there on."""

_FILES = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/chart.js", "chart.js", "text/javascript; charset=utf-8"),
    ("/style.css", "style.css", "text/css; charset=utf-8"),
)


def pages(view: View) -> Pages:
    """All there is to see of a view, which somebody else keeps looking."""
    found = {path: Page(kind, partial(_file, name)) for path, name, kind in _FILES}
    found["/snapshot.json"] = Page(
        "application/json", lambda: json.dumps(view.plain(), allow_nan=False).encode()
    )
    found["/metrics"] = Page(
        CONTENT_TYPE,
        lambda: exposition(view.snapshots(), pids=True).encode(),
    )
    return found


def serve(view: View, port: int | None = None) -> PageServer:
    """Serve a view on a port; where none is asked for, on the first that is free."""
    tried = [port] if port is not None else range(PORT, PORT + TRIED)
    for one in tried:
        try:
            return PageServer(one, pages(view), "penstock-watch")
        except OSError as error:
            problem = error
    where = f"{ADDRESS}:{tried[0]}" + (f" to {tried[-1]}" if len(tried) > 1 else "")
    raise PipelineError(
        f"nothing can be served on {where}: {problem.strerror}. Give another --port; 0 is any "
        "that is free."
    )


def _file(name: str) -> bytes:
    return (files("penstock.watch") / "page" / name).read_bytes()
