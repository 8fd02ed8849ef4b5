"""Which file system a path is on, and whether it is a network file system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "gfs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb3",
    "smbfs",
    "wekafs",
}
"""Kinds of file systems on which asking for the size of a file may take a round trip."""

_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.lxcfs")


def is_network(kind: str) -> bool:
    """Whether file systems of this kind are on another machine.

    Those in user space (FUSE) count as such, because most of them are: sshfs, s3fs, gcsfuse.
    """
    return kind in NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def kinds_by_device(mountinfo: str) -> dict[int, str]:
    """The kind of each mounted file system by device number; see ``man 5 proc_pid_mountinfo``.

    >>> kinds_by_device("25 1 0:40 / /data rw shared:7 - nfs4 server:/data rw") == {40: "nfs4"}
    True
    """
    kinds: dict[int, str] = {}
    for line in mountinfo.splitlines():
        found = re.match(r"\S+ \S+ (\d+):(\d+) .* - (\S+) ", line)
        if found:
            kinds[os.makedev(int(found[1]), int(found[2]))] = found[3]
    return kinds


def any_on_network(paths: Iterable[str]) -> bool:
    """Whether one of these files or folders, or what a link points to, is on a network.

    A file system whose kind is not known (a subvolume of btrfs) counts as local.
    """
    try:
        kinds = kinds_by_device(Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return False
    for path in paths:
        try:
            device = os.stat(path).st_dev
        except (OSError, ValueError):  # missing, or a zero byte in its name
            continue
        if is_network(kinds.get(device, "")):
            return True
    return False
