"""Penstock for PyTorch: a drop-in DataLoader, and pipelines as tensors.

This package and ``penstock.image``'s device code are the only importers of torch.
"""

from penstock.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError.of("penstock.torch", "PyTorch", "torch") from error

from penstock.torch.batches import loader
from penstock.torch.dataloader import DataLoader

__all__ = ["DataLoader", "loader"]
