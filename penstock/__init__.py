"""Penstock feeds training jobs: it keeps accelerators from waiting for data.

>>> import numpy as np
>>> import penstock as ps
>>> train = ps.from_dataset(np.arange(8.0)).batch(4)
>>> sum(len(batch) for batch in train.loader(seed=0))
8
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import audio, image
    from penstock.combine.mix import mix
    from penstock.combine.sequences import cu_seqlens, pack_sequences
    from penstock.diagnose.analyze.analyze import analyze
    from penstock.errors import PenstockError
    from penstock.loader import Loader
    from penstock.order import Order, Reservoir, Weighted
    from penstock.pipeline import (
        Pipeline,
        from_arrow,
        from_dataset,
        from_files,
        from_folder,
        from_mds,
        from_parquet,
        from_tar,
    )
    from penstock.progress_bar import progress

__version__ = "0.1.0"

__all__ = [
    "Loader",
    "Order",
    "PenstockError",
    "Pipeline",
    "Reservoir",
    "Weighted",
    "analyze",
    "audio",
    "cu_seqlens",
    "from_arrow",
    "from_dataset",
    "from_files",
    "from_folder",
    "from_mds",
    "from_parquet",
    "from_tar",
    "image",
    "mix",
    "pack_sequences",
    "progress",
]

# Imported on first use, so that workers and the command line load only what they need.
_MODULES = {
    "Loader": "penstock.loader",
    "Order": "penstock.order",
    "PenstockError": "penstock.errors",
    "Pipeline": "penstock.pipeline",
    "Reservoir": "penstock.order",
    "Weighted": "penstock.order",
    "analyze": "penstock.diagnose.analyze.analyze",
    "cu_seqlens": "penstock.combine.sequences",
    "from_arrow": "penstock.pipeline",
    "from_dataset": "penstock.pipeline",
    "from_files": "penstock.pipeline",
    "from_folder": "penstock.pipeline",
    "from_mds": "penstock.pipeline",
    "from_parquet": "penstock.pipeline",
    "from_tar": "penstock.pipeline",
    "mix": "penstock.combine.mix",
    "pack_sequences": "penstock.combine.sequences",
    "progress": "penstock.progress_bar",
}


def __getattr__(name: str) -> Any:
    if name in ("audio", "image"):
        return importlib.import_module(f"penstock.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
