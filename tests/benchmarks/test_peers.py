"""Peers in benchmarks: whose interpreter runs them, where their files go, and how they are made."""

from __future__ import annotations

import importlib
import json
import os
import pickletools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import environments
from benchmarks.harness.alone import ROOT, _pickled, run_alone
from benchmarks.harness.courses import Starts
from benchmarks.harness.measure import Contestant, Lane, race
from benchmarks.harness.race_table import FIRST, race_result
from benchmarks.harness.report import write_json
from benchmarks.load import load
from penstock import native

PEER = """
import json, os, sys, tempfile
from pathlib import Path
import numpy as np

def note(diary, event):
    place = Path(tempfile.gettempdir())
    kept = sorted(path.name for path in place.iterdir())
    (place / f"{event}-{len(kept)}").write_text("x" * 100)
    line = {"event": event, "place": str(place), "home": str(Path.home()), "kept": kept,
            "mark": os.environ.get("MARK", "")}
    with diary.open("a") as out:
        out.write(json.dumps(line) + "\\\\n")

def prepare(diary):
    note(diary, "run")
    return lambda: [np.zeros((2, 3), np.float32)] * 3

def convert(diary):
    note(diary, "convert")

def cannot_convert(diary):
    raise OSError("no room for shards")

def with_kernel(_):
    from penstock import native
    return lambda: [np.full((2, 3), native.kernel_available(), np.float32)] * 3
""".replace("\\\\n", "\\n")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of contestants that other interpreters can import too."""
    (tmp_path / "peer_of_the_tests.py").write_text(PEER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("peer_of_the_tests")
    del sys.modules["peer_of_the_tests"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for environments."""
    place = tmp_path / "bench"
    place.mkdir()
    monkeypatch.setattr(environments, "BENCH", place)
    return place


def made(bench: Path, env: str, script: str) -> str:
    """An environment whose interpreter is a shell script."""
    python = bench / env / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (bench / env / "installed.txt").write_text("x\n")
    return str(python)


def contestant(peer: Any, title: str = "peer", **more: Any) -> Contestant[Path]:
    path = (("PYTHONPATH", str(Path(peer.__file__).parent)),)
    return Contestant(title, peer.prepare, (), environment=path, **more)


def raced(contestants: list[Contestant[Path]], diary: Path, rounds: int) -> list[Lane]:
    return race("r", contestants, diary, Starts(2), rounds=rounds, timeout=60)


def told(diary: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in diary.read_text().splitlines()]


# Interpreters.


def test_an_environment_that_was_made_is_used(bench: Path) -> None:
    python = made(bench, "dali", "echo '[]'")
    # That this interpreter lacks the module does not matter: another one was asked.
    assert environments.interpreter("dali", ("no_such_module",)).python == python


def test_what_an_environment_lacks_is_asked_of_its_own_interpreter(bench: Path) -> None:
    made(bench, "dali", """echo '["numpy"]'""")
    answer = environments.interpreter("dali", ("numpy",))
    assert (answer.python, answer.why_not) == ("", "not in .bench/dali: numpy")


def test_an_environment_that_does_not_run_has_nothing(bench: Path) -> None:
    made(bench, "dali", "exit 1")
    assert environments.interpreter("dali", ("a", "b")).why_not == "not in .bench/dali: a, b"


def test_without_an_environment_this_interpreter_serves_if_it_can(bench: Path) -> None:
    assert environments.interpreter("torch", ("numpy",)).python == sys.executable
    assert environments.interpreter("", ("numpy",)).python == sys.executable
    assert environments.interpreter("", ("numpy", "no.such.module")).why_not == (
        "not installed: no.such.module"
    )
    assert environments.interpreter("dali", ("no_such_module",)).why_not == (
        "not installed: run scripts/bench-setup dali"
    )


def test_an_environment_that_failed_says_why(bench: Path) -> None:
    (bench / "ffcv").mkdir()
    (bench / "ffcv" / "failed.txt").write_text("ERROR: no OpenCV\n\nall the rest\n")
    answer = environments.interpreter("ffcv", ("no_such_module",))
    assert (answer.python, answer.why_not) == ("", "does not install here: ERROR: no OpenCV")


def test_a_peer_runs_with_the_interpreter_of_its_environment(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    made(bench, "other", f'MARK=other exec {sys.executable} "$@"')
    diary = tmp_path / "diary"
    contestants = [contestant(peer, "a", env="other"), contestant(peer, "mine", ours=True)]
    lanes = raced(contestants, diary, rounds=1)
    assert [lane.why_not for lane in lanes] == ["", ""]
    assert [line["mark"] for line in told(diary)] == ["other", ""]


def test_json_has_the_versions_of_each_peers_environment(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    made(bench, "other", f'exec {sys.executable} "$@"')
    made(bench, "lacking", """echo '["dali"]'""")
    contestants = [
        contestant(peer, "a", env="other"),
        replace(contestant(peer, "b", env="lacking"), needs=("dali",)),
        contestant(peer, "mine", ours=True),
    ]
    made_of = race_result("r", "t", raced(contestants, tmp_path / "diary", rounds=0), (FIRST,), ())
    write_json(tmp_path / "out.json", "load", {}, made_of)
    read = json.loads((tmp_path / "out.json").read_text())
    assert set(read["environments"]) == {"other"}
    assert read["environments"]["other"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in read["environments"]["other"]["packages"]
    assert read["data"]["r"]["b"]["why_not"] == "not in .bench/lacking: dali"


def test_search_paths_of_this_interpreter_do_not_reach_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/for/this/one")
    own = environments.process_environment(sys.executable, tmp_path, {"MARK": "1"})
    other = environments.process_environment("/other/python", tmp_path, {"MARK": "1"})
    assert own["PYTHONPATH"] == "/for/this/one"
    assert "PYTHONPATH" not in other
    for found_there in (own, other):
        assert found_there["MARK"] == "1"
        assert {found_there[name] for name in ("HOME", "TMPDIR", "TEMP", "TMP")} == {str(tmp_path)}


def test_what_a_peer_imports_is_neither_ours_nor_heavy() -> None:
    peers = ", ".join(
        f"benchmarks.peers.{p.stem}" for p in (ROOT / "benchmarks/peers").glob("*.py")
    )
    heavy = "penstock rich matplotlib torch torchvision cv2 PIL grain tensorflow nvidia spdl ffcv"
    code = (
        f"import sys, benchmarks.harness.alone, benchmarks.harness.courses, {peers}\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_jobs_can_be_read_by_other_versions_of_python() -> None:
    written = _pickled((Path("/some/where"), os.fspath))
    assert next(argument for _, argument, _ in pickletools.genops(written)) == 4
    # Where the class of a path lives depends on the version.
    assert b"pathlib" not in written
    assert run_alone(os.fspath, Path("/some/where"), timeout=60).value == "/some/where"


# Places of their own.


def test_each_contestant_keeps_its_own_temporary_directory_until_the_race_is_over(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    raced([contestant(peer, "a"), contestant(peer, "b")], diary, rounds=2)
    lines = told(diary)
    first, second = lines[0]["place"], lines[1]["place"]
    assert first != second
    assert [line["place"] for line in lines] == [first, second, second, first]
    assert [line["kept"] for line in lines] == [[], [], ["run-0"], ["run-0"]]
    assert all(line["home"] == line["place"] for line in lines)
    assert not Path(first).exists()
    assert not Path(second).exists()


def test_data_are_converted_once_before_the_first_round(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    (lane,) = raced([contestant(peer, convert=peer.convert)], diary, rounds=2)
    assert [line["event"] for line in told(diary)] == ["convert", "run", "run"]
    assert told(diary)[1]["kept"] == ["convert-0"]
    assert lane.conversion is not None
    assert lane.conversion.bytes == 100
    assert lane.conversion.seconds > 0


def test_a_peer_that_cannot_convert_is_reported_and_the_others_run(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    contestants = [contestant(peer, "a", convert=peer.cannot_convert), contestant(peer, "b")]
    lanes = raced(contestants, diary, rounds=1)
    assert [len(lane.runs) for lane in lanes] == [0, 1]
    assert lanes[0].why_not == "failed: OSError: no room for shards"
    assert race_result("r", "t", lanes, (FIRST,), ()).wrong == (
        "r: a failed: OSError: no room for shards",
    )


def test_the_lane_without_kernel_has_none(peer: Any, tmp_path: Path) -> None:
    path = ("PYTHONPATH", str(Path(peer.__file__).parent))
    without, with_it = (
        replace(one, prepare=peer.with_kernel, environment=(*one.environment, path))
        for one in (load.NO_KERNEL, load.PIPELINE)
    )
    lanes = race("r", (without, with_it), tmp_path, Starts(2), rounds=1, timeout=60)
    assert [lane.runs[0].look.mean for lane in lanes] == [0.0, float(native.kernel_available())]


# scripts/bench-setup.

PYTHON = """\
#!/bin/sh
# Stands for Python: makes environments of itself, and writes down what pip is asked for.
case "$*" in
*"-m venv"*)
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    ;;
*"pip install"*)
    echo "$*" >>"$DIARY"
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
    """A repository with nothing but the script and what it reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bench-setup", tmp_path / "scripts")
    (tmp_path / "benchmarks" / "requirements").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tree / "scripts" / "bench-setup", *args],
        env={**os.environ, "PYTHON": str(tree / "python"), "DIARY": str(tree / "diary")},
        capture_output=True,
        text=True,
    )


def require(tree: Path, name: str, text: str) -> None:
    (tree / "benchmarks" / "requirements" / f"{name}.txt").write_text(text)


def asked(tree: Path) -> list[str]:
    diary = tree / "diary"
    return [] if not diary.exists() else diary.read_text().splitlines()


def test_torch_is_installed_first_and_what_must_not_pull_it_last(tree: Path) -> None:
    require(
        tree, "a", "# no-deps: torchvision==2\nnumpy==1\ntorch==3  # by itself\n# import: fine\n"
    )
    done = setup(tree, "a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked(tree) == [
        "-m pip install torch==3",
        "-m pip install --requirement benchmarks/requirements/a.txt numpy psutil",
        "-m pip install --no-deps torchvision==2",
    ]
    assert setup(tree, "--list").stdout.split() == ["a", "installed"]


def test_what_is_installed_is_installed_again_only_when_its_requirements_change(
    tree: Path,
) -> None:
    require(tree, "a", "dali==1\n")
    setup(tree)
    assert "a: ready" in setup(tree).stdout
    assert len(asked(tree)) == 1
    require(tree, "a", "dali==2\n")
    assert setup(tree, "--list").stdout.split() == ["a", "out", "of", "date"]
    setup(tree)
    assert len(asked(tree)) == 2


def test_a_peer_that_does_not_install_is_reported_and_the_others_go_on(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(tree, "a", "torch==1\n# no-deps: broken==1\n")
    require(tree, "b", "fine==1\n")
    require(tree, "c", "# import: bad\n")
    done = setup(tree)
    assert done.returncode == 1
    assert "a: FAILED: No matching distribution found for broken==1" in done.stdout
    assert "c: FAILED: ImportError: libbad.so: cannot open" in done.stdout
    assert "not installed: a c" in done.stdout
    assert "some advice" in (tree / ".bench" / "a" / "failed.txt").read_text()
    # Half of an environment is worse than none, and may be large.
    assert [path.name for path in (tree / ".bench" / "a").iterdir()] == ["failed.txt"]
    monkeypatch.setattr(environments, "BENCH", tree / ".bench")
    assert environments.interpreter("a", ("no_such_module",)).why_not == (
        "does not install here: No matching distribution found for broken==1"
    )
    assert environments.interpreter("b", ()).python == str(tree / ".bench" / "b" / "bin/python")


def test_an_unknown_peer_is_an_error_that_lists_the_known(tree: Path) -> None:
    require(tree, "a", "")
    require(tree, "b", "")
    done = setup(tree, "a", "x")
    assert done.returncode == 2
    assert "there is no peer x; there are: a b" in done.stderr
    assert asked(tree) == []
