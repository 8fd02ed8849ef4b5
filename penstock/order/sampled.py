"""A user's own sampler as a plan: drawn lazily, reproducibly, and without touching their seeds."""

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
from penstock.order.order import whole
from penstock.order.plan import BatchKeys, Plan
from penstock.order.replicas import Occurrences

_KEPT = 2
"""Epochs whose start is remembered: a checkpoint may be asked for just after one has ended."""

_SKIPPED = 1 << 16
"""Samples passed over at a time: few pulls, and no list as long as an epoch."""

_NESTED = 8
"""How deep samplers around samplers are looked into; a bound, because they may form a ring."""

_END = object()


class Sampled(Plan):
    """The batches that a user's sampler deals.

    With a ``batch_size`` the sampler yields indices, without one it is a batch sampler and yields
    lists of them. It is iterated once an epoch, one batch at a time, and may be infinite.

    While the sampler runs, the global generators of ``random``, NumPy and torch are its own: a
    stream keyed by (seed, epoch), put away again after every batch. So a sampler that draws from
    them deals the same after a resume, and the generators of the training loop never notice. They
    are global, so batches must be pulled by the thread that runs the training loop. A sampler
    that has a torch generator of its own is replayed from where that stood as the epoch began:
    ``epoch_state`` and ``restore`` carry it through a checkpoint.

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
        self._starts: dict[int, bytes] = {}
        self._what = (
            f"The {'sampler' if batch_size is not None else 'batch sampler'} "
            f"({type(sampler).__name__})"
        )
        if not (hasattr(sampler, "__iter__") or hasattr(sampler, "__getitem__")):
            raise PipelineError(
                f"{self._what} cannot be iterated. Give a list of indices, or an object whose "
                "__iter__ yields them."
            )
        # Iterators of a user's own class may start again in __iter__; these never do.
        if isinstance(sampler, Iterator) and type(sampler).__module__ in ("builtins", "itertools"):
            raise PipelineError(
                f"{self._what} can be iterated only once, and it is needed for every epoch. Give "
                "a list, or an object whose __iter__ starts again."
            )
        if batch_size is None and drop_last:
            raise PipelineError(
                f"{self._what} makes its own batches, so drop_last has nothing to drop. Give "
                "drop_last to the batch sampler."
            )

    def batches(self, cursor: Cursor) -> Iterator[BatchKeys]:
        """The rest of the cursor's epoch. What was dealt before is drawn again and passed over."""
        generator = _own_generator(self.sampler)
        if generator is not None:
            if cursor.epoch in self._starts:
                _set_state(generator, self._starts[cursor.epoch])
            else:
                for old in list(self._starts)[: len(self._starts) - _KEPT + 1]:
                    del self._starts[old]
                self._starts[cursor.epoch] = _get_state(generator)
        keyed = Keyed(self.seed, "order/sampler").fresh(Key(index=0, epoch=cursor.epoch))
        return self._rest(cursor, _Draw(self.sampler, self._what, self.n, _Globals(keyed)))

    def length(self, cursor: Cursor) -> int | None:
        """How many batches the rest of the cursor's epoch is, if the sampler can tell."""
        try:
            total = len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        if self.batch_size is None:
            return max(0, total - cursor.batch)
        left = max(0, total - cursor.position)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def after(self, cursor: Cursor, batch: BatchKeys) -> Cursor:
        """The cursor once this batch is delivered."""
        return Cursor(cursor.epoch, cursor.position + len(batch.indices), cursor.batch + 1)

    def epoch_state(self, epoch: int | None = None) -> bytes | None:
        """Where the sampler's own generator stood as the epoch began; ``None`` if it has none.

        That is the epoch begun last unless another is named. For one not begun yet it is where
        the generator stands now.
        """
        generator = _own_generator(self.sampler)
        if generator is None:
            return None
        if epoch is None:
            epoch = next(reversed(self._starts), -1)
        kept = self._starts.get(epoch)
        return _get_state(generator) if kept is None else kept

    def check_state(self, epoch_state: bytes | None, first: int = 0) -> None:
        super().check_state(epoch_state, first)
        if epoch_state is None:
            return
        generator = _own_generator(self.sampler)
        if generator is None:
            raise StateError(
                f"{self._what} has no generator of its own, and the checkpoint has the state of "
                "one. Give it the generator it had when the checkpoint was written."
            )
        # Tried on another generator, so that a refused checkpoint changes nothing.
        _set_state(type(generator)(device=generator.device), epoch_state)

    def restore(self, epoch_state: bytes | None) -> None:
        """Put the sampler's own generator to where the epoch that is to be resumed began."""
        self.check_state(epoch_state)
        self._starts.clear()
        generator = _own_generator(self.sampler)
        if epoch_state is not None and generator is not None:
            _set_state(generator, epoch_state)

    def _rest(self, cursor: Cursor, draw: _Draw) -> Iterator[BatchKeys]:
        seen = Occurrences()
        self._skip(cursor, draw, seen)
        number = cursor.batch
        while (indices := draw.pull(self.batch_size)) is not None:
            if self.drop_last and self.batch_size is not None and len(indices) < self.batch_size:
                return
            yield BatchKeys(cursor.epoch, number, indices, seen.count(indices))
            number += 1

    def _skip(self, cursor: Cursor, draw: _Draw, seen: Occurrences) -> None:
        # Where the batches are cut here, samples are what counts: so a resume may have another
        # batch size.
        if self.batch_size is None:
            while draw.batches < cursor.batch and (indices := draw.pull(None)) is not None:
                seen.count(indices)
        else:
            while draw.samples < cursor.position:
                indices = draw.pull(min(_SKIPPED, cursor.position - draw.samples))
                if indices is None:
                    break
                seen.count(indices)
        if draw.samples != cursor.position or (
            self.batch_size is None and draw.batches != cursor.batch
        ):
            raise StateError(
                f"{self._what} dealt {draw.samples} samples where the checkpoint says that "
                f"{cursor.position} ({cursor.batch} batches) of epoch {cursor.epoch} were dealt. "
                "It is another sampler, or it draws from a generator that cannot be put back: "
                "let it draw from the global generator of torch, NumPy or Python, or from a "
                "torch.Generator that is its attribute 'generator'."
            )


class _Draw:
    """One iteration of a sampler, which only ever runs with the generators that are its own."""

    def __init__(self, sampler: Iterable[Any], what: str, n: int, scope: _Globals) -> None:
        self.what = what
        self.n = n
        self.scope = scope
        self.samples = 0
        self.batches = 0
        with scope.entered():
            self.iterator = iter(sampler)

    def pull(self, size: int | None) -> NDArray[np.int64] | None:
        """The next ``size`` indices, or the next list of them; ``None`` at the end."""
        with self.scope.entered():
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
                f"{self.what} yielded {drawn!r}, and a batch sampler yields lists of indices. "
                "Give it as a sampler, with a batch_size."
            )
        if not drawn:
            raise PipelineError(
                f"{self.what} yielded an empty batch, as number {self.batches} of its epoch. "
                "Leave it out: a batch has one sample or more."
            )
        found = self._check(drawn, batched=size is None)
        self.samples += len(found)
        self.batches += 1
        return found

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
                    f"{self.what} yielded {value!r} as sample {place} of its epoch, which is no "
                    f"index. {remedy}"
                )
            if not 0 <= index < self.n:
                raise PipelineError(
                    f"{self.what} yielded {index} as sample {place} of its epoch, and the source "
                    f"has {self.n} samples. Yield indices of 0 to {self.n - 1}."
                )
            indices.append(index)
        return np.array(indices, dtype=np.int64)


class _Globals:
    """The global generators as one epoch of a sampler sees them, kept from pull to pull.

    The first states are made with generators apart: seeding torch's global one would reach those
    of the devices too, which nobody puts back.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        words = generator.integers(0, 2**32, size=3, dtype=np.uint32).tolist()
        self._python: Any = _python_random.Random(words[0]).getstate()
        self._numpy: Any = np.random.RandomState(words[1]).get_state()
        self._torch: Any = None
        self._torch_seed = words[2]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The global generators are the sampler's inside, and the user's again outside."""
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


def _own_generator(sampler: Any) -> Any | None:
    """The torch generator of a sampler, or of the sampler that it cuts into batches."""
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
            f"The sampler's generator refuses the state in the checkpoint ({error}). It is damaged "
            "or belongs to a generator of another kind or device."
        ) from error
