"""A callback for Lightning's Trainer, whichever of its two packages is in use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import MissingExtraError, PipelineError
from penstock.torch.logging import EVERY, Counted, Since

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _parent() -> Any:
    """The class of callbacks: of the package that the program uses, or of one that is there."""
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{package}.callbacks").Callback
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
    raise MissingExtraError(
        "penstock.torch.logging.LightningCallback needs Lightning: pip install lightning"
    )


class LightningCallback(_parent()):  # type: ignore[misc]
    """Writes the stall share and the rates of the training loader to the Trainer's loggers.

    It finds the loader by itself; give ``loader`` where it is wrapped in something. Entries are
    made every ``every`` batches, by default as often as the Trainer logs.

        trainer = Trainer(callbacks=[LightningCallback()])
    """

    def __init__(
        self, loader: Counted | None = None, *, prefix: str = "penstock", every: int | None = None
    ) -> None:
        if every is not None and every < 1:
            raise PipelineError(f"every is {every}; give a number of batches from 1 on.")
        self._loader = loader
        self._prefix = prefix
        self._every = every
        self._batches = 0
        self._since: Since | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # The Trainer may make other loaders for another epoch.
        loader = self._loader or counted(trainer.train_dataloader)
        if loader is None:
            raise PipelineError(
                "LightningCallback found no loader of Penstock's among those that the Trainer "
                "trains with. Give it: LightningCallback(loader)."
            )
        if self._since is None or self._since.loader is not loader:
            self._since = Since(loader, self._prefix)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        every = self._every or int(trainer.log_every_n_steps or EVERY)
        if self._since is None or self._batches % every:
            return
        found = self._since.scalars()
        # What Lightning itself logs of this batch has the step before it as its own.
        step = max(0, trainer.global_step - 1)
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=step)


def counted(loaders: Any) -> Counted | None:
    """The first loader that counts, of what a Trainer has: one, or several in lists and dicts."""
    if callable(getattr(loaders, "stats", None)):
        return loaders  # type: ignore[no-any-return]
    inside: Iterable[Any] = ()
    if isinstance(loaders, Mapping):
        inside = loaders.values()
    elif isinstance(loaders, (list, tuple)):
        inside = loaders
    return next((found for one in inside if (found := counted(one)) is not None), None)
