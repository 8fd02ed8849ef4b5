"""Builds contain the kernel when required, and the wheel check notices a missing library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from penstock import native
from tests.support import ROOT


class Application:
    """The part of hatchling's application that the hook uses for messages."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)

    def abort(self, message: str) -> NoReturn:
        raise SystemExit(message)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files, and an environment without build settings."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    for name in ("PENSTOCK_KERNEL", "PENSTOCK_NO_KERNEL", "CC", "CPPFLAGS", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return place


def build(hook: ModuleType, version: str = "standard") -> tuple[dict[str, Any], Application, Any]:
    application = Application()
    made = hook.KernelHook(str(ROOT), {}, None, None, str(ROOT), "wheel", application)
    data: dict[str, Any] = {"force_include": {}}
    made.initialize(version, data)
    return data, application, made


def test_without_a_compiler_the_package_is_built_without_the_kernel(
    hook: ModuleType, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    data, application, _ = build(hook)
    assert data == {"force_include": {}}
    (warning,) = application.warnings
    assert (
        "building without the optional image kernel: the compiler failed without a message"
        in warning
    )
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("switch", [{"CC": "false"}, {"PENSTOCK_NO_KERNEL": "1"}])
def test_a_required_kernel_that_cannot_be_built_ends_the_build(
    hook: ModuleType, scratch: Path, monkeypatch: pytest.MonkeyPatch, switch: dict[str, str]
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL", "require")
    for name, value in switch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"the image kernel cannot be built: .*require"):
        build(hook)
    assert list(scratch.iterdir()) == []


def test_an_unknown_value_of_penstock_kernel_ends_the_build(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL", "required")
    with pytest.raises(SystemExit, match="PENSTOCK_KERNEL is 'required'; give \"require\""):
        build(hook)


@pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())
def test_a_wheel_with_the_kernel_is_tagged_for_its_platform(
    hook: ModuleType, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL", "require")
    monkeypatch.setenv("CFLAGS", "-O0")  # compiles in half the time
    data, application, made = build(hook)
    assert application.warnings == []
    assert data["pure_python"] is False
    ((built, target),) = data["force_include"].items()
    assert Path(built).parent.parent == scratch
    if sys.version_info >= (3, 11):
        assert target == "penstock/_kernel.abi3.so"
        assert data["tag"].startswith("cp311-abi3-linux_")
    else:
        assert data["infer_tag"] is True
    made.finalize("standard", data, "")
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())
def test_a_kernel_that_needs_the_systems_libjpeg_fails_the_wheel_check() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_wheel.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the kernel uses /")
    assert f"instead of one in {ROOT / 'penstock.libs'}" in done.stderr


def test_the_script_refuses_arguments_it_does_not_know() -> None:
    done = subprocess.run(
        ["scripts/wheel", "--output", "x"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "==> FAILED: unknown argument --output: scripts/wheel [--out dist]\n"
