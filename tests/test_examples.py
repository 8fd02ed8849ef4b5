"""The examples run as their pages say."""

from __future__ import annotations

import importlib.util
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[1]


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
    ("options", "trained", "decoded", "told"),
    [
        (["--epochs", "2"], 48, 48, "spec_augment"),
        (["--epochs", "4", "--reuse", "2"], 96, 60, "60 spectrograms made, 36 used again"),
        (["--epochs", "2", "--echo", "2"], 48, 24, "echo"),
    ],
    ids=["plain", "reuse", "echo"],
)
def test_speech_is_learnt_from_recordings_used_again(
    digits: Path,
    options: list[str],
    trained: int,
    decoded: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("speech", ROOT / "examples" / "speech.py")
    assert spec is not None
    assert spec.loader is not None
    speech: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speech)
    found = speech.main(["--data", str(digits), "--batch", "8", *options])
    shown = capsys.readouterr().out
    assert 0 <= found <= 1
    assert f"{trained} samples trained on, {decoded} recordings decoded" in shown
    assert told in shown
