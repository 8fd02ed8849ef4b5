"""A machine on which nothing is amiss, for tests to spoil one thing at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.doctor.facts import (
    Cores,
    Facts,
    Interpreter,
    Leftovers,
    Limit,
    Memory,
    Place,
)
from penstock.diagnose.doctor.packages import WANTED, Device, Package

GB = 10**9
VERSIONS = {"numpy": "2.1.0", "lmdb": "1.6.2", "cv2": "4.10.0", "torch": "2.5.1"}


def sound_packages() -> dict[str, Package]:
    found = {
        package.module: replace(
            package, state="present", version=VERSIONS.get(package.module, "9.1.0")
        )
        for package in WANTED
    }
    found["cv2"] = replace(found["cv2"], threads="pthreads")
    device = Device("cuda", "NVIDIA H100", 80 * GB)
    found["torch"] = replace(found["torch"], cuda="12.4", devices=(device,))
    return found


@pytest.fixture
def sound() -> Facts:
    return Facts(
        penstock="0.1.0",
        system="Linux",
        container=False,
        python=Interpreter((3, 12, 4), "/usr/bin/python3", free_threaded=False, gil=True),
        cores=Cores(usable=16, mask=16, machine=16),
        memory=Memory(usable=64 * GB, machine=64 * GB, available=50 * GB),
        shm=Place("/dev/shm", True, True, 32 * GB, 30 * GB, "tmpfs"),
        memory_stores="/dev/shm/penstock-1000",
        memfd=True,
        temporary=Place("/tmp", True, True, 500 * GB, 300 * GB, "ext4"),
        disk=Place("/home/me/.cache/penstock", False, True, 500 * GB, 300 * GB, "ext4"),
        files=Limit(65536, 65536),
        processes=Limit(None, None),
        nvidia=True,
        leftovers=Leftovers("/dev/shm/penstock-1000"),
        packages=sound_packages(),
        opencv=("opencv-python-headless",),
        settings={},
    )
