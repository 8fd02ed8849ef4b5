"""A handler with values in a dictionary, for tests of the transport between machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.cluster.protocol import (
    VERSION,
    Acknowledged,
    BatchHead,
    GetMachineStatus,
    HeartbeatReply,
    HeartbeatSent,
    Hello,
    MachineStatus,
    Offered,
    RemoteTask,
    WantedBatch,
    WantedValues,
    integers,
)
from penstock.cluster.transport import KeyAnswer, RemoteRows
from penstock.node.protocol import RELEASE

Values = dict[tuple[str, int, int], Any]


def hello(machine: str, incarnation: int = 1, **other: Any) -> Hello:
    return Hello(VERSION, RELEASE, machine, incarnation)._replace(**other)


ME = ["client", "host:1", 5, 8, 1 << 40, 1, "trains", [], []]
REPLY = HeartbeatReply(ME, [2, 1, 7], "host:1", 3, [[2, 1, 7], "host:1", None, [ME, ME], ["gone"]])


class Keeper:
    """A handler with values by (fingerprint, index, generation)."""

    def __init__(self, values: Values | None = None) -> None:
        self.values: Values = values or {}
        self.moved: dict[int, str] = {}
        self.seen: list[tuple[str, Any]] = []

    def control(self, peer: str, message: Any) -> Any:
        self.seen.append((peer, message))
        if isinstance(message, HeartbeatSent):
            return REPLY
        if isinstance(message, GetMachineStatus):
            return MachineStatus({"values": len(self.values), "names": ["x", "ü"]})
        return Acknowledged()

    def get(self, peer: str, wanted: WantedValues) -> Iterator[list[KeyAnswer]]:
        indices = integers(wanted.indices).tolist()
        generations = [0] * len(indices)
        if wanted.generations is not None:
            generations = integers(wanted.generations).tolist()
        for place, (index, generation) in enumerate(zip(indices, generations, strict=True)):
            value = self.values.get((wanted.fingerprint, index, generation))
            if value is not None:
                yield [KeyAnswer(place, "present", value)]
            elif index in self.moved:
                yield [KeyAnswer(place, "moved", None, self.moved[index])]
            else:
                yield [KeyAnswer(place, "absent")]

    def put(self, peer: str, offered: Offered, values: Iterator[memoryview]) -> list[bool]:
        kept = []
        for index, value in zip(integers(offered.indices).tolist(), values, strict=True):
            kept.append(index % 2 == 0)
            if kept[-1]:
                self.values[(offered.fingerprint, index, 0)] = bytes(value)
        return kept

    def run(self, peer: str, task: RemoteTask) -> Iterator[RemoteRows]:
        indices = integers(task.indices)
        for first in range(0, len(indices), 2):
            some = indices[first : first + 2]
            leaves = [np.repeat(some, 1000), (some * task.epoch).astype(np.float32)]
            yield RemoteRows(first, len(some), leaves, {"seconds": 0.5, "bad": []})

    def batch(self, peer: str, wanted: WantedBatch) -> tuple[BatchHead, list[Any]]:
        """Batches of ``number`` times 1000 bytes for each sample, in two buffers."""
        indices = integers(wanted.indices)
        if not wanted.number:
            return BatchHead.without("later"), []
        rows: list[Any] = [np.repeat(indices, 1000 * wanted.number).astype(np.uint8), indices]
        nbytes = sum(row.nbytes for row in rows)
        head = BatchHead("present", len(indices), nbytes, b"layout", None, [[3, "n", "s", "e"]])
        return head, rows
