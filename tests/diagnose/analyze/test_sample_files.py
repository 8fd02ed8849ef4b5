"""Files that a dataset opens are recorded, also in forks; files are dropped from memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.diagnose.analyze.sample_files import (
    SampleFiles,
    can_drop,
    characters_read,
    child_processes,
    device_bytes,
    drop,
)
from penstock.diagnose.analyze.subject import relative_sizes

# An audit hook cannot be removed from its process, so this runs in a process of its own.
SCRIPT = """
import os, sys
from pathlib import Path
from penstock.diagnose.analyze.sample_files import OpenedFiles
notes, data = Path(sys.argv[1]), Path(sys.argv[2])
opened = OpenedFiles(notes)
(data / "a").read_bytes()
opened.on = True
(data / "b").read_bytes()
(data / "b").read_bytes()
(data / "written").write_bytes(b"")
if os.fork() == 0:
    os.close(os.open(data / "c", os.O_RDONLY))
    opened.note("times", b"0.5\\n")
    os._exit(0)
os.wait()
opened.on = False
(data / "d").read_bytes()
for name in opened.files():
    print(Path(name).name)
print(opened.times())
"""


def test_files_are_recorded_while_it_is_on_and_in_forks(tmp_path: Path) -> None:
    notes, data = tmp_path / "notes", tmp_path / "data"
    notes.mkdir()
    data.mkdir()
    for name in "abcd":
        (data / name).write_bytes(b"x")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(notes), str(data)],
        capture_output=True,
        text=True,
        check=True,
    )
    *names, times = done.stdout.splitlines()
    assert sorted(names) == ["b", "c"]
    assert times == "[0.5]"


def test_dropped_files_are_read_from_the_device_again(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(4 << 20))
    before = device_bytes()
    if before is None or not can_drop():
        pytest.skip("the system does not count reads of the device")
    assert drop([str(path), str(tmp_path / "missing")]) == 4 << 20
    path.read_bytes()
    cold = device_bytes()
    path.read_bytes()
    warm = device_bytes()
    assert cold is not None
    assert warm is not None
    if cold == before:
        pytest.skip("this file system is in memory")
    assert cold - before >= 4 << 20
    assert warm == cold


def test_requested_bytes_are_counted_from_memory_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    before = characters_read()
    path.read_bytes()
    after = characters_read()
    if before is None or after is None:
        pytest.skip("the system does not count reads")
    assert after - before >= 100_000


def test_files_are_read_endlessly(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(1_000 * (number + 1)))
    files = SampleFiles([str(tmp_path / str(number)) for number in (0, 1, 2, 1)], parts=2)
    assert files.sizes() == [1_000, 2_000, 3_000]
    reading = files.reading(2, cold=True)
    assert [next(reading) for _ in range(6)] == [1_000, 2_000, 3_000] * 2
    reading.close()  # type: ignore[attr-defined]
    files.drop_next_part()
    files.close()


def test_children_of_children_are_listed() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 30 & echo $!; wait"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        assert {child.pid, grandchild} <= set(child_processes())
    finally:
        os.kill(grandchild, 9)
        child.kill()
        child.wait()
        child.stdout.close()


def test_equal_sizes_need_no_relative_sizes() -> None:
    assert relative_sizes([]) == ()
    assert relative_sizes([7, 7, 7]) == ()
