"""A command started by ``penstock run`` behaves as if a shell had started it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import PenstockError
from penstock.inject import launch, unseen, words

PENSTOCK = [sys.executable, "-m", "penstock", "run", "--"]


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_that_of_the_command(script: str, code: int) -> None:
    assert launch(["sh", "-c", script], os.environ) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on_and_the_command_decides(number: signal.Signals) -> None:
    code = (
        f"import signal, sys; signal.alarm(60); wanted = [{int(number)}]; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, wanted); "
        "print('ready', flush=True); signal.sigwait(wanted); sys.exit(9)"
    )
    with subprocess.Popen(
        [*PENSTOCK, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(100) == 9


def test_a_typed_ctrl_c_reaches_the_command_once() -> None:
    # A terminal sends Ctrl-C to all processes in its foreground.
    code = (
        "import signal; signal.alarm(60); wanted = {signal.SIGINT, signal.SIGTERM}; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, wanted); print('ready', flush=True)\n"
        "while signal.sigwait(wanted) == signal.SIGINT: print('typed', flush=True)\n"
        "print('ended', flush=True)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*PENSTOCK, sys.executable, "-c", code])
    with os.fdopen(terminal, "rb+", buffering=0) as ends:
        assert ends.readline() == b"ready\r\n"
        ends.write(b"\x03")
        assert ends.readline() == b"^Ctyped\r\n"
        # Signals are passed on in order, so a second SIGINT would arrive before this SIGTERM.
        os.kill(pid, signal.SIGTERM)
        assert ends.readline() == b"ended\r\n"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_command_has_the_signals_of_a_shell() -> None:
    # No signal is blocked or ignored in the command.
    code = (
        "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), "
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run(
        [*PENSTOCK, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set() True\n"


def test_options_and_output_of_the_command_stay_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--cache", "1MB", "--", "echo", "--cache", "x"]) == 0
    shown = capfd.readouterr()
    assert shown.out == "--cache x\n"
    assert shown.err.startswith("penstock: No process of `echo --cache x` made a torch DataLoader")


def test_a_command_that_cannot_be_run_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="there is no command 'trian', on the PATH"):
        launch(["trian"], os.environ)
    with pytest.raises(PenstockError, match="cannot be run: Permission denied"):
        launch([str(tmp_path)], os.environ)
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(PenstockError, match=r"is a Python script.*: python .*train.py --lr 1"):
        launch([str(script), "--lr", "1"], os.environ)


def test_the_dashes_before_the_command_are_optional() -> None:
    assert words(["--", "python", "--", "x"]) == ["python", "--", "x"]
    assert words(["python", "-m", "x"]) == ["python", "-m", "x"]
    with pytest.raises(PenstockError, match="there is no command to run"):
        words(["--"])


def test_the_flag_that_keeps_penstock_out_is_named() -> None:
    assert "python3 -E ignores PYTHONPATH" in unseen(["python3", "-u", "-E", "train.py"])
    assert "python -I ignores" in unseen(["/usr/bin/python", "-uI", "train.py"]).replace(
        "/usr/bin/", ""
    )
    for command in (["python", "train.py", "-E"], ["bash", "-E", "x"], ["python", "-m", "x", "-I"]):
        assert "or none was reached" in unseen(command)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--reuse", "3"], "--reuse 3 needs --split"),
        (["--split", "3"], "--split belongs to --reuse"),
        (["--reuse", "auto", "--split", "3"], "--split has no effect with --reuse auto"),
        (["--cache", "lots"], "--cache is 'lots'"),
    ],
)
def test_invalid_options_are_refused_before_the_command_starts(
    options: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, "--", "echo", "started"]) == 1
    shown = capfd.readouterr()
    assert shown.out == ""
    assert why in shown.err
