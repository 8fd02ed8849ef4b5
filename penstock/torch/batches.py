"""Batches as tensors that share the memory of the arrays, and ``penstock.torch.loader``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from penstock.device.choose import Decoding, DevicePrep
from penstock.loader import Custom, Loader, Ranks
from penstock.options import Kind, Options
from penstock.order import Order
from penstock.pipeline import Pipeline
from penstock.source import StreamSource
from penstock.torch.delivering import delivering
from penstock.torch.ranks import RankFinder, given_rank, of_stream
from penstock.tree import is_namedtuple, remake, same_mapping


class Tensors:
    """Turns the arrays of a batch into tensors that share their memory.

    ``tuples`` makes the container for the fields of a plain tuple: ``tuple``, or ``list`` as in
    torch's own DataLoader.
    """

    def __init__(self, tuples: Callable[[list[Any]], Any]) -> None:
        self._tuples = tuples

    def __call__(self, value: Any) -> Any:
        # As torch: a masked array, or one of a class of the user, stays as it is.
        if isinstance(value, np.ndarray) and type(value).__module__ == "numpy":
            try:
                return torch.from_numpy(value)
            except TypeError:  # torch has no such element type
                return value
        if isinstance(value, Mapping):
            tensors = {key: self(child) for key, child in value.items()}
            return tensors if type(value) is dict else same_mapping(value, tensors)
        if not isinstance(value, (tuple, list)):
            return value
        fields = [self._field(child) for child in value]
        if isinstance(value, tuple) and not is_namedtuple(value):
            # torch makes lists of tuples of any class.
            kept = type(value) is not tuple and self._tuples is not list
            return remake(value, fields) if kept else self._tuples(fields)
        return remake(value, fields)

    def _field(self, value: Any) -> Any:
        """A field of a tuple, named tuple or list."""
        if type(value) is list and value and isinstance(value[0], (str, bytes)):
            # torch's collate gets the text of such a field as a tuple, and leaves it as it is.
            return tuple(value) if self._tuples is list else value
        return self(value)


def loader(
    pipeline: Pipeline,
    *,
    device: str | torch.device | None = None,
    device_prep: DevicePrep = False,
    decode: Decoding = "exact",
    device_normalize: bool = True,
    pin_memory: bool = False,
    workers: int | Literal["auto"] = "auto",
    kind: Kind = "auto",
    seed: int = 0,
    shuffle: bool = True,
    order: Order | None = None,
    rank: int | None = None,
    world: int | None = None,
    tail: Literal["pad", "drop"] = "pad",
    prefetch: int | None = None,
    tiny_batch: int | Literal["auto"] = "auto",
    on_error: Literal["raise", "skip", "substitute"] = "raise",
    timeout: float | None = None,
    memory: int | str | None = None,
    share: str | None = None,
    lag: Literal["detach", "wait"] = "detach",
    join: Literal["live", "start"] = "live",
    cluster: str | None = None,
    metrics_port: int | None = None,
) -> Loader:
    """A loader of a pipeline whose batches are tensors.

    ``device`` delivers them to a device, such as ``"cuda"``, one or two batches ahead of the loop.
    ``device_prep`` lets the device prepare a share of each batch, beside the CPU workers and with
    the same bits: ``"auto"`` where the pipeline allows it (``repr`` says why not), ``True`` to make
    it an error if it does not. ``decode="device"`` lets a library of the device decode all JPEGs,
    whose pixels differ from the CPU's by up to 2 grey levels on average; the device then prepares
    all samples. If the last operation is ``normalize``, the device does it for whole
    batches, with the same values; ``device_normalize=False`` leaves it to the workers.
    ``pin_memory`` makes the memory of batches pinned. The other arguments are those of
    ``Pipeline.loader``. If ``rank`` and ``world`` are not given, they are those of
    ``torch.distributed`` or of the launcher, as they are when the first loop begins.

    >>> import numpy as np
    >>> import penstock as ps
    >>> import penstock.torch
    >>> train = ps.from_dataset(np.arange(4.0)).batch(2)
    >>> next(iter(penstock.torch.loader(train, workers=0, shuffle=False)))
    tensor([0., 1.], dtype=torch.float64)
    """
    given = given_rank(rank, world)
    own_rank, own_world = given or (0, 1)
    ranks: Ranks | None = None
    if given is None:
        source = pipeline.source
        ranks = of_stream(source.dataset) if isinstance(source, StreamSource) else RankFinder()
    options = Options(
        workers=workers,
        kind=kind,
        seed=seed,
        shuffle=shuffle,
        order=order,
        rank=own_rank,
        world=own_world,
        tail=tail,
        prefetch=prefetch,
        tiny_batch=tiny_batch,
        on_error=on_error,
        timeout=timeout,
        memory=memory,
        share=share,
        lag=lag,
        join=join,
        cluster=cluster,
        metrics_port=metrics_port,
    )
    custom = Custom(
        convert=Tensors(tuple),
        deliver=delivering(
            device,
            pin_memory=pin_memory,
            normalize=device_normalize,
            device_prep=device_prep,
            decode=decode,
        ),
        ranks=ranks,
    )
    return Loader(pipeline, options, custom)
