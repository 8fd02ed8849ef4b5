"""Limits of cgroups are found at every level, in version 1, version 2 and both together."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import config
from penstock.host import cgroup

GB = 10**9

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


class Machine:
    """A made-up file system with a process in cgroups."""

    def __init__(self, root: Path, own: str, mountinfo: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", own)
        self.write("proc/self/mountinfo", mountinfo)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def limits(self) -> tuple[float | None, int | None]:
        return cgroup.cpu_limit(self.root), cgroup.memory_limit(self.root)


def test_the_smallest_limit_of_all_levels_counts_in_version_2(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/slurm/job/step\n", V2)
    group = "sys/fs/cgroup/slurm"
    machine.write(f"{group}/job/step/cpu.max", "max 100000\n")
    machine.write(f"{group}/job/cpu.max", "150000 100000\n")
    machine.write(f"{group}/cpu.max", "800000 100000\n")
    machine.write(f"{group}/job/step/memory.max", f"{4 * GB}\n")
    machine.write(f"{group}/job/memory.max", "max\n")
    machine.write(f"{group}/memory.max", f"{8 * GB}\n")
    assert machine.limits() == (1.5, 4 * GB)
    machine.write(f"{group}/memory.high", f"{3 * GB}\n")
    assert machine.limits() == (1.5, 3 * GB)


def test_a_container_with_a_namespace_of_its_own_has_its_limits_at_the_mount(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, "0::/\n", V2)
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000\n")
    machine.write("sys/fs/cgroup/memory.max", f"{GB}\n")
    assert machine.limits() == (2.0, GB)


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    own = "4:memory:/job\n2:cpu,cpuacct:/job/step\n9:name=systemd:/user\n0::/\n"
    machine = Machine(tmp_path, own, V1)
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    machine.write(f"{cpu}/job/step/cpu.cfs_quota_us", "-1\n")
    machine.write(f"{cpu}/job/step/cpu.cfs_period_us", "100000\n")
    machine.write(f"{cpu}/job/cpu.cfs_quota_us", "50000\n")
    machine.write(f"{cpu}/job/cpu.cfs_period_us", "100000\n")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{2 * GB}\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limits() == (0.5, 2 * GB)
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.limits() == (0.5, None)


def test_a_hybrid_machine_may_have_limits_in_both_versions(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/job\n0::/user/me\n", V1)
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{2 * GB}\n")
    machine.write("sys/fs/cgroup/unified/user/cpu.max", "300000 100000\n")
    assert machine.limits() == (3.0, 2 * GB)


@pytest.mark.parametrize(
    ("own", "top"),
    [
        ("/docker/abc", "/docker/abc"),  # the path of the machine, and a mount of that cgroup
        ("/", "/docker/abc"),  # a namespace that was made after the mount
        ("/../def", "/"),  # a process that was moved here from another container
        ("/elsewhere", "/docker/abc"),
    ],
)
def test_a_path_outside_of_the_mount_means_the_mount(own: str, top: str, tmp_path: Path) -> None:
    mount = f"35 31 0:32 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    machine = Machine(tmp_path, f"4:memory:{own}\n", mount)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GB}\n")
    assert machine.limits() == (None, GB)


def test_no_cgroups_and_nonsense_are_no_limit(tmp_path: Path) -> None:
    assert (cgroup.cpu_limit(tmp_path), cgroup.memory_limit(tmp_path)) == (None, None)
    machine = Machine(tmp_path, "nonsense\n\n0::/a\n", f"one two\n{V2}\n")
    machine.write("sys/fs/cgroup/a/cpu.max", "some\n")
    machine.write("sys/fs/cgroup/cpu.max", "0 0\n")
    machine.write("sys/fs/cgroup/a/memory.max", "much\n")
    assert machine.limits() == (None, None)


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n", V2.replace("/sys/fs/cgroup", r"/my\040groups"))
    machine.write("my groups/memory.max", f"{GB}\n")
    assert machine.limits() == (None, GB)


def test_available_memory_is_that_of_the_level_with_the_least(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", V2)
    machine.write("sys/fs/cgroup/job/memory.max", "max\n")
    machine.write("sys/fs/cgroup/job/memory.current", "70\n")
    machine.write("sys/fs/cgroup/memory.max", "100\n")
    machine.write("sys/fs/cgroup/memory.current", "80\n")
    machine.write("sys/fs/cgroup/memory.stat", "anon 40\ninactive_file 30\nactive_file 10\n")
    assert cgroup.memory_available(tmp_path) == 50


def test_available_memory_counts_the_files_of_all_cgroups_below_in_version_1(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, "4:memory:/\n", V1)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "100\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "80\n")
    stat = "inactive_file 1\ntotal_inactive_file 30\n"
    machine.write("sys/fs/cgroup/memory/memory.stat", stat)
    assert cgroup.memory_available(tmp_path) == 50


def test_the_limit_of_processes_is_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "8:pids:/job\n", V1)
    machine.write("sys/fs/cgroup/pids/job/pids.max", "max\n")
    machine.write("sys/fs/cgroup/pids/pids.max", "512\n")
    assert cgroup.process_limit(tmp_path) == 512


def test_cores_and_memory_obey_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "cpu_limit", lambda: 0.5)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 12345)
    assert (config.cores(), config.memory()) == (1, 12345)
    monkeypatch.setattr(cgroup, "cpu_limit", lambda: 1e6)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: None)
    assert config.cores() >= 1
    assert config.memory() > 12345
