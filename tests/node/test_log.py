"""The node's log: lines with date and time, and no failure if they cannot be written."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from io import StringIO

import numpy as np

import penstock as ps
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.log import LogHandler


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
    assert wait_for_exit(status["pid"])
    lines = node_directory.log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    first, joined, *_, last = [line[20:] for line in lines]
    assert first.startswith(f"node {status['pid']} starts with ")
    assert re.fullmatch(r"a: process \d+ has joined, members: 1", joined)
    assert last == f"node {status['pid']} ends"
