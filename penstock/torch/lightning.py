"""A callback for Lightning's Trainer, from ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import MissingExtraError, PipelineError
from penstock.torch.logging import EVERY, IntervalScalars, LoaderWithStats

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """Lightning's ``Callback``: of the package already imported, else of one that is installed."""
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{package}.callbacks").Callback
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
    raise MissingExtraError(
        "penstock.torch.logging.LightningCallback needs Lightning: pip install lightning"
    )


class LightningCallback(_callback_class()):  # type: ignore[misc]
    """Writes the stall share and the rates of the training loader to the Trainer's loggers.

    It finds the loader by itself. Give ``loader`` if the Trainer's loader is wrapped in another
    object. It logs every ``every`` batches, by default as often as the Trainer logs.

        trainer = Trainer(callbacks=[LightningCallback()])
    """

    def __init__(
        self,
        loader: LoaderWithStats | None = None,
        *,
        prefix: str = "penstock",
        every: int | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise PipelineError(f"every is {every}; give a number of batches, at least 1.")
        self._loader = loader
        self._prefix = prefix
        self._every = every
        self._batches = 0
        self._scalars: IntervalScalars | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # The Trainer may create new loaders for each epoch.
        loader = self._loader or find_loader(trainer.train_dataloader)
        if loader is None:
            raise PipelineError(
                "LightningCallback found no Penstock loader among the Trainer's training loaders. "
                "Pass it: LightningCallback(loader)."
            )
        if self._scalars is None or self._scalars.loader is not loader:
            self._scalars = IntervalScalars(loader, self._prefix)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        every = self._every or int(trainer.log_every_n_steps or EVERY)
        if self._scalars is None or self._batches % every:
            return
        scalars = self._scalars.next()
        # global_step is already counted up; Lightning logs its own values of this batch under
        # the step before.
        step = max(0, trainer.global_step - 1)
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, step=step)


def find_loader(loaders: Any) -> LoaderWithStats | None:
    """The first loader with ``stats()``; ``loaders`` is one loader, or nested lists and dicts."""
    if callable(getattr(loaders, "stats", None)):
        return loaders  # type: ignore[no-any-return]
    nested: Iterable[Any] = ()
    if isinstance(loaders, Mapping):
        nested = loaders.values()
    elif isinstance(loaders, (list, tuple)):
        nested = loaders
    return next((found for item in nested if (found := find_loader(item)) is not None), None)
