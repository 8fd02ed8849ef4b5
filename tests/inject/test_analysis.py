"""``penstock analyze`` on scripts that do not use Penstock."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from penstock.diagnose.analyze.phase_runner import WARM_UP_AS_IT_IS
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.stalls import rank_speeds, slowest
from tests.support import SCRIPTS, warm

LONG = ("--epochs", "400")
"""More epochs than an analysis needs: it ends the script."""


PATIENT = """
import sys
from penstock.cli import main
from penstock.inject import loop_wait

loop_wait.LEAST = 1000.0  # on a busy machine a loop may begin late
sys.exit(main())
"""
"""The command ``penstock``, which does not end a script that is slow to begin."""


class Analysed(NamedTuple):
    code: int
    out: str
    error: str
    output: Path

    @property
    def report(self) -> AnalysisReport:
        return AnalysisReport.load(self.output.with_suffix(".json"))


def analysed(
    variables: dict[str, str],
    output: Path,
    script: str,
    *words: str,
    options: tuple[str, ...] = (),
    ranks: int = 0,
    alone: bool = False,
) -> Analysed:
    """``alone``: in processes of their own. Else in forks of one that has imported torch."""
    command = [sys.executable, str(SCRIPTS / script), *words]
    if ranks:
        run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command[1:1] = ["-m", *run]
    given = ["analyze", "--seconds", "1", "--output", str(output), *options, "--", *command]
    if alone:
        done = subprocess.run(
            [sys.executable, "-c", PATIENT, *given],
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    else:
        done = warm.penstock(given, variables, output.parent)
    return Analysed(done.returncode, done.stdout, done.stderr, output)


@pytest.mark.usefixtures("torchvision")
def test_a_tutorial_is_analysed_unchanged(
    variables: dict[str, str], place: Path, tmp_path: Path
) -> None:
    words = ("--data", str(place / "photos"), "--workers", "2", *LONG)
    done = analysed(variables, tmp_path / "plain", "plain.py", *words, alone=True)
    assert done.code == 0, done.error
    verdict = done.out.splitlines()[0].split(":")[0]
    assert verdict == "no verdict" or verdict.endswith("-bound")
    assert "penstock: done; the script ends here" in done.error
    ends = [line for line in done.out.splitlines() if line.startswith("loss ")]
    assert not ends, "the script ran to its end"
    report = done.report
    assert (report.setup.samples, report.setup.batch, report.setup.workers) == (26, 8, 2)
    assert report.setup.loader == "torch.utils.data.DataLoader"
    names = [phase.name for phase in report.phases]
    assert names == ["as it is", "replay", "cached", "cold", "prep", "storage", "cache"]
    # The files were recorded in the workers that opened them.
    files = list((place / "photos" / "train").rglob("*.jpg"))
    mean = sum(one.stat().st_size for one in files) / len(files)
    assert report.setup.sample_bytes == pytest.approx(mean, rel=0.25)
    assert report.costs.penstock is not None
    operations = [one.name for one in report.operations]
    assert any("Resize" in one for one in operations), operations
    assert len(report.batch_times) > 4
    assert done.output.with_suffix(".html").read_text().startswith("<!doctype html>")
    # No process is left, and what-if can read the report.
    photos = str(place / "photos")
    assert not [process for process in psutil.process_iter() if _mentions(process, photos)]
    asked = subprocess.run(
        [sys.executable, "-m", "penstock", "what-if", f"{done.output}.json", "--json"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    # On a busy machine the model may be too far from what was measured.
    refused = asked.returncode == 1 and "Nothing can be predicted" in asked.stderr
    assert refused or json.loads(asked.stdout)["present"]["speed"] > 0


def _mentions(process: psutil.Process, word: str) -> bool:
    try:
        return process.pid != os.getpid() and any(word in one for one in process.cmdline())
    except psutil.Error:
        return False


def test_a_script_goes_on_with_its_model_restored(
    variables: dict[str, str], tmp_path: Path
) -> None:
    alone = warm.run(SCRIPTS / "custom.py", ["--workers", "0"], variables, tmp_path)
    assert alone.returncode == 0, alone.stderr
    done = analysed(
        variables, tmp_path / "on", "custom.py", "--workers", "0", options=("--continue",)
    )
    assert done.code == 0, done.error
    assert done.report.setup.workers == 0
    assert "the script goes on" in done.error

    def loss(text: str) -> str:
        (line,) = (line for line in text.splitlines() if line.startswith("loss "))
        return line.split()[1]

    assert loss(done.out) == loss(alone.stdout)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("script", "package"),
    [("with_lightning.py", "lightning"), ("with_accelerate.py", "accelerate")],
)
def test_training_loops_of_libraries_are_analysed_too(
    variables: dict[str, str], tmp_path: Path, script: str, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = analysed(variables, tmp_path / package, script, "--workers", "1", *LONG)
    assert done.code == 0, done.error
    assert done.report.rate("replay")
    assert done.report.setup.workers == 1


def test_every_rank_is_measured_and_the_slowest_named(
    variables: dict[str, str], tmp_path: Path
) -> None:
    done = analysed(variables, tmp_path / "ranks", "ranks.py", *LONG, ranks=2)
    assert done.code == 0, done.error
    report = done.report
    both = {report.setup.rank, *(one.setup.rank for one in report.ranks)}
    assert both == {0, 1}
    assert report.setup.world == 2
    # Ranks begin and end each turn together. How many of its first steps only warm up is decided by
    # each rank's own clock.
    (other,) = report.ranks
    for name in ("as it is", "cached", "replay"):
        mine, theirs = report.phase(name), other.phase(name)
        assert mine is not None
        assert theirs is not None
        assert mine.turns == theirs.turns
        assert abs(mine.steps - theirs.steps) <= WARM_UP_AS_IT_IS * mine.turns
    last = slowest(rank_speeds(report))
    named = [line for line in done.out.splitlines() if "is the slowest" in line]
    if last is None:
        assert named == []
    else:
        assert last.report.setup.rank == report.setup.rank
        assert named[0].startswith(f"Rank {report.setup.rank} is the slowest")
    replays = [line for line in done.error.splitlines() if "training loop: replay" in line]
    replay = report.phase("replay")
    assert replay is not None
    assert len(replays) == replay.turns  # rank 0 says it, the other does not


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import torch; from torch.utils.data import DataLoader\n"
            "with torch.no_grad():\n for _ in DataLoader(range(8)): pass",
            "No training loop took batches from a loader",
        ),
        (
            "from torch.utils.data import DataLoader\n"
            "epoch = iter(DataLoader(range(8)))\n"
            "for _ in range(3): next(epoch)",
            "The script ended after 3 steps",
        ),
    ],
)
def test_an_analysis_without_a_result_says_why(
    variables: dict[str, str], tmp_path: Path, code: str, message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    given = ["analyze", "--output", str(tmp_path / "none"), "--", sys.executable, str(script)]
    done = warm.penstock(given, variables, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert not list(tmp_path.glob("none*"))


def test_an_analysis_of_a_script_without_torch_says_so(
    variables: dict[str, str], tmp_path: Path
) -> None:
    given = ["analyze", "--output", str(tmp_path / "none"), "--", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *given, "-c", "raise ValueError('mine')"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 1
    assert "No process of" in done.stderr
    assert not list(tmp_path.glob("none*"))
