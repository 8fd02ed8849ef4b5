"""Preparation on the device: makes the parts with which an engine shares its work with a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.device.contract import Device
from penstock.device.pool import DevicePool
from penstock.device.shared_schedule import BEGUN, MemoryNeeds, SharedSchedule
from penstock.device.staging import Staging
from penstock.device.work import DeviceWork, PackedPart
from penstock.engine.pools.pool import Pool
from penstock.engine.pools.runner import Work
from penstock.engine.slots import Register
from penstock.errors import StateError
from penstock.keyed import Keys
from penstock.stats import DeviceStats
from penstock.stops.field import On

_log = logging.getLogger("penstock.device")


class Preparation:
    """CPU workers and a device prepare the batches of one engine together. See ``Together``.

    ``find``: returns the device. ``register``: registers host memory with it. ``rows``: batch
    size. ``state``: what was learnt before, from a checkpoint.
    """

    def __init__(
        self,
        work: DeviceWork,
        find: Callable[[], Device],
        register: Register,
        *,
        workers: int,
        rows: int,
        tiny_batch: int | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._work = work
        self._find = find
        self._rows = rows
        self._staging = Staging(register)
        self._pool: DevicePool | None = None
        self.schedule = SharedSchedule(
            workers, work.sizes, tiny_batch=tiny_batch, alone=not work.exact
        )
        self.schedule.memory = self._memory
        if state is not None:
            try:
                self.schedule.cooperation.load_state_dict(state)
            except StateError as error:
                _log.warning("%s", str(error))

    # As the split of the work: see ``HostSplit``.

    @property
    def above(self) -> int:
        return self._work.above

    @property
    def on(self) -> On:
        return self._work.on

    @property
    def field(self) -> str:
        return self._work.field

    def host_part(self, keys: Keys, values: Sequence[Any]) -> PackedPart | None:
        return self._work.pack(keys, values, self._staging.take)

    # For the assembly of an engine.

    def split(self, work: Work) -> Work:
        return replace(work, split=self)

    def join(self, pool: Pool) -> Pool:
        self._pool = DevicePool(
            pool,
            self._work,
            self.schedule.cooperation,
            self._staging,
            self._find,
            self.schedule.tiny_samples(self._rows),
        )
        return self._pool

    def _memory(self) -> MemoryNeeds | None:
        return None if self._pool is None else self._pool.memory_needs(BEGUN + 1)

    # What it has done.

    def stats(self) -> DeviceStats:
        """Its counters so far."""
        schedule, cooperation, pool = self.schedule, self.schedule.cooperation, self._pool
        counts = cooperation.counts
        return DeviceStats(
            name="" if pool is None else pool.name,
            samples=schedule.by_device,
            cpu_samples=schedule.by_cpu,
            tiny_batches=counts.device,
            cpu_tiny_batches=counts.whole,
            again=counts.again,
            threshold=cooperation.threshold.t,
            frozen=cooperation.threshold.frozen,
            mode=cooperation.sharing.mode,
            decided=cooperation.sharing.decided,
            copied=0 if pool is None else pool.copied,
            buffers=0 if pool is None else pool.allocated,
            in_use=0 if pool is None else pool.most_in_use,
            lost="" if pool is None else pool.lost_because,
            worth=cooperation.worth.positive,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint. It affects speed only."""
        return self.schedule.cooperation.state_dict()
