"""``scripts/bench-setup``: what it installs, in which order, and what it reports."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import environments
from benchmarks.harness.alone import ROOT

PYTHON = """\
#!/bin/sh
# A stand-in for Python: copies itself into environments, and logs the arguments of pip.
case "$*" in
*"-m venv"*)
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    ;;
*"pip install"*)
    echo "$*" >>"$LOG"
    case "$*" in
    *broken*)
        echo "Collecting broken"
        echo "ERROR: No matching distribution found for broken==1"
        echo "some advice"
        exit 1
        ;;
    esac
    ;;
*"import bad"*)
    echo "ImportError: libbad.so: cannot open" >&2
    exit 1
    ;;
*) echo 3.x ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with only the script and its folder of requirements."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bench-setup", tmp_path / "scripts")
    (tmp_path / "benchmarks" / "requirements").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def run_setup(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tree / "scripts" / "bench-setup", *args],
        env={**os.environ, "PYTHON": str(tree / "python"), "LOG": str(tree / "log")},
        capture_output=True,
        text=True,
    )


def require(tree: Path, name: str, text: str) -> None:
    (tree / "benchmarks" / "requirements" / f"{name}.txt").write_text(text)


def pip_calls(tree: Path) -> list[str]:
    log = tree / "log"
    return [] if not log.exists() else log.read_text().splitlines()


def test_torch_is_installed_first_and_packages_without_dependencies_last(tree: Path) -> None:
    require(
        tree, "a", "# no-deps: torchvision==2\nnumpy==1\ntorch==3  # by itself\n# import: fine\n"
    )
    done = run_setup(tree, "a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert pip_calls(tree) == [
        "-m pip install torch==3",
        "-m pip install --requirement benchmarks/requirements/a.txt numpy psutil",
        "-m pip install --no-deps torchvision==2",
    ]
    assert run_setup(tree, "--list").stdout.split() == ["a", "installed"]


def test_what_is_installed_is_installed_again_only_when_its_requirements_change(
    tree: Path,
) -> None:
    require(tree, "a", "dali==1\n")
    run_setup(tree)
    assert "a: ready" in run_setup(tree).stdout
    assert len(pip_calls(tree)) == 1
    require(tree, "a", "dali==2\n")
    assert run_setup(tree, "--list").stdout.split() == ["a", "out", "of", "date"]
    run_setup(tree)
    assert len(pip_calls(tree)) == 2


def test_a_peer_that_does_not_install_is_reported_and_the_others_go_on(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(tree, "a", "torch==1\n# no-deps: broken==1\n")
    require(tree, "b", "fine==1\n")
    require(tree, "c", "# import: bad\n")
    done = run_setup(tree)
    assert done.returncode == 1
    assert "a: FAILED: No matching distribution found for broken==1" in done.stdout
    assert "c: FAILED: ImportError: libbad.so: cannot open" in done.stdout
    assert "not installed: a c" in done.stdout
    assert "some advice" in (tree / ".bench" / "a" / "failed.txt").read_text()
    # An incomplete environment is removed: it may be large.
    assert [path.name for path in (tree / ".bench" / "a").iterdir()] == ["failed.txt"]
    monkeypatch.setattr(environments, "BENCH", tree / ".bench")
    assert environments.interpreter("a", ("no_such_module",)).why_not == (
        "does not install here: No matching distribution found for broken==1"
    )
    assert environments.interpreter("b", ()).python == str(tree / ".bench" / "b" / "bin/python")


def test_an_unknown_peer_is_an_error_that_lists_the_known(tree: Path) -> None:
    require(tree, "a", "")
    require(tree, "b", "")
    done = run_setup(tree, "a", "x")
    assert done.returncode == 2
    assert "there is no peer x; there are: a b" in done.stderr
    assert pip_calls(tree) == []
