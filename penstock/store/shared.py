"""Stores that several pipelines of one process share: one store for each cached content."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.order import Generations
from penstock.store.admission import Admission
from penstock.store.partitioned import Divide, Division, PartitionedStore
from penstock.store.sample_store import SampleStore


class SharedStores:
    """Stores by the identity of their content, for all pipelines of one process.

    A store that no pipeline uses any more is kept for the next one, until a new store is needed.

    ``divide``: divides every store over several machines.
    """

    def __init__(self, divide: Divide | None = None) -> None:
        self.admitting = threading.Lock()
        """Held while a pipeline decides which samples stay in a store."""
        self._lock = threading.Lock()
        self._stores: dict[str, SampleStore] = {}
        self._users: dict[str, int] = {}
        self._admissions: dict[int, Admission] = {}
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
                    if not keep and not self._users[identity]:
                        self._drop(identity)
                    return True
        return False

    def _drop_unused(self) -> None:
        for identity in [identity for identity, users in self._users.items() if users == 0]:
            self._drop(identity)

    def _drop(self, identity: str) -> None:
        store = self._stores.pop(identity)
        del self._users[identity]
        self._end(store)

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
