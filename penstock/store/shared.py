"""Stores that several pipelines of one process share: one store for each cached content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.order import Generations
from penstock.store.admission import Admission
from penstock.store.partitioned import Divide, Division, PartitionedStore
from penstock.store.sample_store import SampleStore


class SharedStores:
    """Stores by the identity of their content, for all pipelines of one process.

    A store that no pipeline uses any more is kept for the next one, until a new store is needed or
    ``drop_unused`` is called.

    ``divide``: divides every store over several machines.
    """

    def __init__(
        self, divide: Divide | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.admitting = threading.Lock()
        """Held while a pipeline decides which samples stay in a store."""
        self._lock = threading.Lock()
        self._stores: dict[str, SampleStore] = {}
        self._users: dict[str, int] = {}
        self._admissions: dict[int, Admission] = {}
        self._clock = clock
        self._unused_since: dict[str, float] = {}
        self._divide = divide
        self._divisions: dict[int, Division] = {}

    def store(
        self,
        content: str,
        form: str,
        make: Callable[[], SampleStore],
        *,
        lends: bool,
        samples: int,
        make_arrivals: Callable[[], SampleStore] | None = None,
        generations: Generations | None = None,
    ) -> SampleStore:
        """The store of this content, made if there is none. It has one more user from now on.

        ``content``: the identity of what it holds, equal on all machines. ``form``: the kind of
        store. ``lends``: it holds samples themselves, not packed ones. ``samples``: number of
        samples that there are. ``make_arrivals``: makes the store for samples of other machines;
        without it ``make`` does. ``generations``: samples have versions.
        """
        identity = f"{content} {form} {lends}"
        with self._lock:
            if identity not in self._stores:
                self._drop_unused()
                own = make()
                if self._divide is not None:
                    arrivals = (make_arrivals or make)()
                    division = self._divide(
                        content,
                        own,
                        arrivals,
                        lends=lends,
                        samples=samples,
                        generations=generations,
                    )
                    own = PartitionedStore(own, arrivals)
                    self._divisions[id(own)] = division
                self._stores[identity] = own
                self._users[identity] = 0
            self._users[identity] += 1
            self._unused_since.pop(identity, None)
            return self._stores[identity]

    @property
    def divides(self) -> bool:
        """Whether stores are divided over several machines."""
        return self._divide is not None

    def division(self, store: SampleStore) -> Division | None:
        """How this store is divided over several machines; ``None`` if it is not."""
        with self._lock:
            return self._divisions.get(id(store))

    def admission(self, store: SampleStore, first: Admission) -> Admission:
        """The admission that all users of a store share; ``first`` becomes it if there is none."""
        with self._lock:
            return self._admissions.setdefault(id(store), first)

    def release(self, store: SampleStore, *, keep: bool = True) -> bool:
        """Give a store back; false if it is not a shared one. ``keep``: for the next pipeline."""
        with self._lock:
            for identity, shared in self._stores.items():
                if shared is store:
                    self._users[identity] -= 1
                    if not self._users[identity]:
                        self._unused_since[identity] = self._clock()
                        if not keep:
                            self._end(self._take_out(identity))
                    return True
        return False

    def unused(self, seconds: float) -> bool:
        """Whether there is a store that no pipeline has used for this long."""
        before = self._clock() - seconds
        with self._lock:
            return any(since <= before for since in self._unused_since.values())

    def drop_unused(self, seconds: float) -> None:
        """Destroy the stores that no pipeline has used for this long.

        Freeing a large store takes a while; other pipelines do not wait for it.
        """
        before = self._clock() - seconds
        with self._lock:
            idle = [name for name, since in self._unused_since.items() if since <= before]
            stores = [self._take_out(identity) for identity in idle]
        for store in stores:
            self._end(store)

    def _drop_unused(self) -> None:
        for identity in list(self._unused_since):
            self._end(self._take_out(identity))

    def _take_out(self, identity: str) -> SampleStore:
        del self._users[identity], self._unused_since[identity]
        return self._stores.pop(identity)

    def _end(self, store: SampleStore) -> None:
        self._admissions.pop(id(store), None)
        division = self._divisions.pop(id(store), None)
        if division is not None:
            division.close()
        if store.persistent:
            store.close()
        else:
            store.destroy()

    def close(self) -> None:
        """Destroy all stores."""
        with self._lock:
            for store in self._stores.values():
                self._end(store)
            self._stores.clear()
            self._users.clear()
            self._unused_since.clear()
