"""A dataset that draws. Its module imports little, because each worker imports it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Noisy(Dataset[Any]):  # type: ignore[misc]
    """Draws from torch's global generator, as datasets that augment samples do."""

    def __init__(self, n: int = 24, scale: float = 1.0) -> None:
        self.n = n
        self.scale = scale

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return {"x": self.scale * torch.rand(3, 4) + index, "index": index, "name": f"no. {index}"}
