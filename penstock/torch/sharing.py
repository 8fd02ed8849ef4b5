"""What ``share=`` means in the drop-in: what it cannot honour, and a dataset that must stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from penstock.errors import ErrorCode, PipelineError
from penstock.serialize import pack


def check_shared(
    share: str, *, streaming: bool, worker_init_fn: Callable[[int], None] | None, in_order: bool
) -> None:
    """Refuse what cannot be the same for every job."""

    def refuse(why: str, code: ErrorCode | None = None) -> None:
        raise PipelineError(f"DataLoader: {why}", code=code)

    if streaming:
        refuse(
            f"share={share!r} on an IterableDataset: its samples have no index that jobs could "
            "agree on. Give it __len__ and __getitem__, or leave share out.",
            "iterable-dataset",
        )
    if worker_init_fn is not None:
        refuse(
            f"worker_init_fn with share={share!r}: the node's workers belong to every job of the "
            "machine, and cannot be set up for one of them. What it does can be done in the "
            "dataset, when it is first read."
        )
    if not in_order:
        refuse(f"in_order=False with share={share!r}: jobs that share take batches in order.")


class Watched:
    """A dataset that a node has: a change that is made to it here is not seen there."""

    def __init__(self, dataset: Any, share: str) -> None:
        self._dataset = dataset
        self._share = share
        self._before: bytes | None = None
        self._warned = False

    def look(self) -> None:
        """Say so, once, if it is not what it was when this was called first."""
        if self._warned:
            return
        try:
            now = pack(self._dataset, by_value=True).digest()
        except Exception:  # whoever sends it to the node says what is wrong with it
            return
        if self._before is None:
            self._before = now
        elif now != self._before:
            self._warned = True
            warnings.warn(
                f"the dataset was changed after the first epoch, and share={self._share!r}: the "
                "node goes on with the dataset as it was. Make another DataLoader of the changed "
                "one, with a share of another name; or give persistent_workers=True if the change "
                "does not matter.",
                UserWarning,
                stacklevel=3,
            )
