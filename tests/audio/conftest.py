"""torchaudio, to compare with."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

import pytest


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
            found = _import()
            importlib.import_module("torchaudio.transforms")
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"torchaudio cannot be imported: {error}")
    return found


def _import() -> Any:
    try:
        return importlib.import_module("torchaudio")
    except OSError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        compiled: Any = types.ModuleType("torchaudio._extension")
        compiled.fail_if_no_align = lambda function: function
        compiled._IS_TORCHAUDIO_EXT_AVAILABLE = compiled._IS_ALIGN_AVAILABLE = False
        compiled._check_cuda_version = lambda: None
        sys.modules["torchaudio._extension"] = compiled
        return importlib.import_module("torchaudio")
