"""What a worker does, from the files of the kernel about its thread."""

from __future__ import annotations

import pytest

from penstock.diagnose.analyze.worker_watch import kind_of


@pytest.mark.parametrize(
    ("syscall", "machine"), [("47 0x5 0x7f", "x86_64"), ("212 0x5 0x7f", "aarch64")]
)
def test_a_worker_that_waits_for_work_is_idle(syscall: str, machine: str) -> None:
    # Penstock's workers wait in recvmsg: said to wait for a network peer 64 % of their time.
    assert kind_of(syscall, "S", lambda _: "socket:[1]", machine) == "idle"


def test_a_worker_that_reads_from_a_socket_of_the_dataset_waits_for_its_peer() -> None:
    assert kind_of("45 0x5 0x7f", "S", lambda _: "socket:[1]", "x86_64") == "network"
