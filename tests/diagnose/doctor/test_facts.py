"""Facts about a machine: directories, leftovers of killed runs, packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from penstock import config
from penstock.diagnose.doctor.facts import (
    Package,
    collect_leftovers,
    gather,
    look_at_directory,
    look_at_packages,
    look_for_leftovers,
)
from penstock.diagnose.doctor.probe import details_of_torch


def leave_behind(parent: Path) -> Path:
    """Leave the run directory of a process that was killed; return its path."""
    code = (
        "import os, pathlib, sys; from penstock.store import RunDir; "
        "run = RunDir(pathlib.Path(sys.argv[1])); d = run.path; "
        "(d / 'data').write_bytes(bytes(8192)); "
        "sys.stdout.write(str(d)); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    return Path(done.stdout)


def test_the_facts_agree_with_the_values_that_loaders_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.diagnose.doctor.facts.look_at_packages", dict)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = gather()
    assert facts.cores.usable == config.cores() <= facts.cores.mask <= facts.cores.machine
    assert facts.memory.usable == config.memory() <= facts.memory.machine
    assert facts.memory_stores == str(config.memory_dir())
    assert facts.python.version == sys.version_info[:3]
    assert facts.settings["OMP_NUM_THREADS"] == "3"


def test_facts_are_gathered_without_a_home_or_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nowhere() -> Path:
        raise FileNotFoundError("no usable temporary directory found")

    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr("penstock.diagnose.doctor.facts.look_at_packages", dict)
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setattr(config, "memory_dir", nowhere)
    monkeypatch.setattr(config, "disk_dir", homeless)
    facts = gather()
    assert (facts.temporary, facts.disk, facts.memory_stores) == (None, None, "")


def test_a_directory_that_does_not_exist_has_the_values_of_its_parent(tmp_path: Path) -> None:
    existing = look_at_directory(tmp_path)
    missing = look_at_directory(tmp_path / "not" / "yet")
    assert (existing.exists, existing.writable) == (True, True)
    assert (missing.exists, missing.writable, missing.total) == (False, True, existing.total)


def test_a_path_blocked_by_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        found = look_at_directory(path)
        assert (found.exists, found.writable) == (False, False)


def test_the_innermost_and_latest_mount_names_the_file_system(tmp_path: Path) -> None:
    inner = tmp_path / "a b"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(
        f"disk / ext4 rw 0 0\nold {escaped} xfs rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\n"
        f"other {tmp_path}/a tmpfs rw 0 0\n\n"
    )
    assert look_at_directory(inner / "deeper", mounts).filesystem == "nfs4"
    assert look_at_directory(tmp_path, mounts).filesystem == "ext4"
    assert look_at_directory(tmp_path, tmp_path / "none").filesystem == ""


def test_leftovers_are_found_and_collected(tmp_path: Path) -> None:
    parent = tmp_path / "penstock"
    gone = leave_behind(parent)
    before = look_for_leftovers(parent)
    assert [path for path, _ in before.found] == [str(gone)]
    assert before.found[0][1] >= 8192
    after = collect_leftovers(before)
    assert (after.found, after.collected, after.tried) == ((), before.found, True)
    assert not gone.exists()


def test_a_live_run_is_not_a_leftover(tmp_path: Path) -> None:
    from penstock.store import RunDir

    run = RunDir(tmp_path / "penstock")
    try:
        path = run.path
        assert look_for_leftovers(tmp_path / "penstock").found == ()
        assert path.exists()
    finally:
        run.close()


def test_a_memory_directory_open_to_others_is_an_error_in_the_facts(tmp_path: Path) -> None:
    parent = tmp_path / "penstock"
    parent.mkdir()
    parent.chmod(0o777)
    found = look_for_leftovers(parent)
    assert "0777" in found.error
    assert found.found == ()


def package(module: str) -> Package:
    return look_at_packages((Package(module, module),), timeout=60)[module]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_that_is_not_installed_is_absent() -> None:
    found = package("no_such_package_of_anyones")
    assert (found.state, found.error) == ("absent", "")


def test_a_package_that_lacks_another_is_broken(modules: Path) -> None:
    (modules / "halfway.py").write_text("import no_such_package_of_anyones")
    found = package("halfway")
    assert found.state == "broken"
    assert "no_such_package_of_anyones" in found.error


def test_a_package_that_raises_is_broken(modules: Path) -> None:
    (modules / "raising.py").write_text("raise OSError('libfoo.so is missing')")
    found = package("raising")
    assert (found.state, found.error) == ("broken", "OSError: libfoo.so is missing")


def test_a_package_that_crashes_does_not_crash_the_doctor(modules: Path) -> None:
    (modules / "crashing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = package("crashing")
    assert (found.state, found.error) == ("broken", "its import was killed by SIGSEGV")


def test_a_package_that_exits_is_broken(modules: Path) -> None:
    (modules / "leaving.py").write_text("import os; os.write(2, b'bye\\n'); os._exit(3)")
    found = package("leaving")
    assert found.error == "its import ended the process with code 3: bye"


def test_a_package_whose_import_hangs_is_broken(modules: Path) -> None:
    (modules / "hanging.py").write_text("import threading; threading.Event().wait()")
    found = look_at_packages((Package("hanging", "hanging"),), timeout=0.5)["hanging"]
    assert found.state == "broken"
    assert "did not finish" in found.error


def test_output_and_warnings_of_a_package_do_not_disturb_the_result(modules: Path) -> None:
    (modules / "chatty.py").write_text(
        "import sys, warnings; sys.stdout.write('{}'); warnings.warn('the driver is too old')\n"
        "__version__ = '1.2'"
    )
    found = package("chatty")
    assert (found.state, found.version, found.said) == (
        "present",
        "1.2",
        ("the driver is too old",),
    )


def test_a_version_is_looked_up_where_the_module_has_none() -> None:
    rich = pytest.importorskip("rich")
    assert not hasattr(rich, "__version__")
    assert package("rich").version.partition(".")[0].isdecimal()


def test_the_facts_on_opencv_include_its_threads() -> None:
    pytest.importorskip("cv2")
    found = package("cv2")
    assert found.threads
    assert found.stays_single


def test_the_probe_processes_use_the_same_import_path(modules: Path) -> None:
    assert str(modules) not in os.environ.get("PYTHONPATH", "")
    (modules / "on_this_path.py").write_text("__version__ = '7'")
    assert package("on_this_path").version == "7"


def test_gpus_are_asked_by_functions_that_torch_has() -> None:
    torch = pytest.importorskip("torch")
    found = SimpleNamespace(name="NVIDIA H100", total_memory=80_000_000_000)
    for kind in ("cuda", "xpu"):
        # An attribute that the real module does not have is an error.
        modules = {name: create_autospec(getattr(torch, name)) for name in ("cuda", "xpu")}
        for name, module in modules.items():
            module.is_available.return_value = name == kind
            module.device_count.return_value = 1
            module.get_device_properties.return_value = found
        stand_in = SimpleNamespace(version=torch.version, backends=torch.backends, **modules)
        assert details_of_torch(stand_in)["devices"] == [
            {"kind": kind, "name": "NVIDIA H100", "memory": 80_000_000_000}
        ]
