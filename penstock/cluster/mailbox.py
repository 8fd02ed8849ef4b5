"""Recipes between a node and the keeper of its machine, which brings them to other machines.

The keeper is a process of Ray, the node is not: a node must not have Ray's threads. So they talk
over a Unix socket in the node's directory, which only this user can open.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cluster.recipes import LARGEST_RECIPE, CourierLate
from penstock.engine.pools.wire import ProtocolError, Vocabulary, Wire, check_types
from penstock.errors import ClusterError

_log = logging.getLogger("penstock.keeper")

ANSWER = 10.0
"""Seconds that the keeper may take for what it does by itself."""

_CREDENTIALS = struct.Struct("3i")
_MARGIN = 1 << 20


class PublishRecipe(NamedTuple):
    """Other machines may have this recipe."""

    digest: str
    content: bytes


class FetchRecipe(NamedTuple):
    """Asks for the recipe of another machine."""

    digest: str
    timeout: float


class WithdrawRecipe(NamedTuple):
    """Other machines need this recipe no longer."""

    digest: str


class RecipeBrought(NamedTuple):
    """The answer to all of them. ``fault``: why it could not be done; empty if it was."""

    content: bytes | None
    fault: str


_RECIPES = Vocabulary(
    publish=PublishRecipe, fetch=FetchRecipe, withdraw=WithdrawRecipe, brought=RecipeBrought
)
_REQUESTS: dict[type, tuple[tuple[type, ...], ...]] = {
    PublishRecipe: ((str,), (bytes,)),
    FetchRecipe: ((str,), (float,)),
    WithdrawRecipe: ((str,),),
}


class PublishedRecipes:
    """The recipes of this machine's jobs that the keeper gives to other keepers.

    ``fetch``: brings the recipe of another machine, given its digest and seconds.
    """

    def __init__(self, fetch: Callable[[str, float], bytes | None]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._contents: dict[str, bytes] = {}

    def content(self, digest: str) -> bytes | None:
        with self._lock:
            return self._contents.get(digest)

    def handle(self, message: Any) -> RecipeBrought:
        """Do what a node asks."""
        if isinstance(message, FetchRecipe):
            try:
                return RecipeBrought(self._fetch(message.digest, message.timeout), "")
            except ClusterError as error:
                return RecipeBrought(None, str(error))
        with self._lock:
            if isinstance(message, PublishRecipe):
                self._contents[message.digest] = message.content
            else:
                self._contents.pop(message.digest, None)
        return RecipeBrought(None, "")


class Mailbox:
    """The keeper's end: serves nodes of this user at a socket, until ``close``."""

    def __init__(self, path: Path, recipes: PublishedRecipes) -> None:
        self.path = path
        self._recipes = recipes
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
        self._listener.listen(16)
        threading.Thread(target=self._accept, name="penstock-mailbox", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(found)[1] != os.getuid():
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="penstock-mailbox-call", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        wire = Wire(sock, _RECIPES, largest=LARGEST_RECIPE + _MARGIN)
        try:
            sock.settimeout(ANSWER)
            received = wire.receive()
            if received is not None:
                allowed = _REQUESTS.get(type(received[0]))
                if allowed is None:
                    raise ProtocolError("not a request")
                check_types(received[0], allowed)
                wire.send(self._recipes.handle(received[0]))
        except (OSError, ProtocolError) as error:
            _log.warning("a request of the node has failed: %s", error)
        finally:
            wire.close()


class KeeperCourier:
    """The node's end. See ``penstock.cluster.recipes.Courier``."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = path
        self._lock = threading.Lock()
        self._published: dict[str, bytes] = {}

    def publish(self, digest: str, content: bytes) -> None:
        with self._lock:
            self._published[digest] = content
        self._ask(PublishRecipe(digest, content), ANSWER)

    def renew(self) -> None:
        """Publish all recipes again: the keeper was restarted."""
        with self._lock:
            published = list(self._published.items())
        for digest, content in published:
            with suppress(ClusterError):
                self._ask(PublishRecipe(digest, content), ANSWER)

    def fetch(self, digest: str, *, timeout: float) -> bytes | None:
        return self._ask(FetchRecipe(digest, timeout), timeout)

    def withdraw(self, digest: str) -> None:
        with self._lock:
            self._published.pop(digest, None)
        self._ask(WithdrawRecipe(digest), ANSWER)

    def _ask(self, message: tuple[Any, ...], timeout: float) -> bytes | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire = Wire(sock, _RECIPES, largest=LARGEST_RECIPE + _MARGIN)
        try:
            sock.settimeout(timeout)
            sock.connect(self._path)
            wire.send(message)
            received = wire.receive()
        except TimeoutError as error:
            raise CourierLate(f"the keeper of this machine does not answer: {error}") from None
        except (OSError, ProtocolError) as error:
            raise ClusterError(f"the keeper of this machine does not answer: {error}") from None
        finally:
            wire.close()
        answer = None if received is None else received[0]
        if not isinstance(answer, RecipeBrought):
            raise ClusterError("the keeper of this machine has ended")
        if answer.fault:
            raise ClusterError(answer.fault)
        return answer.content
