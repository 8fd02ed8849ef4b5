"""The command line: help, unknown commands and options, errors, and ``penstock doctor``."""

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
from typing import Any

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


def without(place: Path, *hidden: str) -> str:
    """The ``PYTHONPATH`` of programs that cannot import these modules.

    Without torch the doctor takes a second instead of three.
    """
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return os.pathsep.join([str(place), str(Path(penstock.__file__).parents[1])])


def levels(report: dict[str, Any], name: str) -> list[str]:
    """The levels of the doctor's findings of one name."""
    return [finding["level"] for finding in report["findings"] if finding["name"] == name]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Register a function as the command ``try``."""

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


def test_every_command_has_help_with_an_example(
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


def test_an_unknown_command_without_a_close_match_gets_the_list(
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


@pytest.mark.parametrize(
    ("words", "prog", "option", "guess"),
    [
        (["--vresion"], "penstock", "--vresion", "--version"),
        (["analyze", "--secnds", "3", "--", "true"], "penstock analyze", "--secnds", "--seconds"),
        (["doctor", "--jsno"], "penstock doctor", "--jsno", "--json"),
        (["profile", "--sampels=5"], "penstock profile", "--sampels", "--samples"),
        (["profile", "x.py", "--sampels", "5"], "penstock profile", "--sampels", "--samples"),
        (["run", "--cahce", "1GB", "--", "true"], "penstock run", "--cahce", "--cache"),
        (["run", "--workers", "2", "--ehco=2", "true"], "penstock run", "--ehco", "--echo"),
        (["status", "--wacth"], "penstock status", "--wacth", "--watch"),
        (["stop", "--nwo"], "penstock stop", "--nwo", "--now"),
        (["store", "list", "--pleace", "/tmp"], "penstock store list", "--pleace", "--place"),
        (["store", "clear", "--aal"], "penstock store clear", "--aal", "--all"),
        (["top", "--intervall", "5"], "penstock top", "--intervall", "--interval"),
        (["watch", "--prot", "9000"], "penstock watch", "--prot", "--port"),
        (["watch", "-port", "9000"], "penstock watch", "-port", "--port"),
        (["what-if", "--cahce=64GB"], "penstock what-if", "--cahce", "--cache"),
    ],
)
def test_an_unknown_option_is_named_with_the_closest_known_one(
    words: list[str], prog: str, option: str, guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"{prog}: there is no option {option}. Did you mean {guess}?\n"
        f"`{prog} --help` lists its options.\n"
    )


def test_the_unknown_options_of_every_command_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--qqqq", "--hepl"])
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            f"penstock {name}: there is no option --qqqq.\n"
            f"penstock {name}: there is no option --hepl. Did you mean --help?\n"
            f"`penstock {name} --help` lists its options.\n"
        )


def test_help_is_shown_in_spite_of_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", "--prot", "9000", "--help"])
    assert ended.value.code == 0
    assert "usage: penstock watch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--", "echo", "--prot", "--cahce=1"],
        ["echo", "--prot", "--cahce=1"],
        # Abbreviates --seed, --share and --split, which argparse would call ambiguous.
        ["echo", "--s", "--help"],
        ["--", "echo", "--s", "--", "--prot"],
        ["--workers", "2", "echo", "--work"],
        ["--no-nat", "echo", "-1"],
        ["--share=a name with blanks", "echo", "--prot"],
    ],
)
def test_options_of_the_users_command_are_passed_on(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *words]) == 0
    after_echo = words[words.index("echo") + 1 :]
    assert capfd.readouterr().out == " ".join(after_echo) + "\n"


def test_negative_numbers_and_words_after_a_dash_are_not_options(
    offer: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments.deep)
        return 0

    offer(run)
    assert cli.main(["try", "--deep", "-5"]) == 0
    assert cli.main(["try", "--de", "-0.5"]) == 0
    assert seen == ["-5", "-0.5"]
    with pytest.raises(SystemExit):
        cli.main(["try", "--", "--depe"])
    assert "there is no option" not in capsys.readouterr().err


def test_options_after_the_command_belong_to_the_command(offer: Callable[[Run], None]) -> None:
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
def test_a_penstock_error_is_printed_without_a_traceback(
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


def test_a_closed_output_pipe_gives_no_traceback(tmp_path: Path) -> None:
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


def test_the_doctor_checks_this_machine() -> None:
    done = command("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    for name in ("python", "cores", "memory", "shared memory", "open files", "torch"):
        assert f"  {name} " in done.stdout


def test_the_doctor_writes_json_and_removes_leftovers(tmp_path: Path) -> None:
    place = tmp_path / f"penstock-{os.getuid()}"
    (place / "run-1-dead").mkdir(parents=True)
    place.chmod(0o700)
    # If the directory for shared memory is missing, memory stores use the temporary directory.
    settings = {
        "PENSTOCK_SHM_DIR": str(tmp_path / "none"),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": without(tmp_path / "site", "torch"),
    }
    before = json.loads(command("doctor", "--json", **settings).stdout)
    assert levels(before, "leftovers") == ["warning"]
    assert (place / "run-1-dead").exists()
    after = json.loads(command("doctor", "--json", "--fix", **settings).stdout)
    assert levels(after, "leftovers") == ["ok"]
    assert not place.exists()


def test_the_doctor_works_without_optional_packages(tmp_path: Path) -> None:
    hidden = ("cv2", "pyarrow", "simplejpeg", "torch", "PIL")
    done = command("doctor", "--json", PYTHONPATH=without(tmp_path, *hidden))
    report = json.loads(done.stdout)
    packages = report["facts"]["packages"]
    absent = {name for name, package in packages.items() if package["state"] == "absent"}
    assert absent == set(hidden)
    assert levels(report, "torch") == ["note"]
    assert "problem" not in {
        finding["level"]
        for finding in report["findings"]
        if finding["topic"] in ("Packages", "torch")
    }


def test_the_doctor_exits_with_1_if_a_core_package_is_missing(tmp_path: Path) -> None:
    done = command("doctor", PYTHONPATH=without(tmp_path, "lmdb", "torch"))
    assert done.returncode == 1
    assert "1 problem" in done.stdout
    assert 'pip install "lmdb' in done.stdout


def test_the_doctor_reports_that_rich_is_missing(tmp_path: Path) -> None:
    done = command("doctor", PYTHONPATH=without(tmp_path, "rich", "rich.console"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock: penstock doctor needs rich")
