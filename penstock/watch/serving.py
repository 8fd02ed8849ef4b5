"""A web server for a few read-only pages, reachable from this machine only."""

from __future__ import annotations

import os
import socket as sockets
import socketserver
import threading
import weakref
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

ADDRESS = "127.0.0.1"

NAMES = frozenset({"localhost", ADDRESS})
"""Accepted host names. A foreign site whose name was made to resolve to this machine is refused."""

POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src data:"
)


class Page(NamedTuple):
    """A page: its content type, and the function that makes its content."""

    content_type: str
    make: Callable[[], bytes]


Pages = Mapping[str, Page]


class PageServer(ThreadingHTTPServer):
    """Serves pages from its own thread until it is closed. Port 0 means any free port.

    The constructor raises ``OSError`` if the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, pages: Pages, name: str) -> None:
        self.pages = pages
        super().__init__((ADDRESS, port), _PageHandler)
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        self._thread.start()
        _servers.add(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks up the machine's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.port

    def close(self) -> None:
        _servers.discard(self)
        # Wakes the serving thread, which otherwise checks only twice a second whether to end.
        self.socket.shutdown(sockets.SHUT_RDWR)
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client has closed the connection."""


_servers: weakref.WeakSet[PageServer] = weakref.WeakSet()


def _after_fork() -> None:
    # The child inherits the socket, which would keep the port taken as long as the child lives.
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_after_fork)


class _PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "penstock"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        self._send(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "text/plain",
            b"These pages are read-only: use GET or HEAD.\n",
        )

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815

    def _answer(self, *, body: bool) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host", "")
        if host.lower() not in NAMES:
            text = f"The host name {host!r} is refused. Open http://{ADDRESS}:{self.server.port}/\n"
            self._send(HTTPStatus.FORBIDDEN, "text/plain", text.encode(), body=body)
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(self.server.pages)
            text = f"There is no such page. The pages are: {known}\n"
            self._send(HTTPStatus.NOT_FOUND, "text/plain", text.encode(), body=body)
            return
        self._send(HTTPStatus.OK, page.content_type, page.make(), body=body)

    def _send(
        self, status: HTTPStatus, content_type: str, content: bytes, *, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", content_type),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", POLICY),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
