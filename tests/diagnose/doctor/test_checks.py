"""The checks of the machine: which facts lead to which finding and fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.doctor.checks import check
from penstock.diagnose.doctor.facts import Cores, Facts, Leftovers, Limit, Memory
from penstock.diagnose.doctor.report import Finding, Level

GB = 10**9
MB = 10**6


def named(facts: Facts, name: str) -> Finding:
    (finding,) = (finding for finding in check(facts) if finding.name == name)
    return finding


def commands(finding: Finding) -> list[str]:
    return [fix.command for fix in finding.remedies]


def test_a_sound_machine_has_nothing_but_ok(sound: Facts) -> None:
    findings = check(sound)
    assert {finding.level for finding in findings} == {Level.OK}
    assert {finding.name for finding in findings} >= {
        "python",
        "penstock",
        "cores",
        "memory",
        "shared memory",
        "memfd",
        "leftovers",
        "temporary",
        "disk caches",
        "open files",
        "processes",
        "core",
        "simplejpeg",
        "OpenCV",
        "Pillow",
        "pyarrow",
        "torch",
        "cuda:0",
    }


def test_the_findings_of_a_topic_are_consecutive(sound: Facts) -> None:
    topics = [finding.topic for finding in check(sound)]
    starts = [now for now, before in zip(topics, [None, *topics], strict=False) if now != before]
    assert len(starts) == len(set(starts))


def test_an_old_python_is_a_problem(sound: Facts) -> None:
    finding = named(replace(sound, python=replace(sound.python, version=(3, 9, 1))), "python")
    assert finding.level is Level.PROBLEM
    assert "3.9.1" in finding.text


def test_a_free_threaded_python_says_that_workers_are_threads(sound: Facts) -> None:
    python = replace(sound.python, version=(3, 14, 0), free_threaded=True, gil=False)
    packages = {name: replace(p, gil=False) for name, p in sound.packages.items()}
    finding = named(replace(sound, python=python, packages=packages), "python")
    assert (finding.level, finding.text) == (
        Level.OK,
        "3.14.0, free-threaded: workers are threads",
    )


def test_a_free_threaded_python_with_its_gil_on_is_warned_about(sound: Facts) -> None:
    python = replace(sound.python, version=(3, 14, 0), free_threaded=True, gil=True)
    finding = named(replace(sound, python=python), "python")
    assert finding.level is Level.WARNING
    assert commands(finding) == ["export PYTHON_GIL=0"]


def test_the_version_of_penstock_is_shown(sound: Facts) -> None:
    assert named(sound, "penstock").text == "0.1.0"


def test_a_quota_is_distinguished_from_a_cpu_mask(sound: Facts) -> None:
    quota = named(replace(sound, cores=Cores(usable=4, mask=16, machine=16)), "cores")
    mask = named(replace(sound, cores=Cores(usable=4, mask=4, machine=16)), "cores")
    assert (quota.level, mask.level) == (Level.NOTE, Level.NOTE)
    assert quota.text == "4 of 16: the container's quota allows no more"
    assert mask.text == "4 of 16: the CPU affinity of this process allows no more"
    assert commands(quota) == ["docker run --cpus=16 ..."]
    assert commands(mask) == ["#SBATCH --cpus-per-task=16"]


def test_one_core_of_many_is_warned_about(sound: Facts) -> None:
    cores = Cores(usable=1, mask=1, machine=16)
    assert named(replace(sound, cores=cores), "cores").level is Level.WARNING


def test_a_machine_of_one_core_is_noted(sound: Facts) -> None:
    cores = Cores(usable=1, mask=1, machine=1)
    assert named(replace(sound, cores=cores), "cores").level is Level.NOTE


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_threads_that_every_worker_would_multiply_are_warned_about(sound: Facts, name: str) -> None:
    finding = named(replace(sound, settings={name: "8,2"}), name)
    assert finding.level is Level.WARNING
    assert finding.text == "8: 16 worker processes would run 128 threads"
    assert commands(finding) == [f"unset {name}"]


def test_one_thread_for_each_worker_is_fine(sound: Facts) -> None:
    assert named(replace(sound, settings={"OMP_NUM_THREADS": "1"}), "OMP_NUM_THREADS").level == 0


@pytest.mark.parametrize("value", ["", "many", "-1", "0"])
def test_an_invalid_number_of_threads_is_warned_about(sound: Facts, value: str) -> None:
    finding = named(replace(sound, settings={"OMP_NUM_THREADS": value}), "OMP_NUM_THREADS")
    assert finding.level is Level.WARNING
    assert repr(value) in finding.text


def test_a_memory_limit_of_the_container_is_noted(sound: Facts) -> None:
    finding = named(replace(sound, memory=Memory(16 * GB, 64 * GB, 10 * GB)), "memory")
    assert finding.level is Level.NOTE
    assert finding.text == "16.0 GB of 64.0 GB: the container's limit, 10.0 GB free"


def test_little_free_memory_is_warned_about(sound: Facts) -> None:
    finding = named(replace(sound, memory=Memory(64 * GB, 64 * GB, 2 * GB)), "memory")
    assert finding.level is Level.WARNING


def test_unknown_free_memory_is_left_out(sound: Facts) -> None:
    finding = named(replace(sound, memory=Memory(64 * GB, 64 * GB, None)), "memory")
    assert (finding.level, finding.text) == (Level.OK, "64.0 GB")


def test_a_small_shm_in_a_container_has_two_fixes(sound: Facts) -> None:
    shm = replace(sound.shm, total=64 * MB, free=64 * MB)
    finding = named(replace(sound, container=True, shm=shm), "shared memory")
    assert finding.level is Level.WARNING
    assert finding.text == "/dev/shm has 64.0 MB: too small for data"
    assert "temporary directory" in finding.why
    assert "memfd" in finding.why
    assert commands(finding) == ["docker run --shm-size=29g ...", "docker run --ipc=host ..."]


def test_a_small_shm_outside_a_container_is_remounted(sound: Facts) -> None:
    shm = replace(sound.shm, total=64 * MB, free=64 * MB)
    finding = named(replace(sound, shm=shm), "shared memory")
    assert commands(finding) == ["sudo mount -o remount,size=29G /dev/shm"]


def test_a_missing_shm_is_warned_about_on_linux_and_noted_elsewhere(sound: Facts) -> None:
    shm = replace(sound.shm, exists=False)
    linux = named(replace(sound, shm=shm), "shared memory")
    mac = named(replace(sound, shm=shm, system="Darwin"), "shared memory")
    assert (linux.level, mac.level) == (Level.WARNING, Level.NOTE)
    assert linux.text == "there is no /dev/shm"
    assert commands(linux) == ["sudo mount -o size=29G -t tmpfs tmpfs /dev/shm"]


def test_a_shm_that_cannot_be_written_to_is_warned_about(sound: Facts) -> None:
    finding = named(replace(sound, shm=replace(sound.shm, writable=False)), "shared memory")
    assert (finding.level, finding.text) == (Level.WARNING, "/dev/shm cannot be written to")


def test_a_full_shm_is_warned_about(sound: Facts) -> None:
    finding = named(replace(sound, shm=replace(sound.shm, free=100 * MB)), "shared memory")
    assert (finding.level, finding.text) == (
        Level.WARNING,
        "100.0 MB free of 32.0 GB on /dev/shm",
    )
    assert commands(finding) == ["du -sh /dev/shm/*"]


def test_a_shm_dir_setting_that_is_too_small_is_to_be_unset(sound: Facts) -> None:
    shm = replace(sound.shm, path="/mnt/ram", total=64 * MB)
    settings = {"PENSTOCK_SHM_DIR": "/mnt/ram"}
    finding = named(replace(sound, shm=shm, settings=settings), "shared memory")
    assert commands(finding) == ["unset PENSTOCK_SHM_DIR"]


def test_without_memfd_batches_are_reported_to_use_files(sound: Facts) -> None:
    finding = named(replace(sound, memfd=False), "memfd")
    assert finding.level is Level.WARNING
    small = replace(sound.shm, total=64 * MB)
    shm = named(replace(sound, memfd=False, shm=small), "shared memory")
    assert "memfd" not in shm.why


def test_leftovers_are_listed_with_their_sizes(sound: Facts) -> None:
    left = Leftovers("/dev/shm/p", found=(("/dev/shm/p/run-1", 3 * GB), ("/dev/shm/p/run-2", 12)))
    finding = named(replace(sound, leftovers=left), "leftovers")
    assert finding.level is Level.WARNING
    assert finding.text == "2 killed runs, 3.0 GB"
    assert finding.details == ("   3.0 GB  /dev/shm/p/run-1", "     12 B  /dev/shm/p/run-2")
    assert commands(finding) == ["penstock doctor --fix"]


def test_collected_leftovers_are_fine(sound: Facts) -> None:
    left = Leftovers("/dev/shm/p", collected=(("/dev/shm/p/run-1", 3 * GB),), tried=True)
    finding = named(replace(sound, leftovers=left), "leftovers")
    assert (finding.level, finding.text) == (Level.OK, "1 killed run, 3.0 GB: removed")


def test_leftovers_that_cannot_be_collected_are_named_one_by_one(sound: Facts) -> None:
    found = (("/dev/shm/p q/run-1", 3 * GB),)
    left = Leftovers("/dev/shm/p q", found=found, tried=True)
    finding = named(replace(sound, leftovers=left), "leftovers")
    assert commands(finding) == ["sudo rm -rf '/dev/shm/p q/run-1'"]


def test_a_memory_directory_of_another_user_is_a_problem(sound: Facts) -> None:
    left = Leftovers("/dev/shm/p", error="/dev/shm/p belongs to user 7.")
    finding = named(replace(sound, leftovers=left), "leftovers")
    assert finding.level is Level.PROBLEM
    assert finding.why.startswith("/dev/shm/p belongs to user 7. Memory caches")


def test_a_full_temporary_directory_is_warned_about(sound: Facts) -> None:
    assert sound.temporary is not None
    facts = replace(sound, temporary=replace(sound.temporary, free=100 * MB))
    finding = named(facts, "temporary")
    assert (finding.level, finding.text) == (Level.WARNING, "100.0 MB free on /tmp")
    assert finding.why == ""
    with_caches = named(replace(facts, memory_stores="/tmp/penstock-1000"), "temporary")
    assert with_caches.why == "Memory caches are kept here and will be small."


def test_no_temporary_directory_at_all_is_a_problem(sound: Facts) -> None:
    finding = named(replace(sound, temporary=None), "temporary")
    assert finding.level is Level.PROBLEM
    assert commands(finding) == ["export TMPDIR=/path/with/room"]


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        ({"writable": False}, "/home/me/.cache/penstock cannot be written to"),
        ({"free": 100 * MB}, "100.0 MB free on /home/me/.cache/penstock"),
        (
            {"filesystem": "nfs4"},
            "/home/me/.cache/penstock is on nfs4, a network file system",
        ),
    ],
)
def test_a_bad_directory_for_disk_caches_is_warned_about(
    sound: Facts, spoilt: dict[str, object], text: str
) -> None:
    assert sound.disk is not None
    disk = replace(sound.disk, **spoilt)  # type: ignore[arg-type]
    finding = named(replace(sound, disk=disk), "disk caches")
    assert (finding.level, finding.text) == (Level.WARNING, text)
    assert commands(finding) == ["export PENSTOCK_CACHE_DIR=/path/on/local/disk"]


def test_a_user_without_a_home_is_told_to_set_the_cache_directory(sound: Facts) -> None:
    finding = named(replace(sound, disk=None), "disk caches")
    assert finding.level is Level.WARNING
    assert commands(finding) == ["export PENSTOCK_CACHE_DIR=/path/on/local/disk"]


def test_few_open_files_are_raised_as_far_as_the_hard_limit(sound: Facts) -> None:
    finding = named(replace(sound, files=Limit(1024, 8192)), "open files")
    assert finding.level is Level.WARNING
    assert commands(finding) == ["ulimit -n 8192"]
    free = named(replace(sound, files=Limit(1024, None)), "open files")
    assert commands(free) == ["ulimit -n 65536"]


def test_a_low_hard_limit_of_open_files_is_raised_in_its_configuration(sound: Facts) -> None:
    facts = replace(sound, files=Limit(1024, 1024))
    assert commands(named(facts, "open files")) == [
        "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf"
    ]
    contained = named(replace(facts, container=True), "open files")
    assert commands(contained) == ["docker run --ulimit nofile=65536:65536 ..."]


def test_few_processes_are_warned_about(sound: Facts) -> None:
    finding = named(replace(sound, processes=Limit(100, 100), container=True), "processes")
    assert finding.level is Level.WARNING
    assert commands(finding) == ["docker run --pids-limit=-1 ..."]
    assert named(replace(sound, processes=Limit(100, None)), "processes").remedies[0].command == (
        "ulimit -u 32768"
    )


@pytest.mark.parametrize("soft", [None, 4096])
def test_enough_open_files_are_fine(sound: Facts, soft: int | None) -> None:
    assert named(replace(sound, files=Limit(soft, soft)), "open files").level is Level.OK
