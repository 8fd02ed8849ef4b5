"""Batches of a loader's own sampler, drawn when and in the order in which torch would draw them."""

from __future__ import annotations

import operator
import random as _python_random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock.errors import PipelineError, StateError
from penstock.keyed import preserved_globals
from penstock.order import BatchKeys, Cursor, Plan
from penstock.order.deal import Occurrences
from penstock.order.sampled import own_generator

_END = object()

DRAW_FIRST = (
    *(SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
"""Samplers that draw random numbers only where their iteration begins, if at all."""


class TorchDraws:
    """How one epoch of a torch loader begins: which random numbers it draws, and from what.

    The order of torch: begin the sampler, draw the seed of the workers; with workers, begin the
    sampler once more.
    """

    def __init__(self, loader: Any) -> None:
        # Weak: the plan of a loader must not keep the loader alive.
        self._find = weakref.ref(loader)

    @property
    def _loader(self) -> Any:
        return self._find()

    @property
    def ahead(self) -> int:
        """Batches that torch draws before it delivers the first."""
        return int((self._loader.prefetch_factor or 0) * self._loader.num_workers)

    @property
    def most_ahead(self) -> int | None:
        """Most batches that the sampler may draw before they are delivered: as many as in torch.

        ``None``: any number, because it draws from the script's generators only where it begins.
        """
        sampler: Any = self._loader._index_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        own = type(sampler) is RandomSampler and sampler.generator is None
        return None if own or type(sampler) in DRAW_FIRST else self.ahead

    @property
    def plain(self) -> bool:
        """Whether torch's own samplers draw each index once: nothing need be checked."""
        batches = self._loader.batch_sampler
        inner: Any = getattr(batches, "sampler", None)
        if type(batches) is not BatchSampler:
            return False
        if type(inner) is RandomSampler:
            return not inner.replacement and inner._num_samples is None
        return type(inner) is SequentialSampler

    @property
    def anywhere(self) -> bool:
        """Whether any thread may draw the rest of an epoch, once torch's first batches are drawn.

        From then on torch's own samplers draw from no generator of the script. Nor do they run its
        code, but for the length of the dataset.
        """
        batches = self._loader.batch_sampler
        inner: Any = getattr(batches, "sampler", None)
        if self.ahead == 0 or type(batches) is not BatchSampler:
            return False
        if type(inner) is RandomSampler:
            return inner.generator is None
        return type(inner) in (SequentialSampler, DistributedSampler)

    def begin(self, first: bool) -> tuple[Iterator[Any], int | None]:
        """The sampler's iterator, and the seed, which persistent workers draw only once."""
        loader = self._loader
        indices = iter(loader._index_sampler)
        if not first:
            return indices, None
        seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if loader.num_workers > 0:
            indices = iter(loader._index_sampler)
        return indices, int(seed.item())

    def generators(self) -> list[torch.Generator]:
        """The generators besides the global ones: the loader's and the sampler's."""
        found = [self._loader.generator, own_generator(self._loader._index_sampler)]
        if found[0] is found[1]:
            found.pop()
        return [generator for generator in found if isinstance(generator, torch.Generator)]


class DrawnStates:
    """The states of all generators before an epoch was drawn, as plain data for a checkpoint."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)
        self._python, self._torch = state["python"], _tensor(state["torch"])
        kind, keys, *rest = state["numpy"]
        self._numpy: Any = (kind, np.frombuffer(keys, dtype=np.uint32), *rest)

    @classmethod
    def now(cls, drawing: TorchDraws) -> DrawnStates:
        kind, keys, *rest = np.random.get_state()
        return cls(
            {
                "python": _python_random.getstate(),
                "numpy": (kind, np.asarray(keys).tobytes(), *rest),
                "torch": _bytes(torch.get_rng_state()),
                "generators": [_bytes(one.get_state()) for one in drawing.generators()],
            }
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the global generators have these states; afterwards the script's again."""
        with preserved_globals():
            _python_random.setstate(self._python)
            np.random.set_state(self._numpy)
            torch.set_rng_state(self._torch)
            try:
                yield
            finally:
                self._python, self._numpy = _python_random.getstate(), np.random.get_state()
                self._torch = torch.get_rng_state()


def set_generators(drawing: TorchDraws, states: Iterable[bytes]) -> None:
    """Give the generators of a loader and its sampler the states of a checkpoint."""
    generators, given = drawing.generators(), list(states)
    if len(generators) != len(given):
        raise StateError(
            f"the checkpoint has the states of {len(given)} generators of the loader and its "
            f"sampler, which have {len(generators)}. Give them the generators that they had when "
            "the checkpoint was taken."
        )
    for generator, state in zip(generators, given, strict=True):
        try:
            generator.set_state(_tensor(state))
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateError(
                f"a generator rejects the state in the checkpoint ({error}). The checkpoint is "
                "damaged, or the generator is of another kind or device."
            ) from error


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class SamplerEpoch:
    """One epoch of a sampler.

    The sampler is not changed: it draws from the script's generators, as it does in torch. Drawn
    batches are kept until they are delivered, because torch's own iterator may have to continue the
    epoch with the same batches. ``delivered``: number of batches delivered. ``ahead``: how many
    more are always drawn, as torch does for its workers. ``anywhere``: see ``TorchDraws``; then one
    thread may draw batches while another delivers them.
    """

    def __init__(
        self, iterator: Iterator[Any], delivered: int = 0, ahead: int = 0, *, anywhere: bool = False
    ) -> None:
        self._iterator = iterator
        self._ahead = ahead
        self._kept: deque[Any] = deque()
        self._ended = False
        self._lock = threading.RLock()
        self.anywhere = anywhere
        self.delivered = delivered
        self.error: Exception | None = None
        """What the sampler has raised, which ended it."""

    def draw(self, batches: int) -> None:
        """Draw that many more batches, or fewer if the sampler ends."""
        with self._lock:
            self._draw(batches)

    def _draw(self, batches: int) -> None:
        while batches > 0 and not self._ended:
            batches -= 1
            try:
                self._kept.append(next(self._iterator))
            except StopIteration:
                self._ended = True
            except Exception as error:  # raised once the batches before it are delivered
                self._ended, self.error = True, error

    @property
    def over(self) -> bool:
        """Whether the sampler has ended, and all its batches are delivered."""
        return self._ended and not self._kept

    def rest(self) -> Iterator[Any]:
        """All batches that are not delivered yet."""
        return self.since(self.delivered)

    def since(self, number: int) -> Iterator[Any]:
        """The batches from that number on, drawn as they are needed."""
        while True:
            with self._lock:
                position = number - self.delivered
                if position >= len(self._kept):
                    self._draw(position - len(self._kept) + 1)
                if position >= len(self._kept):
                    return  # an error of the sampler is raised by the loop, at the end
                drawn = self._kept[position]
            yield drawn
            number += 1

    def deliver(self, number: int) -> None:
        """Forget the batches up to that number: they are delivered."""
        with self._lock:
            while self.delivered <= number and self._kept:
                self._kept.popleft()
                self.delivered += 1
            self._draw(self._ahead - len(self._kept))


def replay(drawing: TorchDraws, first: bool, states: DrawnStates, skip: int) -> Iterator[Any]:
    """An epoch that was drawn before, from these states, without its first batches.

    The script's own random numbers do not change.
    """
    with states.entered():
        indices, _ = drawing.begin(first)
        skipped = sum(1 for _ in islice(indices, skip))
    if skipped < skip:
        raise StateError(
            f"the sampler yielded {skipped} batches, and the checkpoint was taken after {skip}. It "
            "is another sampler, or its data has changed."
        )

    def rest() -> Iterator[Any]:
        while True:
            with states.entered():
                drawn = next(indices, _END)
            if drawn is _END:
                return
            yield drawn

    return rest()


class SamplerPlan(Plan):
    """A plan (see ``penstock.order.plan``) that follows a sampler. ``begin`` starts each epoch.

    - ``n``: the number of samples, which bounds the indices; ``None``: any whole number is one.
    - ``single``: the sampler yields single indices, not lists.
    - ``total``: the number of batches in an epoch, if known.
    - ``drawing``: for checkpoints. Within an epoch they have the states that it was drawn from,
      between epochs only those of generators that belong to the loader: the global ones are the
      script's to restore, as with torch.
    """

    source_name = "the sampler"

    def __init__(
        self,
        n: int | None,
        single: bool,
        total: Callable[[], int] | None = None,
        drawing: TorchDraws | None = None,
    ) -> None:
        self._n = n
        self._single = single
        self._total = total
        self._drawing = drawing
        self._epoch = SamplerEpoch(iter(()))
        self._begun: tuple[int, dict[str, Any]] | None = None
        self.resumed: dict[str, Any] | None = None
        """The state of an epoch that a checkpoint was taken in, for the next ``begin``."""

    @property
    def any_thread(self) -> bool:
        return self._epoch.anywhere

    def for_loader(self, n: int, size: int, drop_last: bool) -> SamplerPlan:
        """This plan, for a loader that asks for one with these arguments."""
        return self

    def begin(
        self,
        epoch: SamplerEpoch,
        number: int = 0,
        key_epoch: int | None = None,
        state: dict[str, Any] | None = None,
        most_ahead: int | None = None,
    ) -> None:
        """Take the batches of this epoch from now on. ``state``: what a checkpoint needs.

        ``most_ahead``: see ``TorchDraws``. An echo needs to know more batches than that.
        """
        self._epoch, self.key_epoch = epoch, key_epoch
        self.most_ahead = None if self._total is not None else most_ahead
        self._begun = None if state is None else (number, state)

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        seen = Occurrences()
        epoch = cursor.epoch if self.key_epoch is None else self.key_epoch
        plain = self._drawing is not None and self._n is None and self._drawing.plain
        for number, drawn in enumerate(self._epoch.since(cursor.batch), cursor.batch):
            if plain:
                yield BatchKeys(epoch, number, np.array(drawn, dtype=np.int64), None)
                continue
            indices = self._indices([drawn] if self._single else drawn)
            yield BatchKeys(epoch, number, indices, seen.count(indices))

    def length(self, cursor: Cursor) -> int | None:
        """Batches left, if ``total`` is known. torch ignores ``len(sampler)``."""
        return None if self._total is None else max(0, self._total() - cursor.batch)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        self._epoch.deliver(batch.number)
        return Cursor(cursor.epoch, cursor.position + len(batch.indices), cursor.batch + 1)

    def epoch_state(self, epoch: int) -> dict[str, Any] | None:
        if self._drawing is None:
            return None
        if self._begun is not None and self._begun[0] == epoch:
            return self._begun[1]
        if self.resumed is not None:
            return self.resumed
        generators = [_bytes(one.get_state()) for one in self._drawing.generators()]
        return {"generators": generators} if generators else None

    def check_state(self, epoch_state: Any, first: int = 0) -> None:
        super().check_state(epoch_state, first)
        if epoch_state is None or self._drawing is None:
            return
        if not isinstance(epoch_state, Mapping):
            raise StateError(
                f"the checkpoint has {type(epoch_state).__name__} as the state of the sampler. It "
                "was taken by another kind of loader, or is damaged."
            )
        if "seed" in epoch_state:
            DrawnStates(epoch_state)

    def restore(self, epoch_state: Any) -> None:
        if self._begun is not None and epoch_state is self._begun[1]:
            return  # the epoch that is under way
        self.check_state(epoch_state)
        self._begun = self.resumed = None
        if epoch_state is None or self._drawing is None:
            return
        set_generators(self._drawing, epoch_state["generators"])
        if "seed" in epoch_state:
            self.resumed = dict(epoch_state)

    def _indices(self, drawn: Any) -> NDArray[np.int64]:
        if type(drawn) is list and set(map(type, drawn)) == {int}:
            # The usual case, fast.
            plain = np.array(drawn)
            fits = plain.dtype == np.int64 and plain.min() >= 0
            if fits and (self._n is None or plain.max() < self._n):
                return plain
        if hasattr(drawn, "tolist"):
            drawn = drawn.tolist()
        if not isinstance(drawn, Iterable):
            raise PipelineError(
                f"its batch sampler yielded {drawn!r}, which is not a list of indices."
            )
        indices = []
        for value in drawn:
            try:
                index = None if type(value) is bool else operator.index(value)
            except TypeError:
                index = None
            if index is None or index < 0 or (self._n is not None and index >= self._n):
                samples = "" if self._n is None else f" of its {self._n} samples"
                raise PipelineError(
                    f"its sampler yielded {value!r}, which is not an index{samples}."
                )
            indices.append(index)
        if not indices:
            raise PipelineError("its batch sampler yielded an empty batch.")
        return np.array(indices, dtype=np.int64)
