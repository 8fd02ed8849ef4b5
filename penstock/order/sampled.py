"""A user's sampler as a plan: drawn lazily and reproducibly, without changing the user's seeds."""

from __future__ import annotations

import operator
import random as _python_random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, StateError
from penstock.keyed import Key, Keyed, preserved_globals
from penstock.order.cursor import Cursor
from penstock.order.deal import Occurrences
from penstock.order.order import whole
from penstock.order.plan import BatchKeys, Plan

_EPOCHS_KEPT = 2
"""Epochs whose start state is kept: a checkpoint may be written just after an epoch has ended."""

_SKIPPED = 1 << 16
"""Samples skipped at a time on a resume: few pulls, and no list as long as an epoch."""

_NESTED = 8
"""Samplers inside samplers are searched to this depth; a bound, because they may form a cycle."""

_END = object()


class Sampled(Plan):
    """The batches of a user's sampler.

    With a ``batch_size`` the sampler yields indices; without one it is a batch sampler and yields
    lists of indices. It is iterated once an epoch, one batch at a time, and may be endless.

    While the sampler runs, the global generators of ``random``, NumPy and torch have a state of
    their own, keyed by (seed, epoch); after every batch the user's state is put back. So a sampler
    that draws from them yields the same indices after a resume, and the random numbers of the
    training loop do not change. The generators are global, so the thread that runs the training
    loop must pull the batches. A sampler with a torch generator of its own is replayed from the
    generator's state at the start of the epoch; ``epoch_state`` and ``restore`` save and load it.

    >>> plan = Sampled([3, 1, 3, 0, 2], n=4, seed=0, batch_size=2)
    >>> [batch.indices.tolist() for batch in plan.batches(Cursor())]
    [[3, 1], [3, 0], [2]]
    >>> buckets = Sampled([[0, 1, 2], [3]], n=4, seed=0)
    >>> [batch.indices.tolist() for batch in buckets.batches(Cursor(position=3, batch=1))]
    [[3]]
    """

    # Not ``ahead``: a sampler may be changed between two epochs.
    source_name = "the sampler"

    def __init__(
        self,
        sampler: Iterable[Any],
        n: int,
        seed: int,
        batch_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.sampler = sampler
        self.n = whole("n", n, least=0)
        self.seed = whole("seed", seed)
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size, least=1)
        self.drop_last = drop_last
        self._start_states: dict[int, bytes] = {}
        self._name = (
            f"The {'sampler' if batch_size is not None else 'batch sampler'} "
            f"({type(sampler).__name__})"
        )
        if not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise PipelineError(
                f"{self._name} cannot be iterated. Give a list of indices, or an object whose "
                "__iter__ yields them."
            )
        # An iterator of a user's own class may start again in __iter__; those of Python never do.
        if isinstance(sampler, Iterator) and type(sampler).__module__ in ("builtins", "itertools"):
            raise PipelineError(
                f"{self._name} can be iterated only once, but every epoch iterates it again. Give "
                "a list, or an object whose __iter__ starts again."
            )
        if batch_size is None and drop_last:
            raise PipelineError(
                f"{self._name} makes its own batches, so drop_last has no effect here. Give "
                "drop_last to the batch sampler."
            )

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch. Earlier batches are drawn again and skipped."""
        generator = own_generator(self.sampler)
        if generator is not None:
            states = self._start_states
            if cursor.epoch in states:
                _set_state(generator, states[cursor.epoch])
            else:
                for old in list(states)[: len(states) - _EPOCHS_KEPT + 1]:
                    del states[old]
                states[cursor.epoch] = _get_state(generator)
        keyed = Keyed(self.seed, "order/sampler").fresh(Key(index=0, epoch=cursor.epoch))
        return self._rest(cursor, _Draw(self.sampler, self._name, self.n, _Globals(keyed)))

    def length(self, cursor: Cursor) -> int | None:
        """The number of batches in the rest of the epoch; ``None`` if the sampler has no length."""
        try:
            total = len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        if self.batch_size is None:
            return max(0, total - cursor.batch)
        left = max(0, total - cursor.position)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor after this batch."""
        return Cursor(cursor.epoch, cursor.position + len(batch.indices), cursor.batch + 1)

    def epoch_state(self, epoch: int | None = None) -> bytes | None:
        """The state of the sampler's own generator at the start of an epoch; ``None`` without one.

        Without ``epoch`` it is that of the latest epoch, and for an epoch that has not begun the
        current state.
        """
        generator = own_generator(self.sampler)
        if generator is None:
            return None
        if epoch is None:
            epoch = next(reversed(self._start_states), -1)
        kept = self._start_states.get(epoch)
        return _get_state(generator) if kept is None else kept

    def check_state(self, epoch_state: bytes | None, first: int = 0) -> None:
        super().check_state(epoch_state, first)
        if epoch_state is None:
            return
        generator = own_generator(self.sampler)
        if generator is None:
            raise StateError(
                f"{self._name} has no generator of its own, but the checkpoint has the state of "
                "one. Give it the generator that it had when the checkpoint was written."
            )
        # Tried on another generator, so that a refused checkpoint changes nothing.
        _set_state(type(generator)(device=generator.device), epoch_state)

    def restore(self, epoch_state: bytes | None) -> None:
        """Set the sampler's own generator to its state at the start of the epoch to resume."""
        self.check_state(epoch_state)
        self._start_states.clear()
        generator = own_generator(self.sampler)
        if epoch_state is not None and generator is not None:
            _set_state(generator, epoch_state)

    def _rest(self, cursor: Cursor, draw: _Draw) -> Iterator[BatchKeys]:
        occurrences = Occurrences()
        self._skip(cursor, draw, occurrences)
        number = cursor.batch
        while (indices := draw.pull(self.batch_size)) is not None:
            if self.drop_last and self.batch_size is not None and len(indices) < self.batch_size:
                return
            yield BatchKeys(cursor.epoch, number, indices, occurrences.count(indices))
            number += 1

    def _skip(self, cursor: Cursor, draw: _Draw, occurrences: Occurrences) -> None:
        # With a batch_size samples are counted, so that a resume may have another batch size.
        if self.batch_size is None:
            while draw.batches < cursor.batch and (indices := draw.pull(None)) is not None:
                occurrences.count(indices)
        else:
            while draw.samples < cursor.position:
                indices = draw.pull(min(_SKIPPED, cursor.position - draw.samples))
                if indices is None:
                    break
                occurrences.count(indices)
        if draw.samples != cursor.position or (
            self.batch_size is None and draw.batches != cursor.batch
        ):
            raise StateError(
                f"{self._name} yielded {draw.samples} samples up to the place of the checkpoint, "
                f"which says {cursor.position} ({cursor.batch} batches) of epoch {cursor.epoch}. "
                "It is another sampler, or it draws from a generator whose state is not restored: "
                "let it draw from the global generator of torch, NumPy or Python, or from a "
                "torch.Generator that is its attribute 'generator'."
            )


class _Draw:
    """One iteration of a sampler, which runs only inside ``generators``."""

    def __init__(self, sampler: Iterable[Any], name: str, n: int, generators: _Globals) -> None:
        self.name = name
        self.n = n
        self.generators = generators
        self.samples = 0
        self.batches = 0
        with generators.entered():
            self.iterator = iter(sampler)

    def pull(self, size: int | None) -> NDArray[np.int64] | None:
        """The next ``size`` indices, or without ``size`` the next list; ``None`` at the end."""
        with self.generators.entered():
            if size is not None:
                drawn: Any = list(islice(self.iterator, size)) or _END
            else:
                drawn = next(self.iterator, _END)
                if hasattr(drawn, "tolist"):
                    drawn = drawn.tolist()
                elif isinstance(drawn, Iterable):
                    drawn = list(drawn)
        if drawn is _END:
            return None
        if not isinstance(drawn, list):
            raise PipelineError(
                f"{self.name} yielded {drawn!r}, but a batch sampler must yield lists of indices. "
                "Give it as a sampler, with a batch_size."
            )
        if not drawn:
            raise PipelineError(
                f"{self.name} yielded an empty batch, as number {self.batches} of its epoch. "
                "Leave it out: a batch must have one sample or more."
            )
        indices = self._check(drawn, batched=size is None)
        self.samples += len(indices)
        self.batches += 1
        return indices

    def _check(self, drawn: list[Any], batched: bool) -> NDArray[np.int64]:
        indices = []
        for place, value in enumerate(drawn, self.samples):
            try:
                index = None if isinstance(value, bool) else operator.index(value)
            except TypeError:
                index = None
            if index is None:
                listed = isinstance(value, Iterable) and not isinstance(value, str)
                remedy = (
                    "Give it as a batch sampler, without a batch_size."
                    if listed and not batched
                    else "Yield whole numbers."
                )
                raise PipelineError(
                    f"{self.name} yielded {value!r} as sample {place} of its epoch, which is not "
                    f"an index. {remedy}"
                )
            if not 0 <= index < self.n:
                raise PipelineError(
                    f"{self.name} yielded {index} as sample {place} of its epoch, but the source "
                    f"has {self.n} samples. Yield indices from 0 to {self.n - 1}."
                )
            indices.append(index)
        return np.array(indices, dtype=np.int64)


class _Globals:
    """The state of the global generators for one epoch of a sampler, kept between pulls.

    The first states come from new generators: seeding torch's global generator would also seed
    those of the devices, which are not put back.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        words = generator.integers(0, 2**32, size=3, dtype=np.uint32).tolist()
        self._python: Any = _python_random.Random(words[0]).getstate()
        self._numpy: Any = np.random.RandomState(words[1]).get_state()
        self._torch: Any = None
        self._torch_seed = words[2]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the global generators have the sampler's state; afterwards the user's again."""
        with preserved_globals():
            torch = sys.modules.get("torch")
            _python_random.setstate(self._python)
            np.random.set_state(self._numpy)
            if torch is not None:
                if self._torch is None:
                    self._torch = torch.Generator().manual_seed(self._torch_seed).get_state()
                torch.set_rng_state(self._torch)
            try:
                yield
            finally:
                self._python = _python_random.getstate()
                self._numpy = np.random.get_state()
                if torch is not None:
                    self._torch = torch.get_rng_state()


def own_generator(sampler: Any) -> Any | None:
    """The torch generator of a sampler, or of the sampler inside a batch sampler."""
    torch: Any = sys.modules.get("torch")
    for _ in range(_NESTED if torch is not None else 0):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        sampler = getattr(sampler, "sampler", None)
    return None


def _get_state(generator: Any) -> bytes:
    state: bytes = generator.get_state().numpy().tobytes()
    return state


def _set_state(generator: Any, state: bytes) -> None:
    torch: Any = sys.modules["torch"]
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"The sampler's generator rejects the state in the checkpoint ({error}). The state is "
            "damaged or belongs to a generator of another kind or device."
        ) from error
