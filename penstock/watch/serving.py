"""A few read-only pages on this machine's own address, for nobody but this machine."""

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
"""What the address may be called. A site that makes its own name lead here is found out by it."""

POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src data:"
)


class Page(NamedTuple):
    """What is found at a path: its type, and what makes it."""

    kind: str
    make: Callable[[], bytes]


Pages = Mapping[str, Page]


class PageServer(ThreadingHTTPServer):
    """Serves pages from a thread of its own until it is closed. Raises ``OSError`` at once where
    the port is taken; port 0 is any that is free."""

    daemon_threads = True

    def __init__(self, port: int, pages: Pages, name: str) -> None:
        self.pages = pages
        super().__init__((ADDRESS, port), _Request)
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        self._thread.start()
        _servers.add(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        # The parent's looks up the machine's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.port

    def close(self) -> None:
        _servers.discard(self)
        # Wakes the thread, which would look only twice a second whether it is to end.
        self.socket.shutdown(sockets.SHUT_RDWR)
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone: nobody is left to tell."""


_servers: weakref.WeakSet[PageServer] = weakref.WeakSet()


def _after_fork() -> None:
    # A copy of the socket would keep the port taken for as long as the child lives.
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_after_fork)


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "penstock"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"This can only be read.\n")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815

    def _answer(self, *, body: bool) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host", "")
        if host.lower() not in NAMES:
            told = f"Ask for http://{ADDRESS}:{self.server.port}/, not for {host!r}.\n"
            self._send(HTTPStatus.FORBIDDEN, "text/plain", told.encode(), body=body)
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(self.server.pages)
            told = f"There is nothing here. There is: {known}\n"
            self._send(HTTPStatus.NOT_FOUND, "text/plain", told.encode(), body=body)
            return
        self._send(HTTPStatus.OK, page.kind, page.make(), body=body)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
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
        """What is asked for is nobody's business."""
