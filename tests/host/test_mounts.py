"""File systems are known by the kernel's table of mounts, and network ones by their kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.host import mounts

TABLE = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw
31 27 0:40 / /data rw - nfs4 server:/data rw,vers=4.2
32 27 0:41 / /with\\040space\\040-\\040dash rw - fuse.sshfs host: rw
a line that is not a mount
"""


def test_the_kind_of_a_file_system_is_found_by_its_device() -> None:
    assert mounts.kinds_by_device(TABLE) == {
        os.makedev(0, 21): "proc",
        os.makedev(254, 0): "ext4",
        os.makedev(0, 40): "nfs4",
        os.makedev(0, 41): "fuse.sshfs",
    }


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "cifs", "fuse.sshfs", "ceph", "9p"])
def test_file_systems_of_other_machines_are_network_file_systems(kind: str) -> None:
    assert mounts.is_network(kind)


@pytest.mark.parametrize(
    "kind",
    ["ext4", "xfs", "tmpfs", "overlay", "btrfs", "zfs", "fuseblk", "fuse.fuse-overlayfs", ""],
)
def test_file_systems_of_this_machine_are_not(kind: str) -> None:
    assert not mounts.is_network(kind)


def test_a_path_is_on_a_network_if_its_device_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [str(tmp_path / "missing"), str(tmp_path / "link")]
    monkeypatch.setattr(mounts, "kinds_by_device", lambda _: {tmp_path.stat().st_dev: "nfs4"})
    assert mounts.any_on_network(paths)
    assert not mounts.any_on_network(paths[:1])
    monkeypatch.setattr(mounts, "kinds_by_device", lambda _: {})
    assert not mounts.any_on_network(paths)
