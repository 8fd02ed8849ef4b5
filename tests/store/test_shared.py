"""Stores that pipelines share live as long as one of them needs them, and a little longer."""

from __future__ import annotations

from penstock.store import HeapStore, SampleStore
from penstock.store.shared import SharedStores


class _Stores:
    def __init__(self) -> None:
        self.now = 0.0
        self.shared = SharedStores(clock=lambda: self.now)

    def open(self, content: str) -> SampleStore:
        def make() -> SampleStore:
            store = HeapStore(1_000_000)
            store.put_many([(1, content.encode())])
            return store

        return self.shared.store(content, "threads", make, lends=False, samples=4)


def test_a_store_without_users_goes_after_its_time_and_one_in_use_stays() -> None:
    stores = _Stores()
    one, other = stores.open("a"), stores.open("b")
    assert stores.open("a") is one
    stores.shared.release(one)
    stores.now = 100.0
    stores.shared.drop_unused(10.0)
    assert (len(one), len(other)) == (1, 1)  # the second user of "a" still needs it
    stores.shared.release(one)
    assert not stores.shared.unused(10.0)
    stores.shared.drop_unused(10.0)
    assert len(one) == 1  # for the next job
    stores.now = 110.0
    assert stores.shared.unused(10.0)
    stores.shared.drop_unused(10.0)
    assert (len(one), len(other)) == (0, 1)
    assert not stores.shared.unused(0.0)
    stores.shared.close()


def test_a_job_that_comes_in_time_finds_the_samples_of_the_last_one() -> None:
    stores = _Stores()
    one = stores.open("a")
    stores.shared.release(one)
    stores.now = 5.0
    assert stores.open("a") is one
    stores.now = 100.0
    stores.shared.drop_unused(10.0)
    assert len(one) == 1
    stores.shared.close()
