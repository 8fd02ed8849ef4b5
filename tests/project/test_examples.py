"""The examples run with the options and results that their docstrings describe."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tempfile
import wave
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.node.conftest import node_directory  # noqa: F401
from tests.support import ROOT
from tests.support.warm import start


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up the module that it is defined in.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Thirty short tones of three pitches, as the bytes of WAV files."""
    rows = []
    for number in range(30):
        time = np.arange(4_000) / 8_000
        tone = 0.3 * np.sin(2 * np.pi * (300 + 500 * (number % 3)) * time)
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 8_000, 0, "NONE", ""))
            sound.writeframes((tone * 32767).astype("<i2").tobytes())
        rows.append({"audio": file.getvalue(), "label": number % 3})
    path = tmp_path / "digits.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("options", "trained", "decoded", "expected"),
    [
        (["--epochs", "2"], 48, 48, "spec_augment"),
        (["--epochs", "4", "--reuse", "2"], 96, 60, "60 spectrograms made, 36 used again"),
        (["--epochs", "2", "--echo", "2"], 48, 24, "echo"),
    ],
    ids=["plain", "reuse", "echo"],
)
def test_speech_trains_with_reuse_and_with_echo(
    digits: Path,
    options: list[str],
    trained: int,
    decoded: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of two workers, one could make a spectrogram for the epoch after the last one, which is begun
    # early, before the other makes it for the last epoch: then it would not be counted.
    speech = example("speech")
    one_worker = partial(speech.penstock.torch.loader, workers=1)
    monkeypatch.setattr(speech.penstock.torch, "loader", one_worker)
    accuracy = speech.main(["--data", str(digits), "--batch", "8", *options])
    output = capsys.readouterr().out
    assert 0 <= accuracy <= 1
    assert f"{trained} samples trained on, {decoded} recordings decoded" in output
    assert expected in output


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A hundred small pictures, brighter the higher their label."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(100):
        level = 20 * (number % 10)
        picture = level + rng.integers(0, 40, (32, 32, 3), dtype=np.uint8)
        done, file = cv2.imencode(".png", picture.astype(np.uint8))
        assert done
        rows.append({"image": file.tobytes(), "label": number % 10})
    path = tmp_path / "pictures.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    return path


class SearchJob:
    """A job of the search, started without importing torch again."""

    def __init__(self, command: list[str]) -> None:
        _, script, *words = command
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "errors"
        self._process = start(Path(script), words, os.environ, self._errors)

    def wait(self) -> int:
        with self._folder:
            self._process.join(500)
            self._process.kill()
            assert self._process.exitcode == 0, self._errors.read_text()
            return 0


@pytest.mark.usefixtures("node_directory")
def test_search_has_the_same_results_with_and_without_share(
    pictures: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("optuna is not installed here")
    # The node must live until the example has read its CPU time.
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "20")
    options = ["--compare", "--jobs", "2", "--trials", "3", "--rows", "60", "--epochs", "2"]
    options += ["--batch", "16"]
    search = example("search")
    # Forks of a process that has imported torch. They are no children of this one, so it does not
    # know their CPU time.
    monkeypatch.setattr(search, "subprocess", SimpleNamespace(Popen=SearchJob))
    monkeypatch.setattr(search, "children_cpu", count(1.0).__next__)
    alone, shared = search.main(["--data", str(pictures), *options])
    assert len(alone.parameters) == len(alone.accuracies) == 3
    assert shared.parameters == alone.parameters
    assert shared.accuracies == alone.accuracies
    assert "every trial has the same result" in capsys.readouterr().out
