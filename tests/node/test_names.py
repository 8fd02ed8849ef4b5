"""Names of files that are not valid UTF-8 pass through the node, its workers, log and status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.pools.wire import Wire
from penstock.errors import SampleError
from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory
from penstock.node.log import LogHandler
from penstock.node.protocol import VOCABULARY, Refused
from tests.node.test_log import record
from tests.support import ROOT

NAME = os.fsdecode(b"caf\xe9.png")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    from PIL import Image

    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for number in range(7):
        Image.fromarray(np.full((40, 40, 3), number, np.uint8)).save(folder / f"{number}.png")
    try:
        (folder / NAME).write_bytes(b"not an image")
    except OSError:
        pytest.skip("the file system accepts UTF-8 names only")
    return folder.parent


def identity(image: Any) -> Any:
    return image


@pytest.mark.parametrize("processes", [False, True])
def test_an_unreadable_file_with_such_a_name_is_skipped_and_listed(
    node_directory: NodeDirectory, photos: Path, processes: bool
) -> None:
    pipeline = ps.from_folder(str(photos)).map(ps.image.decode()).map(ps.image.center_crop(32))
    if processes:
        pipeline = pipeline.map(identity, on=0, random=False, version="1")
    with pipeline.batch(4).loader(share="a", on_error="skip", shuffle=False) as loader:
        assert sum(len(labels) for _, labels in loader) == 7
        (bad,) = loader.stats().bad_samples
        assert NAME in bad.name
    with (
        pipeline.batch(4).loader(share="b", shuffle=False) as loader,
        pytest.raises(SampleError) as raised,
    ):
        list(loader)
    assert NAME in str(raised.value)


class Unloadable:
    """A dataset that the node cannot load. The error has a name that is not valid UTF-8."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return 0.0

    def __reduce__(self) -> tuple[object, ...]:
        return open, (f"/nowhere/{NAME}",)


def test_such_a_name_in_the_error_of_a_group_is_shown_by_the_status(
    node_directory: NodeDirectory,
) -> None:
    with (
        ps.from_dataset(Unloadable(), version="1", random=False)
        .batch(2)
        .loader(share="a") as loader
    ):
        with pytest.raises(FileNotFoundError):
            next(iter(loader))
        with ps.from_dataset(np.arange(8.0)).batch(4).loader(share=f"group {NAME}") as other:
            next(iter(other))
            status = request_status(node_directory)
            shown = [
                subprocess.run(
                    [sys.executable, "-m", "penstock", "status", *more],
                    capture_output=True,
                    check=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
                ).stdout
                for more in ([], ["--json"])
            ]
    assert status is not None
    assert f"group {NAME}" in {group["name"] for group in status["groups"]}
    assert b"group caf\\udce9.png: 1 member" in shown[0]
    assert f"group {NAME}" in {group["name"] for group in json.loads(shown[1])["groups"]}


def test_the_log_shows_such_names_escaped() -> None:
    from penstock.node.log import log_stream

    read, write = os.pipe()
    LogHandler(log_stream(write)).handle(record(f"{NAME} joined"))
    os.close(write)
    with open(read, "rb") as file:
        assert b"caf\\udce9.png joined\n" in file.read()


def test_wires_carry_any_text() -> None:
    ours, theirs = Wire.pair()
    with ours, theirs:
        for text in (NAME, "\ud800 \udfff", "é", "x" * (1 << 17) + NAME):
            Wire(ours, VOCABULARY).send(Refused(text))
            received = Wire(theirs, VOCABULARY).receive()
            assert received is not None
            assert received[0] == Refused(text)
