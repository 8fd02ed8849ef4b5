"""torchaudio, to compare with."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from benchmarks.peers.torchaudio_audio import import_torchaudio


@pytest.fixture(scope="session")
def torchaudio() -> Any:
    """torchaudio, also where its compiled part does not fit the torch that is installed.

    The functions compared with need none of it, and the import only asks for a few names.
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
