"""What a node has to say of itself: plain data, for people and programs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.node.group import Group
    from penstock.node.service import Service


def status_of(service: Service) -> dict[str, Any]:
    times = os.times()
    return {
        "pid": os.getpid(),
        "place": str(service.place.path),
        "up": time.time() - service.started,
        "cpu": times.user + times.system + times.children_user + times.children_system,
        "workers": service.crew.size,
        "staging": service.staging,
        "groups": [_group(group) for group in service.groups.values()],
    }


def _group(group: Group) -> dict[str, Any]:
    with group.lock:
        state = group.state
        found: dict[str, Any] = {
            "name": group.name,
            "ready": group.assembly is not None,
            "staged": state.staged,
            "staged_batches": state.staged_batches,
            "budget": state.budget,
            "prepared": state.prepared_batches,
            "given": state.given_batches,
            "members": [
                {
                    "pid": group.peers[number].pid,
                    "part": member.part,
                    "epoch": member.epoch,
                    "batch": member.done,
                    "batches": member.length,
                    "taken": member.taken,
                    "ready": state.lead(number),
                    "joined": group.peers[number].since,
                }
                for number, member in state.members.items()
                if number in group.peers
            ],
        }
    if group.assembly is not None and group.meter is not None:
        held = group.assembly.holds.stats(group.meter.answered(), 1.0)
        found["workers"] = str(group.assembly.choice)
        found["caches"] = [
            {
                "hits": one.hits,
                "misses": one.misses,
                "samples": one.admitted,
                "bytes": one.used,
                "budget": one.budget,
            }
            for one in held.caches
        ]
    return found
