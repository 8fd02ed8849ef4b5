"""One loop over a DataLoader that was taken over, and the way back to torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, SampleError
from penstock.inject.build import Upgraded

if TYPE_CHECKING:
    from penstock.inject.dealt import Drawn

Original = Callable[[Any], Iterator[Any]]
"""torch's own ``_get_iterator``."""


class Iteration:
    """Stands where torch's iterator would, and draws random numbers where that would."""

    def __init__(
        self,
        loader: Any,
        made: Upgraded,
        torch: Any,
        original: Original,
        give_up: Callable[[Any, PenstockError], None],
    ) -> None:
        self._loader = loader
        self._made = made
        self._torch = torch
        self._original = original
        self._give_up = give_up
        self._begin(first=True)

    def _begin(self, first: bool) -> None:
        from penstock.inject.dealt import Drawn

        loader, made = self._loader, self._made
        # As torch does it: the sampler is begun, the seed of workers drawn, and where there are
        # workers the sampler is begun once more and as many batches drawn as they may prepare.
        indices = iter(loader._index_sampler)
        if first:
            seed = self._torch.empty((), dtype=self._torch.int64)
            self._seed = int(seed.random_(generator=loader.generator).item())
            if loader.num_workers > 0:
                indices = iter(loader._index_sampler)
        self._drawn: Drawn | None = Drawn(indices)
        ahead = (loader.prefetch_factor or 0) * loader.num_workers
        if made.dealt is not None:
            made.dealt.begin(self._drawn)
        elif not made.stream:
            # The order is ours, but what the script draws after this must be what it always was.
            ahead = max(1, ahead)
        self._drawn.draw(ahead)
        made.turn += 1
        self._turn = made.turn
        self._epoch: Iterator[Any] | None = iter(made.loader)
        self._handed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._epoch is None:
            raise StopIteration
        if self._turn != self._made.turn and self._can_go_back():
            # Another loop has begun, as it may in torch: this one goes on by itself.
            self._go_back()
        try:
            batch = next(self._epoch)
        except StopIteration:
            self._epoch = None
            raise
        except SampleError as error:
            raise _as_the_script_knows_it(error) from None
        except PenstockError as error:
            if not self._can_go_back():
                raise
            self._give_up(self._loader, error)
            self._go_back()
            return next(self)
        self._handed = True
        return batch

    def _can_go_back(self) -> bool:
        """Whether what was handed out is the beginning of what the script's sampler deals."""
        if self._drawn is None:
            return False
        return not self._handed or (self._made.dealt is not None and not self._made.echoes)

    def _go_back(self) -> None:
        """Have torch's own iterator deliver the batches that are still to come."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        loader = self._loader
        generator = self._torch.Generator()
        generator.manual_seed(self._seed)
        twin = object.__new__(type(loader))
        which = "batch_sampler" if loader._auto_collation else "sampler"
        changes = {which: drawn.rest(), "generator": generator, "persistent_workers": False}
        # torch forbids to set these on a loader that is made.
        twin.__dict__.update({**loader.__dict__, **changes, "_iterator": None})
        self._epoch = self._original(twin)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """The next epoch of a loader with ``persistent_workers``, which keeps its iterator."""
        self._begin(first=False)


def _as_the_script_knows_it(error: SampleError) -> BaseException:
    """What its dataset raised, which it may be waiting for, with a note on which sample it was."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, PenstockError):
        return error
    if hasattr(cause, "add_note"):
        cause.add_note(f"penstock: sample {error.index} ({error.name}), in {error.stage}")
    return cause
