"""One loop over a torch DataLoader whose batches Penstock prepares, with a way back to torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from penstock.errors import PenstockError, SampleError
from penstock.loader import Loader
from penstock.torch.sampler_plan import (
    DrawnStates,
    SamplerEpoch,
    SamplerPlan,
    TorchDraws,
    replay,
)

_SEEDS = 2**63
"""torch's seeds of workers are below this number."""

_STRIDE = 0x9E3779B97F4A7C15
"""Makes other seeds for the later epochs of persistent workers, which torch seeds only once."""


def torch_iterator(loader: Any) -> Iterator[Any]:
    """torch's own iterator, also where ``DataLoader._get_iterator`` was replaced."""
    kind = _MultiProcessingDataLoaderIter if loader.num_workers else _SingleProcessDataLoaderIter
    made: Iterator[Any] = kind(loader)
    return made


class Prepared(Protocol):
    """Penstock's loader for a torch loader.

    - ``inner``: the loader. ``plan``: follows the sampler of the torch loader; ``None`` if Penstock
      decides the order, or if the dataset is a stream. ``stream``: it is one.
    - ``turn``: number of loops begun; only the latest may use ``inner``.
    - ``seed``: the last seed that was drawn for persistent workers; ``None`` before the first loop.
    - ``keyed``: random choices follow the seeds that the loop draws.
    - ``may_go_back``: torch's iterator may continue an epoch.
    """

    turn: int
    seed: int | None

    @property
    def inner(self) -> Loader: ...

    @property
    def plan(self) -> SamplerPlan | None: ...

    @property
    def stream(self) -> bool: ...

    @property
    def keyed(self) -> bool: ...

    @property
    def may_go_back(self) -> bool: ...

    def another(self) -> Prepared:
        """Another loader like this one, for a loop that goes on beside a later one."""

    def goes_back(self, error: PenstockError) -> bool:
        """Whether torch's iterator takes over after this error."""

    def give_up(self, error: PenstockError) -> None:
        """Record that torch's iterator takes over, and why."""

    def failed(self, error: SampleError) -> BaseException:
        """The exception that the script gets for a sample that failed."""


class _Loop:
    """A loop over the loader behind a torch loader.

    It may be left alive while the next loop begins: then it is displaced, and gets a loader of its
    own if it goes on.
    """

    def __init__(self, loader: Any, prepared: Prepared) -> None:
        self._loader = loader
        self._prepared = prepared
        self._epoch: Any = None
        self._position: Any = None

    def displace(self) -> None:
        """Leave the loader to another loop, which begins now."""
        if self._position is None:
            self._position = self._prepared.inner.position()

    def _go_on_beside(self) -> None:
        """Go on with a loader of its own."""
        position, self._position = self._position, None
        self._prepared = self._prepared.another()
        self._prepared.inner.go_to(position)
        self._epoch = iter(self._prepared.inner)

    @property
    def over(self) -> bool:
        """Whether all batches were delivered."""
        return self._epoch is None or getattr(self._epoch, "left", None) == 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        # As with torch, not the ``__len__`` of a subclass, which may ask for this length.
        own = getattr(self._loader, "_length", None)
        return len(self._loader._index_sampler) if own is None else int(own())


class Iteration(_Loop):
    """Takes the place of torch's iterator, and draws random numbers at the same moments."""

    def __init__(self, loader: Any, prepared: Prepared) -> None:
        super().__init__(loader, prepared)
        self._drawing = TorchDraws(loader)
        self._begin(first=prepared.seed is None or not loader.persistent_workers)

    def _begin(self, first: bool) -> None:
        prepared, plan, inner = self._prepared, self._prepared.plan, self._prepared.inner
        self._epoch = iter(inner)
        self._goes_on_within = prepared.stream and inner.batch > 0
        resumed = None if plan is None else plan.resumed
        if plan is not None and resumed is not None:
            plan.resumed = None
            states = DrawnStates(resumed)
            rest = replay(self._drawing, bool(resumed["first"]), states, inner.batch)
            self._seed = prepared.seed = int(resumed["seed"])
            self._sampled: SamplerEpoch | None = SamplerEpoch(rest, inner.batch)
            self._key_epoch: int | None = self._key(inner, first)
            plan.begin(self._sampled, inner.epoch, self._key_epoch, resumed)
        elif not self._goes_on_within:
            self._draw(first)
        else:
            self._sampled = None
        prepared.turn += 1
        self._turn = prepared.turn
        self._delivered_any = False

    def _draw(self, first: bool) -> None:
        """Draw what torch draws where an epoch begins."""
        prepared, plan, inner = self._prepared, self._prepared.plan, self._prepared.inner
        states = DrawnStates.now(self._drawing) if plan is not None and prepared.keyed else None
        indices, seed = self._drawing.begin(first)
        self._seed = prepared.seed = (prepared.seed or 0) if seed is None else seed
        ahead, most_ahead = self._drawing.ahead, self._drawing.most_ahead
        anywhere = self._drawing.anywhere
        self._sampled = SamplerEpoch(indices, ahead=most_ahead or 0, anywhere=anywhere)
        key = self._key_epoch = self._key(inner, first) if prepared.keyed else None
        if plan is not None:
            state = None
            if states is not None:
                state = {**states.state, "seed": self._seed, "first": first}
            plan.begin(self._sampled, inner.epoch, key, state, self._drawing.most_ahead)
        elif not prepared.stream:
            # The order is Penstock's, but the script's generators must advance as in torch.
            ahead = max(1, ahead)
        elif key is not None:
            inner.key_epoch(key)
        self._sampled.draw(ahead)

    def _key(self, inner: Loader, first: bool) -> int:
        return self._seed if first else (self._seed + inner.epoch * _STRIDE) % _SEEDS

    @property
    def over(self) -> bool:
        return super().over or (
            self._sampled is not None and self._sampled.over and not self._prepared.stream
        )

    def _go_on_beside(self) -> None:
        super()._go_on_beside()
        plan, inner = self._prepared.plan, self._prepared.inner
        if plan is not None and self._sampled is not None:
            plan.resumed = None
            most_ahead = self._drawing.most_ahead
            plan.begin(self._sampled, inner.epoch, self._key_epoch, most_ahead=most_ahead)
        self._turn = self._prepared.turn

    def __next__(self) -> Any:
        if self._epoch is None:
            raise StopIteration
        if self._position is not None:
            self._go_on_beside()
        prepared = self._prepared
        if self._turn != prepared.turn and self._can_go_back():
            # Another loop over the loader has begun, which torch allows. Our loader serves one
            # loop at a time, so this one continues with torch's own iterator.
            self._go_back()
        try:
            batch = next(self._epoch)
        except StopIteration:
            self._epoch = None
            if self._sampled is not None and self._sampled.error is not None:
                raise self._sampled.error from None
            raise
        except SampleError as error:
            self._go_on()
            raise_failed(prepared, error)
        except PenstockError as error:
            if not (self._can_go_back() and prepared.goes_back(error)):
                raise
            prepared.give_up(error)
            self._go_back()
            return next(self)
        except Exception:
            if prepared.stream:
                self._epoch = None
            raise
        self._delivered_any = True
        return batch

    def _go_on(self) -> None:
        """Leave out the batch that has failed, as torch does. A stream that has failed is over."""
        if self._prepared.stream:
            self._epoch = None
        elif hasattr(self._epoch, "skip"):
            self._epoch.skip()

    def _can_go_back(self) -> bool:
        """Whether the batches delivered so far are those that torch would have delivered."""
        if self._sampled is None:
            return False
        follows_sampler = self._prepared.plan is not None and self._prepared.may_go_back
        return not self._delivered_any or follows_sampler

    def _go_back(self) -> None:
        """Let torch's own iterator deliver the rest of the epoch."""
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            return
        loader = self._loader
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        twin = object.__new__(type(loader))
        which = "batch_sampler" if loader._auto_collation else "sampler"
        changes = {which: sampled.rest(), "generator": generator, "persistent_workers": False}
        # Through __dict__, because torch forbids setting these attributes on a finished loader.
        twin.__dict__.update({**loader.__dict__, **changes, "_iterator": None})
        self._epoch = torch_iterator(twin)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch. torch calls this on the iterator kept by ``persistent_workers``."""
        self._begin(first=False)


class OwnOrder(_Loop):
    """A loop over a loader whose order Penstock decides: nothing is drawn from the script's."""

    def __init__(self, loader: Any, prepared: Prepared) -> None:
        super().__init__(loader, prepared)
        self._epoch = iter(prepared.inner)

    def __next__(self) -> Any:
        if self._epoch is None:
            raise StopIteration
        if self._position is not None:
            self._go_on_beside()
        try:
            return next(self._epoch)
        except StopIteration:
            self._epoch = None
            raise
        except SampleError as error:
            if self._prepared.stream:
                self._epoch = None
            else:
                self._epoch.skip()
            raise_failed(self._prepared, error)
        except Exception:
            if self._prepared.stream:
                self._epoch = None
            raise


def raise_failed(prepared: Prepared, error: SampleError) -> NoReturn:
    """Raise what the script gets for a sample that failed."""
    failed, cause = prepared.failed(error), error.__cause__
    try:
        raise failed from (None if failed is cause else cause)
    finally:
        # The traceback of the exception has this frame. Names that lead back to the exception would
        # keep it, and the loader, until the garbage collector runs.
        del failed, cause, error


def original_exception(error: SampleError) -> BaseException:
    """The dataset's own exception, which the script may catch, with a note that names the sample.

    The error itself if the dataset raised none.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, PenstockError):
        return error
    if hasattr(cause, "add_note"):
        cause.add_note(f"penstock: sample {error.index} ({error.name}), in {error.stage}")
    return cause
