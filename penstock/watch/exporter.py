"""``metrics_port=``: the loaders of this process for Prometheus, one server for each port."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.errors import PipelineError
from penstock.watch import running
from penstock.watch.exposition import CONTENT_TYPE, exposition
from penstock.watch.publish import snapshot_of
from penstock.watch.serving import ADDRESS, Page, PageServer
from penstock.watch.snapshot import Snapshot

PATH = "/metrics"


@dataclass(slots=True)
class _Exporter:
    server: PageServer
    users: set[object] = field(default_factory=set)


_lock = threading.Lock()
_exporters: dict[int, _Exporter] = {}


class Lease:
    """A loader's part in a server, which ends with the last of them."""

    def __init__(self, port: int) -> None:
        self._port = port

    def close(self) -> None:
        with _lock:
            exporter = _exporters.get(self._port)
            if exporter is None or self not in exporter.users:
                return
            exporter.users.discard(self)
            if exporter.users:
                return
            del _exporters[self._port]
        exporter.server.close()


def serve(port: int) -> Lease:
    """Serve the metrics of this process on a port, for as long as somebody wants it."""
    with _lock:
        if port not in _exporters:
            pages = {PATH: Page(CONTENT_TYPE, metrics)}
            try:
                server = PageServer(port, pages, f"penstock-metrics-{port}")
            except OSError as error:
                raise PipelineError(
                    f"metrics_port is {port}, and {ADDRESS}:{port} cannot be had: {error.strerror}."
                    " Give each process, such as each rank of a job, a port of its own: "
                    f"metrics_port={port} + rank."
                ) from None
            _exporters[port] = _Exporter(server)
        lease = Lease(port)
        _exporters[port].users.add(lease)
        return lease


def metrics() -> bytes:
    """What is served: every loader that this process has in use."""
    found: list[Snapshot] = []
    for number, loader in running.loaders():
        # One that is just being closed, or given a checkpoint, is there again the next time.
        with suppress(Exception):
            found.append(snapshot_of(loader, number))
    return exposition(found).encode()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _exporters.clear()


os.register_at_fork(after_in_child=_after_fork)
