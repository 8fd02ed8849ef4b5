"""Caches that several pipelines have in common: one store for each thing that is cached."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.store import AnyStore
from penstock.store.admission import Admission


class Commons:
    """Stores in memory by what they hold, for all the roads of one process.

    What no road uses any more is kept for the next, until something else needs the room.
    """

    def __init__(self) -> None:
        self.admitting = threading.Lock()
        """Held while a road decides what stays in a store."""
        self._lock = threading.Lock()
        self._stores: dict[str, AnyStore] = {}
        self._users: dict[str, int] = {}
        self._admissions: dict[int, Admission] = {}

    def store(self, identity: str, make: Callable[[], AnyStore]) -> AnyStore:
        """The store of what has this identity, made if there is none."""
        with self._lock:
            if identity not in self._stores:
                self._drop_unused()
                self._stores[identity] = make()
                self._users[identity] = 0
            self._users[identity] += 1
            return self._stores[identity]

    def admission(self, store: AnyStore, first: Admission) -> Admission:
        """What has been admitted to a store, by whoever; ``first`` if nobody has used it yet."""
        with self._lock:
            return self._admissions.setdefault(id(store), first)

    def release(self, store: AnyStore) -> bool:
        """A road is done with it; false if it is not one of these."""
        with self._lock:
            for identity, found in self._stores.items():
                if found is store:
                    self._users[identity] -= 1
                    return True
        return False

    def _drop_unused(self) -> None:
        for identity in [one for one, users in self._users.items() if users == 0]:
            store = self._stores.pop(identity)
            del self._users[identity]
            self._admissions.pop(id(store), None)
            store.destroy()

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.destroy()
            self._stores.clear()
            self._users.clear()
            self._admissions.clear()
