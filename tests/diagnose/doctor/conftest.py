"""Facts of a sound machine, which each test spoils in one respect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.doctor.facts import (
    PACKAGES,
    Accelerator,
    Cores,
    Directory,
    Facts,
    Interpreter,
    Leftovers,
    Limit,
    Memory,
    Package,
)

GB = 10**9
VERSIONS = {"numpy": "2.1.0", "lmdb": "1.6.2", "cv2": "4.10.0", "torch": "2.5.1"}


def sound_packages() -> dict[str, Package]:
    packages = {
        package.module: replace(
            package, state="present", version=VERSIONS.get(package.module, "9.1.0")
        )
        for package in PACKAGES
    }
    packages["cv2"] = replace(packages["cv2"], threads="pthreads")
    device = Accelerator("cuda", "NVIDIA H100", 80 * GB)
    packages["torch"] = replace(packages["torch"], cuda="12.4", devices=(device,))
    return packages


@pytest.fixture
def sound() -> Facts:
    return Facts(
        penstock="0.1.0",
        system="Linux",
        container=False,
        python=Interpreter((3, 12, 4), "/usr/bin/python3", free_threaded=False, gil=True),
        cores=Cores(usable=16, mask=16, machine=16),
        memory=Memory(usable=64 * GB, machine=64 * GB, available=50 * GB),
        shm=Directory("/dev/shm", True, True, 32 * GB, 30 * GB, "tmpfs"),
        memory_stores="/dev/shm/penstock-1000",
        memfd=True,
        temporary=Directory("/tmp", True, True, 500 * GB, 300 * GB, "ext4"),
        disk=Directory("/home/me/.cache/penstock", False, True, 500 * GB, 300 * GB, "ext4"),
        files=Limit(65536, 65536),
        processes=Limit(None, None),
        nvidia=True,
        leftovers=Leftovers("/dev/shm/penstock-1000"),
        packages=sound_packages(),
        opencv=("opencv-python-headless",),
        settings={},
    )
