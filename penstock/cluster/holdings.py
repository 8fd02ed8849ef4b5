"""Decides what a machine answers when others ask it for samples, and what it keeps.

Pure: events and the time in, replies out. The owner of a sample has it, or knows the machine to
which it spilled, or has *promised* it to a reader. A promised sample is being read from storage;
others that ask for it meanwhile are answered when it arrives. So it is read once, however many ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.config import cluster_patience
from penstock.store.admission import KeptSet

PROMISE = 2.0 * cluster_patience()
"""Seconds that a reader has for reading a promised sample and offering it. After that the promise
is void: the reader may have died. No machine waits longer for a read of another."""


@dataclass(slots=True)
class OwnerReply:
    """An answer to a request, or a part of it: every key of the request is answered once.

    - ``present``: send these values. ``absent``: the asking machine is to read them from storage,
      and to offer them to this one. ``redirected``: another machine has them.
    - ``held``: the answer follows when the sample arrives; ``PROMISE`` seconds at most.
    - ``left``: there was no room for them in the answer; ask again.
    """

    peer: str
    request: int
    present: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    redirected: dict[int, str] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Promise:
    reader: str
    until: float
    waiting: list[tuple[str, int]] = field(default_factory=list)


class Holdings:
    """The samples of one cache that are on this machine, and what it knows of those it owns.

    ``admission``: the budget; what it has admitted is in the store. ``size``: the bytes of a sample
    in the store.

    >>> from penstock.store.admission import Admission
    >>> sizes = {7: 10, 8: 10}
    >>> holdings = Holdings("me", Admission(budget=15), sizes.__getitem__)
    >>> holdings.keep(7, 10, 0.0), holdings.keep(8, 10, 0.0)
    ((True, []), (False, []))
    >>> reply = holdings.asked("peer", 1, [7, 8], most_bytes=100, now=0.0)
    >>> reply.present, reply.absent
    ([7], [8])
    """

    def __init__(self, me: str, admission: KeptSet, size: Callable[[int], int]) -> None:
        self.me = me
        self._admission = admission
        self._size = size
        self._promises: dict[int, _Promise] = {}
        self._redirects: dict[int, str] = {}
        self._everywhere_full = False
        self._blocked = False
        """The store takes nothing, although its budget has room: its disk is full."""

    def __contains__(self, key: int) -> bool:
        return key in self._admission

    @property
    def full(self) -> bool:
        """Whether no further sample is admitted."""
        return self._admission.closed

    @property
    def full_everywhere(self) -> bool:
        """Whether no machine admits further samples, as far as this one knows."""
        return self._everywhere_full and self._admission.closed

    @property
    def refuses_all(self) -> bool:
        """Whether no machine keeps what is read now, as far as this one knows."""
        return self._everywhere_full and (self._admission.closed or self._blocked)

    @property
    def redirects(self) -> int:
        """Samples of this machine that are on others."""
        return len(self._redirects)

    def redirect(self, key: int) -> str | None:
        """The machine that keeps this sample in place of this one."""
        return self._redirects.get(key)

    def is_promised(self, key: int, now: float) -> bool:
        """Whether a machine is reading this sample from storage now."""
        promise = self._promises.get(key)
        return promise is not None and now < promise.until

    # Requests.

    def asked(
        self, peer: str, request: int, keys: Sequence[int], most_bytes: int, now: float
    ) -> OwnerReply:
        """Another machine asks for samples. At least one value is sent, whatever its size."""
        reply = OwnerReply(peer, request)
        nbytes = 0
        for key in keys:
            if key in self._admission:
                nbytes += self._size(key)
                fits = nbytes <= most_bytes or not reply.present
                (reply.present if fits else reply.left).append(key)
            elif key in self._redirects:
                reply.redirected[key] = self._redirects[key]
            elif self._promised_to_other(key, peer, now):
                self._promises[key].waiting.append((peer, request))
                reply.held.append(key)
            else:
                self._promise(key, peer, now)
                reply.absent.append(key)
        return reply

    def reading(self, keys: Iterable[int], now: float) -> None:
        """This machine reads these samples of its own from storage."""
        for key in keys:
            self._promise(key, self.me, now)

    def tick(self, now: float) -> list[OwnerReply]:
        """End promises that were not kept: whoever waits first is to read the sample."""
        late = [key for key, promise in self._promises.items() if now >= promise.until]
        return self._resolve(late, now)

    # Values.

    def keep(self, key: int, nbytes: int, now: float) -> tuple[bool, list[OwnerReply]]:
        """A value was read here or offered by another machine. Returns whether it is kept.

        If it is not, and this machine owns it, it is to be offered to others: report the result
        with ``spilled`` or ``homeless``.
        """
        if not self._admission.offer(key, nbytes):
            return False, []
        self._redirects.pop(key, None)
        self._blocked = False
        return True, self._resolve([key], now)

    def spilled(self, key: int, holder: str, now: float) -> list[OwnerReply]:
        """Another machine keeps this sample, which this machine owns."""
        if key not in self._admission:
            self._redirects[key] = holder
        return self._resolve([key], now)

    def homeless(self, key: int, now: float) -> list[OwnerReply]:
        """No machine has room for this sample."""
        self._everywhere_full = True
        self._redirects.pop(key, None)
        return self._resolve([key], now)

    def withdrawn(self, key: int, now: float) -> list[OwnerReply]:
        """The machine that has read this sample cannot offer it."""
        return self._resolve([key], now)

    def refused(self) -> None:
        """The store has not taken a sample, although its budget has room."""
        self._blocked = True

    def may_keep(self, key: int) -> bool:
        """Whether a value may be kept, if there is room: there is no newer version in its place."""
        return self._admission.accepts(key)

    def kept(self) -> NDArray[np.int64]:
        """The samples that are here."""
        return self._admission.keys()

    def learnt(self, holder: str, keys: Iterable[int]) -> None:
        """Another machine keeps these samples, which this machine owns."""
        self._redirects.update((key, holder) for key in keys if key not in self._admission)

    def known(self) -> list[int]:
        """The samples that are here, and those of this machine that are on others."""
        return [*self._admission.keys().tolist(), *self._redirects]

    def forget(self, keys: Iterable[int]) -> None:
        """No machine needs these samples any more."""
        keys = list(keys)
        self._admission.remove(keys)
        for key in keys:
            self._redirects.pop(key, None)

    def left(self, name: str) -> None:
        """This machine has left the cluster or was restarted: it has nothing any more."""
        self._redirects = {key: at for key, at in self._redirects.items() if at != name}

    def joined(self) -> None:
        """A machine has joined or was restarted: it may have room."""
        self._everywhere_full = False

    def _promised_to_other(self, key: int, peer: str, now: float) -> bool:
        return self.is_promised(key, now) and self._promises[key].reader != peer

    def _promise(self, key: int, reader: str, now: float) -> None:
        # A sample that nobody will keep is read by everybody, so nobody should wait for it.
        if self.refuses_all:
            return
        before = self._promises.get(key)
        waiting = [] if before is None else before.waiting
        self._promises[key] = _Promise(reader, now + PROMISE, waiting)

    def _resolve(self, keys: Iterable[int], now: float) -> list[OwnerReply]:
        """Answer those that wait for these samples."""
        replies: dict[tuple[str, int], OwnerReply] = {}
        for key in keys:
            promise = self._promises.pop(key, None)
            for peer, request in [] if promise is None else promise.waiting:
                reply = replies.setdefault((peer, request), OwnerReply(peer, request))
                if key in self._admission:
                    reply.present.append(key)
                elif key in self._redirects:
                    reply.redirected[key] = self._redirects[key]
                elif self._promised_to_other(key, peer, now):
                    self._promises[key].waiting.append((peer, request))
                else:
                    self._promise(key, peer, now)
                    reply.absent.append(key)
        return [r for r in replies.values() if r.present or r.absent or r.redirected]
