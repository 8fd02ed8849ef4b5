"""A run directory exists as long as its process, and is removed when the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import config
from penstock.errors import StoreError
from penstock.store import RunDir, collect_stale, stale


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    monkeypatch.setattr(config, "SMALL_SHM", 0)
    yield tmp_path / f"penstock-{os.getuid()}"
    RunDir.current().close()


PREAMBLE = """
import os, sys
from pathlib import Path
from penstock.store import RunDir, collect_stale, stale
parent = Path(sys.argv[1])
"""

HOLD = """
run = RunDir(parent)
(run.path / "data").write_bytes(bytes(100_000))
print(run.path, flush=True)
sys.stdin.read()
"""


def _start(parent: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script, str(parent), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _path(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process ended early"
    return Path(line.strip())


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_it_is_created_on_first_use_and_removed_by_closing(parent: Path) -> None:
    run = RunDir()
    assert not parent.exists()
    path = run.path
    assert path == run.path
    assert path.parent == parent
    assert path.name.startswith(f"run-{os.getpid()}-")
    assert path.stat().st_mode & 0o777 == parent.stat().st_mode & 0o777 == 0o700
    (path / "store").mkdir()
    (path / "store" / "data").write_text("x")
    run.close()
    assert not parent.exists()
    run.close()
    assert run.path != path
    run.close()


def test_a_process_has_one_shared_run_directory(parent: Path) -> None:
    assert RunDir.current() is RunDir.current()
    assert RunDir.current().path.parent == parent


def test_the_parent_stays_while_another_run_needs_it(parent: Path) -> None:
    one, two = RunDir(), RunDir()
    first, second = one.path, two.path
    one.close()
    assert not first.exists()
    assert second.exists()
    two.close()
    assert not parent.exists()


@pytest.mark.parametrize(
    "ending", ["", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), 2)"]
)
def test_it_is_removed_however_the_process_exits(parent: Path, ending: str) -> None:
    script = (
        "print(RunDir(parent).path)\nkept = RunDir.current()\nkept._parent = parent\nkept.path\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script + ending, str(parent)],
        capture_output=True,
        text=True,
    )
    assert Path(run.stdout.strip()).parent == parent
    assert not parent.exists()


def test_it_is_removed_when_it_is_garbage_collected(parent: Path) -> None:
    run = RunDir()
    path = run.path
    del run
    assert not path.exists()


def test_the_leftover_of_a_killed_process_is_listed_and_collected(parent: Path) -> None:
    dead, alive = _start(parent, HOLD), _start(parent, HOLD)
    left, kept = _path(dead), _path(alive)
    assert stale() == []
    assert collect_stale() == []
    _kill(dead)
    [(path, nbytes)] = stale()
    assert path == left
    assert 100_000 <= nbytes <= 150_000
    assert left.exists()
    assert collect_stale() == [left]
    assert not left.exists()
    assert kept.exists()
    assert stale() == []
    alive.communicate()
    assert not parent.exists()


def test_the_next_run_directory_removes_leftovers(parent: Path) -> None:
    dead = _start(parent, HOLD)
    left = _path(dead)
    _kill(dead)
    run = RunDir()
    assert run.path.exists()
    assert not left.exists()
    run.close()


def test_removing_the_last_leftover_removes_the_parent(parent: Path) -> None:
    assert stale() == []
    assert collect_stale() == []
    dead = _start(parent, HOLD)
    left = _path(dead)
    _kill(dead)
    assert collect_stale() == [left]
    assert not parent.exists()


def test_a_directory_without_a_lock_file_is_a_leftover(parent: Path) -> None:
    (parent / "run-1-abc").mkdir(parents=True)
    parent.chmod(0o700)
    (parent / "something").mkdir()
    assert collect_stale() == [parent / "run-1-abc"]
    assert (parent / "something").exists()


FORK = """
run = RunDir(parent)
path = run.path
if os.fork() == 0:
    {child}
    print(path, flush=True)
    os.close(1)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""

SPAWN = """
import subprocess
run = RunDir(parent)
child = subprocess.Popen(["cat"], close_fds=False)
print(run.path, flush=True)
os.wait()
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("script", [FORK.format(child="pass"), SPAWN])
def test_a_child_that_lives_on_does_not_keep_it_alive(parent: Path, script: str) -> None:
    process = _start(parent, script)
    left = _path(process)
    assert stale() == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The child still waits for the end of this pipe.
    assert process.stdin is not None
    assert collect_stale() == [left]
    process.communicate()


def test_a_forked_child_has_its_own_and_leaves_that_of_the_parent(parent: Path) -> None:
    script = """
run = RunDir(parent)
path = run.path
pid = os.fork()
if pid == 0:
    own = run.path
    print(own != path and own.exists() and path.exists(), flush=True)
    sys.exit()
os.waitpid(pid, 0)
print(path.exists(), len(list(parent.iterdir())), flush=True)
"""
    output, _ = _start(parent, script).communicate()
    assert output == "True\nTrue 1\n"
    assert not parent.exists()


def test_processes_that_start_at_once_remove_leftovers_and_spare_each_other(parent: Path) -> None:
    dead = [_start(parent, HOLD) for _ in range(2)]
    left = [_path(process) for process in dead]
    for process in dead:
        _kill(process)
    alive = [_start(parent, HOLD) for _ in range(6)]
    kept = [_path(process) for process in alive]
    assert sorted(parent.iterdir()) == sorted(kept)
    assert not any(path.exists() for path in left)
    for process in alive:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait() for process in alive] == [0] * 6
    for process in alive:
        assert process.stdout is not None
        process.stdout.close()
    assert not parent.exists()


def test_repeated_starts_and_exits_never_remove_a_live_one(parent: Path) -> None:
    script = """
for _ in range(60):
    run = RunDir(parent)
    path = run.path
    (path / "data").write_text("x")
    stale(parent), collect_stale(parent)
    assert (path / "data").read_text() == "x"
    run.close()
    assert not path.exists()
"""
    processes = [_start(parent, script) for _ in range(4)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 4
    assert not parent.exists()


def test_a_parent_that_others_could_write_to_is_refused(parent: Path) -> None:
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(StoreError, match="mode 0777"):
        _ = RunDir().path
    with pytest.raises(StoreError, match="mode 0777"):
        stale()


def test_a_full_file_system_is_an_error_with_a_remedy(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, mode: int = 0o777) -> None:
        raise OSError(28, "No space left on device")

    parent.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.store.rundir.own_directory", lambda path: None)
        patch.setattr(Path, "mkdir", failing)
        with pytest.raises(StoreError, match=r"No space left.*PENSTOCK_SHM_DIR"):
            _ = RunDir().path
