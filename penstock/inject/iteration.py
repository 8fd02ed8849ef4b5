"""One loop over an upgraded DataLoader, with a way back to torch's own iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, SampleError
from penstock.inject.build import Upgraded

if TYPE_CHECKING:
    from penstock.inject.sampler_plan import SamplerEpoch

GetIterator = Callable[[Any], Iterator[Any]]
"""The type of torch's ``DataLoader._get_iterator``."""


class Iteration:
    """Takes the place of torch's iterator, and draws random numbers at the same moments."""

    def __init__(
        self,
        loader: Any,
        upgraded: Upgraded,
        torch: Any,
        original: GetIterator,
        give_up: Callable[[Any, PenstockError], None],
    ) -> None:
        self._loader = loader
        self._upgraded = upgraded
        self._torch = torch
        self._original = original
        self._give_up = give_up
        self._begin(first=True)

    def _begin(self, first: bool) -> None:
        from penstock.inject.sampler_plan import SamplerEpoch

        loader, upgraded = self._loader, self._upgraded
        # The order of torch: begin the sampler, draw the seed of the workers; with workers, begin
        # the sampler once more and draw as many batches as they may prepare.
        indices = iter(loader._index_sampler)
        if first:
            seed = self._torch.empty((), dtype=self._torch.int64)
            self._seed = int(seed.random_(generator=loader.generator).item())
            if loader.num_workers > 0:
                indices = iter(loader._index_sampler)
        self._sampled: SamplerEpoch | None = SamplerEpoch(indices)
        ahead = (loader.prefetch_factor or 0) * loader.num_workers
        if upgraded.plan is not None:
            upgraded.plan.begin(self._sampled)
        elif not upgraded.stream:
            # The order is Penstock's, but the script's generators must advance as in torch.
            ahead = max(1, ahead)
        self._sampled.draw(ahead)
        upgraded.turn += 1
        self._turn = upgraded.turn
        self._epoch: Iterator[Any] | None = iter(upgraded.loader)
        self._delivered_any = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._epoch is None:
            raise StopIteration
        if self._turn != self._upgraded.turn and self._can_go_back():
            # Another loop over the loader has begun, which torch allows. Our loader serves one
            # loop at a time, so this one continues with torch's own iterator.
            self._go_back()
        try:
            batch = next(self._epoch)
        except StopIteration:
            self._epoch = None
            raise
        except SampleError as error:
            raise _original_exception(error) from None
        except PenstockError as error:
            if not self._can_go_back():
                raise
            self._give_up(self._loader, error)
            self._go_back()
            return next(self)
        self._delivered_any = True
        return batch

    def _can_go_back(self) -> bool:
        """Whether the batches delivered so far are those that torch would have delivered."""
        if self._sampled is None:
            return False
        follows_sampler = self._upgraded.plan is not None and not self._upgraded.echoes
        return not self._delivered_any or follows_sampler

    def _go_back(self) -> None:
        """Let torch's own iterator deliver the rest of the epoch."""
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            return
        loader = self._loader
        generator = self._torch.Generator()
        generator.manual_seed(self._seed)
        twin = object.__new__(type(loader))
        which = "batch_sampler" if loader._auto_collation else "sampler"
        changes = {which: sampled.rest(), "generator": generator, "persistent_workers": False}
        # Through __dict__, because torch forbids setting these attributes on a finished loader.
        twin.__dict__.update({**loader.__dict__, **changes, "_iterator": None})
        self._epoch = self._original(twin)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch. torch calls this on the iterator kept by ``persistent_workers``."""
        self._begin(first=False)


def _original_exception(error: SampleError) -> BaseException:
    """The dataset's own exception, which the script may catch, with a note that names the sample.

    The error itself if the dataset raised none.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, PenstockError):
        return error
    if hasattr(cause, "add_note"):
        cause.add_note(f"penstock: sample {error.index} ({error.name}), in {error.stage}")
    return cause
