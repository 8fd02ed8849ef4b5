"""The node's log: lines with date and time, and no failure if they cannot be written."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from io import StringIO
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.log import LARGEST, LogHandler, trim
from penstock.node.service import Service


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("penstock.node", logging.INFO, __file__, 1, text, (), None)


def test_lines_begin_with_date_and_time() -> None:
    stream = StringIO()
    LogHandler(stream).handle(record("node 7 ends"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d node 7 ends\n", stream.getvalue())


def test_a_full_disk_is_no_error() -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115
    handler = LogHandler(stream)
    for _ in range(1_000):  # more than any buffer holds
        handler.handle(record("x" * 100))
    with suppress(OSError):
        stream.close()


def test_the_log_has_the_members_of_a_group(node_directory: NodeDirectory) -> None:
    with ps.from_dataset(np.arange(8.0)).batch(4).loader(seed=0, share="a") as loader:
        assert len(list(loader)) == 2
        status = request_status(node_directory)
    assert status is not None
    request_end(node_directory)
    assert wait_for_exit(status["pid"], 100)
    lines = node_directory.log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    first, joined, *_, last = [line[20:] for line in lines]
    assert first.startswith(f"node {status['pid']} starts with ")
    assert re.fullmatch(r"a: process \d+ has joined, members: 1", joined)
    assert last == f"node {status['pid']} ends"


def test_a_large_log_is_cut_to_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    lines = [f"line {number}\n" for number in range(1000)]
    log.write_text("".join(lines))
    trim(log, largest=20_000, kept=500)
    assert log.read_text() == "".join(lines)
    trim(log, largest=5_000, kept=500)
    first, *rest = log.read_text().splitlines(keepends=True)
    assert first == "(earlier lines were removed)\n"
    assert rest == lines[-len(rest) :]
    assert 400 < len("".join(rest)) <= 500


def test_a_log_that_is_written_to_all_the_time_stays_small(
    node_directory: NodeDirectory,
) -> None:
    """The output of user code goes to the log too."""
    node_directory.create()
    service = Service(node_directory, workers=1, staging=1 << 20, idle=0.0)
    with open(node_directory.log, "ab", buffering=0) as output:
        output.write(b"x" * 99 + b"\n" + b"y" * LARGEST)
        service._tick()
        output.write(b"more\n")
    assert node_directory.log.stat().st_size < LARGEST
    assert node_directory.log.read_bytes().endswith(b"y" * 1000 + b"more\n")
    for end in (service._alarm, service._bell):
        end.close()
