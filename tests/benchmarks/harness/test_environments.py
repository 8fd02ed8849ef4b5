"""Environments of contestants: interpreters, variables and temporary directories."""

from __future__ import annotations

import importlib
import json
import os
import pickletools
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
from benchmarks.harness.photographs import PIPELINE
from benchmarks.harness.race_table import FIRST, race_result
from benchmarks.harness.report import write_json
from benchmarks.load.load import NO_KERNEL
from penstock import native

PEER = """
import json, os, sys, tempfile
from pathlib import Path
import numpy as np

def note(log, event):
    place = Path(tempfile.gettempdir())
    kept = sorted(path.name for path in place.iterdir())
    (place / f"{event}-{len(kept)}").write_text("x" * 100)
    line = {"event": event, "place": str(place), "home": str(Path.home()), "kept": kept,
            "mark": os.environ.get("MARK", "")}
    with log.open("a") as out:
        out.write(json.dumps(line) + "\\\\n")

def prepare(log):
    note(log, "run")
    return lambda: [np.zeros((2, 3), np.float32)] * 3

def convert(log):
    note(log, "convert")

def cannot_convert(log):
    raise OSError("no room for shards")

def with_kernel(_):
    from penstock import native
    return lambda: [np.full((2, 3), native.kernel_available(), np.float32)] * 3
""".replace("\\\\n", "\\n")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with contestants that other interpreters can import too."""
    (tmp_path / "peer_of_the_tests.py").write_text(PEER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("peer_of_the_tests")
    del sys.modules["peer_of_the_tests"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for environments."""
    place = tmp_path / "bench"
    place.mkdir()
    monkeypatch.setattr(environments, "BENCH", place)
    return place


def make_environment(bench: Path, env: str, script: str) -> str:
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


def raced(contestants: list[Contestant[Path]], log: Path, rounds: int) -> list[Lane]:
    return race("r", contestants, log, Starts(2), rounds=rounds, timeout=60)


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


# Interpreters.


def test_an_installed_environment_is_used(bench: Path) -> None:
    python = make_environment(bench, "dali", "echo '[]'")
    # This interpreter lacks the module, but the environment's reports that nothing is missing.
    assert environments.interpreter("dali", ("no_such_module",)).python == python


def test_an_environments_own_interpreter_lists_its_missing_modules(bench: Path) -> None:
    make_environment(bench, "dali", """echo '["numpy"]'""")
    answer = environments.interpreter("dali", ("numpy",))
    assert (answer.python, answer.why_not) == ("", "not in .bench/dali: numpy")


def test_an_environment_whose_python_fails_lacks_all_modules(bench: Path) -> None:
    make_environment(bench, "dali", "exit 1")
    assert environments.interpreter("dali", ("a", "b")).why_not == "not in .bench/dali: a, b"


def test_without_an_environment_this_interpreter_is_used_if_it_has_the_modules(bench: Path) -> None:
    assert environments.interpreter("torch", ("numpy",)).python == sys.executable
    assert environments.interpreter("", ("numpy",)).python == sys.executable
    assert environments.interpreter("", ("numpy", "no.such.module")).why_not == (
        "not installed: no.such.module"
    )
    assert environments.interpreter("dali", ("no_such_module",)).why_not == (
        "not installed: run scripts/bench-setup dali"
    )


def test_a_failed_installation_is_reported_with_its_reason(bench: Path) -> None:
    (bench / "ffcv").mkdir()
    (bench / "ffcv" / "failed.txt").write_text("ERROR: no OpenCV\n\nall the rest\n")
    answer = environments.interpreter("ffcv", ("no_such_module",))
    assert (answer.python, answer.why_not) == ("", "does not install here: ERROR: no OpenCV")


def test_a_peer_runs_with_the_interpreter_of_its_environment(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    make_environment(bench, "other", f'MARK=other exec {sys.executable} "$@"')
    log = tmp_path / "log"
    contestants = [contestant(peer, "a", env="other"), contestant(peer, "mine", ours=True)]
    lanes = raced(contestants, log, rounds=1)
    assert [lane.why_not for lane in lanes] == ["", ""]
    assert [line["mark"] for line in read_log(log)] == ["other", ""]


def test_json_has_the_versions_of_each_peers_environment(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    make_environment(bench, "other", f'exec {sys.executable} "$@"')
    make_environment(bench, "lacking", """echo '["dali"]'""")
    contestants = [
        contestant(peer, "a", env="other"),
        replace(contestant(peer, "b", env="lacking"), needs=("dali",)),
        contestant(peer, "mine", ours=True),
    ]
    result = race_result("r", "t", raced(contestants, tmp_path / "log", rounds=0), (FIRST,), ())
    write_json(tmp_path / "out.json", "load", {}, result)
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
    for variables in (own, other):
        assert variables["MARK"] == "1"
        assert {variables[name] for name in ("HOME", "TMPDIR", "TEMP", "TMP")} == {str(tmp_path)}


def test_peer_modules_import_neither_penstock_nor_heavy_packages() -> None:
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


def test_pickles_can_be_read_by_other_versions_of_python() -> None:
    written = _pickled((Path("/some/where"), os.fspath))
    assert next(argument for _, argument, _ in pickletools.genops(written)) == 4
    # The module of the path classes depends on the version.
    assert b"pathlib" not in written
    assert run_alone(os.fspath, Path("/some/where"), timeout=60).value == "/some/where"


# Temporary directories.


def test_each_contestant_keeps_its_own_temporary_directory_until_the_race_is_over(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    raced([contestant(peer, "a"), contestant(peer, "b")], log, rounds=2)
    lines = read_log(log)
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
    log = tmp_path / "log"
    (lane,) = raced([contestant(peer, convert=peer.convert)], log, rounds=2)
    assert [line["event"] for line in read_log(log)] == ["convert", "run", "run"]
    assert read_log(log)[1]["kept"] == ["convert-0"]
    assert lane.conversion is not None
    assert lane.conversion.bytes == 100
    assert lane.conversion.seconds > 0


def test_a_peer_that_cannot_convert_is_reported_and_the_others_run(
    bench: Path, peer: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    contestants = [contestant(peer, "a", convert=peer.cannot_convert), contestant(peer, "b")]
    lanes = raced(contestants, log, rounds=1)
    assert [len(lane.runs) for lane in lanes] == [0, 1]
    assert lanes[0].why_not == "failed: OSError: no room for shards"
    assert race_result("r", "t", lanes, (FIRST,), ()).wrong == (
        "r: a failed: OSError: no room for shards",
    )


def test_the_contestant_without_kernel_runs_without_it(peer: Any, tmp_path: Path) -> None:
    path = ("PYTHONPATH", str(Path(peer.__file__).parent))
    contestants = [
        Contestant[Path](
            one.title, peer.with_kernel, one.needs, ours=True, environment=(*one.environment, path)
        )
        for one in (NO_KERNEL, PIPELINE)
    ]
    lanes = race("r", contestants, tmp_path, Starts(2), rounds=1, timeout=60)
    assert [lane.runs[0].look.mean for lane in lanes] == [0.0, float(native.kernel_available())]
