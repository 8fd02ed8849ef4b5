"""What a worker does, from the files of the kernel about its thread."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from penstock.diagnose.analyze.worker_watch import WorkerWatch, kind_of


@pytest.mark.parametrize(
    ("syscall", "machine"), [("47 0x5 0x7f", "x86_64"), ("212 0x5 0x7f", "aarch64")]
)
def test_a_worker_that_waits_for_work_is_idle(syscall: str, machine: str) -> None:
    # Penstock's workers wait in recvmsg: said to wait for a network peer 64 % of their time.
    assert kind_of(syscall, "S", lambda _: "socket:[1]", machine) == "idle"


def test_a_worker_that_reads_from_a_socket_of_the_dataset_waits_for_its_peer() -> None:
    assert kind_of("45 0x5 0x7f", "S", lambda _: "socket:[1]", "x86_64") == "network"


def test_processes_that_the_script_has_started_itself_are_no_workers() -> None:
    # A server of the script that slept was counted: workers sleep 29 %, where none of them did.
    nap = "import time\nfor _ in range(60_000): time.sleep(0.001)"
    with ExitStack() as stack:
        server, worker = (
            stack.enter_context(subprocess.Popen([sys.executable, "-c", nap])) for _ in range(2)
        )
        stack.callback(worker.kill)
        stack.callback(server.kill)
        with WorkerWatch(threads=False, others=[server.pid]) as watch:
            until = time.monotonic() + 60
            while worker.pid not in watch.watched and time.monotonic() < until:
                time.sleep(0.01)
        assert worker.pid in watch.watched
        assert server.pid not in watch.watched
