from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock import cli
from penstock.errors import MissingExtraError, StoreError

Run = Callable[[argparse.Namespace], int]

HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""


def command(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env={**os.environ, "COLUMNS": "100", **settings},
    )


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Make a function the command ``try``."""

    def set_up(run: Run) -> None:
        module = types.ModuleType("command_on_trial")
        module.run = run  # type: ignore[attr-defined]
        module.configure = lambda parser: parser.add_argument("--deep")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "command_on_trial", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("command_on_trial", "a command on trial"))

    return set_up


def test_the_version_is_printed() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"penstock {penstock.__version__}\n")


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom penstock.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(' '.join(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "usage: penstock" in done.stdout
    assert "argparse" in loaded
    assert not loaded & {"numpy", "torch", "cv2", "lmdb", "pyarrow", "simplejpeg", "rich"}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert name in shown
        assert line in shown
    assert "example:" in shown


def test_every_command_is_there_and_explains_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert f"usage: penstock {name}" in shown
        assert "example" in shown


def test_an_unknown_command_is_named_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "there is no command 'docter'. Did you mean doctor?" in shown.err


def test_an_unknown_command_unlike_any_other_gets_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["zzz"]) == 2
    shown = capsys.readouterr().err
    assert "Did you mean" not in shown
    assert "doctor" in shown


@pytest.mark.parametrize("words", [["--nonsense"], ["doctor", "--nonsense"]])
def test_an_unknown_option_is_misuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_options_after_the_command_are_the_commands(offer: Callable[[Run], None]) -> None:
    seen: list[str] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments.deep)
        return 7

    offer(run)
    assert cli.main(["try", "--deep=--version"]) == 7
    assert seen == ["--version"]


@pytest.mark.parametrize(
    "error", [StoreError("the disk is full."), MissingExtraError.of("it", "Ray", "cluster")]
)
def test_an_error_of_penstocks_is_told_without_a_traceback(
    error: Exception, offer: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise error

    offer(run)
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == f"penstock: {error}\n"


def test_any_other_error_keeps_its_traceback(offer: Callable[[Run], None]) -> None:
    def run(_: argparse.Namespace) -> int:
        raise ZeroDivisionError

    offer(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import sys, threading\n"
        "def configure(parser): pass\n"
        "def run(arguments):\n"
        "    sys.stdout.write('ready\\n'); sys.stdout.flush(); threading.Event().wait()\n"
    )
    code = (
        "import sys; from penstock import cli; "
        "cli.COMMANDS['wait'] = ('waiting', ''); sys.exit(cli.main(['wait']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (130, "")


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(
        "import sys\n"
        "def configure(parser): pass\n"
        "def run(arguments):\n"
        "    for _ in range(100):\n"
        "        sys.stdout.write('x' * 100_000)\n"
        "    return 0\n"
    )
    code = (
        "import sys; from penstock import cli; "
        "cli.COMMANDS['talk'] = ('talking', ''); sys.exit(cli.main(['talk']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        complaints = process.stderr.read()
    assert (process.returncode, complaints) == (1, b"")


def test_the_doctor_looks_at_this_machine() -> None:
    done = command("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    for name in ("python", "cores", "memory", "shared memory", "open files", "torch"):
        assert f"  {name} " in done.stdout


def test_the_doctor_tells_machines_and_collects_leftovers(tmp_path: Path) -> None:
    place = tmp_path / f"penstock-{os.getuid()}"
    (place / "run-1-dead").mkdir(parents=True)
    place.chmod(0o700)
    # A file system that is too small for memory stores sends them to the temporary directory.
    settings = {"PENSTOCK_SHM_DIR": str(tmp_path / "none"), "TMPDIR": str(tmp_path)}
    before = json.loads(command("doctor", "--json", **settings).stdout)
    leftovers = [one for one in before["findings"] if one["name"] == "leftovers"]
    assert [one["level"] for one in leftovers] == ["warning"]
    assert (place / "run-1-dead").exists()
    after = json.loads(command("doctor", "--json", "--fix", **settings).stdout)
    leftovers = [one for one in after["findings"] if one["name"] == "leftovers"]
    assert [one["level"] for one in leftovers] == ["ok"]
    assert not place.exists()


def test_the_doctor_works_where_nothing_optional_is_installed(tmp_path: Path) -> None:
    hidden = ("cv2", "pyarrow", "simplejpeg", "torch", "PIL")
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(tmp_path), str(Path(penstock.__file__).parents[1])])
    done = command("doctor", "--json", PYTHONPATH=path)
    told = json.loads(done.stdout)
    packages = told["facts"]["packages"]
    assert {name for name, one in packages.items() if one["state"] == "absent"} == set(hidden)
    assert [one["level"] for one in told["findings"] if one["name"] == "torch"] == ["note"]
    assert "problem" not in {
        one["level"] for one in told["findings"] if one["topic"] in ("Packages", "torch")
    }


def test_the_doctor_exits_with_1_where_a_core_package_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=("lmdb",)))
    path = os.pathsep.join([str(tmp_path), str(Path(penstock.__file__).parents[1])])
    done = command("doctor", PYTHONPATH=path)
    assert done.returncode == 1
    assert "1 problem" in done.stdout
    assert 'pip install "lmdb' in done.stdout


def test_the_doctor_says_so_where_it_cannot_show_anything(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=("rich", "rich.console")))
    path = os.pathsep.join([str(tmp_path), str(Path(penstock.__file__).parents[1])])
    done = command("doctor", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock: penstock doctor needs rich")
