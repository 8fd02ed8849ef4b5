"""Every case runs with torch's loader and with ours: torch says what is right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from penstock.torch import DataLoader


@pytest.fixture(params=["torch", "penstock"])
def loader(request: pytest.FixtureRequest) -> Any:
    """The class of loaders."""
    return torch.utils.data.DataLoader if request.param == "torch" else DataLoader


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same generators for every case, and one thread, so that forks are cheap."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    yield
    torch.set_num_threads(threads)
