"""torchaudio, to compare with."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from benchmarks.peers.torchaudio_audio import import_torchaudio


@pytest.fixture(scope="session")
def torchaudio() -> Any:
    """torchaudio, even if its compiled part does not match the installed torch.

    The functions under comparison do not need the compiled part.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch = importlib.import_module("torch")
            torch.set_num_threads(1)
            found = import_torchaudio()
            importlib.import_module("torchaudio.transforms")
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"torchaudio cannot be imported: {error}")
    return found
