"""Who draws from a sampler: any thread where the script cannot notice, else that of the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from penstock.torch import DataLoader  # noqa: E402
from penstock.torch.sampler_plan import SamplerEpoch  # noqa: E402


class Numbers(Dataset[int]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> int:
        return index


class OwnRandomSampler(RandomSampler):  # type: ignore[misc]
    """A sampler of the script's."""


class OwnBatchSampler(BatchSampler):  # type: ignore[misc]
    """A batch sampler of the script's."""


DATA = Numbers()
SHUFFLED: dict[str, Any] = {"batch_size": 4, "shuffle": True}


def taken_when_ready(loader: Any) -> Iterator[Any]:
    """All batches. Each but the first is taken when it is ready, so that the loop never waits."""
    for number, batch in enumerate(loader, 1):
        yield torch.as_tensor(batch).tolist()
        inner, ends = getattr(loader, "_loader", loader), time.monotonic() + 60
        while number < len(loader) and not inner.queue().ready and time.monotonic() < ends:
            time.sleep(1e-3)


@pytest.mark.parametrize(
    ("options", "anywhere"),
    [
        (lambda: {"batch_size": 4}, True),
        (lambda: SHUFFLED, True),
        (lambda: {"batch_size": 4, "sampler": RandomSampler(DATA, True, 100)}, True),
        (lambda: {"batch_size": 4, "sampler": DistributedSampler(DATA, 2, 0)}, True),
        (lambda: {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, False)}, True),
        # At its end, this one draws once more from the script's generator.
        (lambda: {**SHUFFLED, "generator": torch.Generator().manual_seed(1)}, False),
        (lambda: {"batch_size": 4, "sampler": OwnRandomSampler(DATA)}, False),
        (lambda: {"batch_sampler": OwnBatchSampler(SequentialSampler(DATA), 4, False)}, False),
        (lambda: {"batch_size": None, "sampler": RandomSampler(DATA)}, False),
    ],
)
def test_other_threads_draw_only_what_the_script_cannot_notice(
    options: Callable[[], dict[str, Any]], anywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_by: list[threading.Thread] = []
    draw = SamplerEpoch._draw

    def record(epoch: SamplerEpoch, batches: int) -> None:
        drawn_by.append(threading.current_thread())
        draw(epoch, batches)

    monkeypatch.setattr(SamplerEpoch, "_draw", record)
    torch.manual_seed(5)
    with DataLoader(DATA, num_workers=1, **options()) as loader:
        found = list(taken_when_ready(loader))
        after = torch.rand(1)
    assert (set(drawn_by) != {threading.main_thread()}) == anywhere
    assert drawn_by[0] is threading.main_thread()  # torch's first draw is from a global generator

    torch.manual_seed(5)
    expected = torch.utils.data.DataLoader(DATA, num_workers=1, **options())
    assert found == [torch.as_tensor(batch).tolist() for batch in expected]
    assert torch.equal(after, torch.rand(1))


def test_an_epoch_that_a_checkpoint_resumes_is_drawn_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its draws exchange the states of the global generators, which the script may use meanwhile.
    with DataLoader(DATA, num_workers=1, **SHUFFLED) as loader:
        epoch = iter(loader)
        next(epoch)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in epoch]
    drawn_by: list[threading.Thread] = []
    draw = SamplerEpoch._draw

    def record(epoch: SamplerEpoch, batches: int) -> None:
        drawn_by.append(threading.current_thread())
        draw(epoch, batches)

    monkeypatch.setattr(SamplerEpoch, "_draw", record)
    with DataLoader(DATA, num_workers=1, **SHUFFLED) as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == expected
    assert set(drawn_by) == {threading.main_thread()}


class Meeting:
    """An iterator that lets another thread run in the middle of each draw."""

    def __init__(self, deliver: Callable[[int], None]) -> None:
        self._number = 0
        self._deliver = deliver
        self.threads: list[threading.Thread] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._number == 20:
            raise StopIteration
        if self._number:
            # Delivers the batch before this one while this one is being drawn.
            self.threads.append(threading.Thread(target=self._deliver, args=(self._number - 1,)))
            self.threads[-1].start()
            self.threads[-1].join(0.01)
        self._number += 1
        return self._number - 1


def test_batches_are_delivered_while_others_are_drawn() -> None:
    meeting = Meeting(lambda number: epoch.deliver(number))
    epoch = SamplerEpoch(meeting, anywhere=True)
    assert list(epoch.since(0)) == list(range(20))
    for thread in meeting.threads:
        thread.join()
    assert epoch.delivered == 19
