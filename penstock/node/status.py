"""What a node has to say of itself: plain data, for people and programs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock import config
from penstock.engine.pools.messages import unpack_error
from penstock.host.process import stat_of

if TYPE_CHECKING:
    from penstock.engine.build import Assembly
    from penstock.node.group import Group
    from penstock.node.service import Service
    from penstock.node.state import Member
    from penstock.stats import Meter


def status_of(service: Service) -> dict[str, Any]:
    return {
        "release": penstock.__version__,
        "pid": os.getpid(),
        "place": str(service.place.path),
        "log": str(service.place.log),
        "up": time.time() - service.started,
        "cpu": cpu_seconds(),
        "cores": config.cores(),
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
            "broken": None if group.broken is None else str(unpack_error(group.broken)),
            "staged": state.staged,
            "staged_batches": state.staged_batches,
            "budget": state.budget,
            "prepared": state.prepared_batches,
            "given": state.given_batches,
            "members": [
                {
                    "pid": group.peers[number].pid,
                    "part": member.part,
                    "lag": member.lag,
                    **position(member),
                    "taken": member.taken,
                    "ready": state.lead(number),
                    "joined": group.peers[number].since,
                }
                for number, member in state.members.items()
                if number in group.peers
            ],
        }
        assembly, meter = group.assembly, group.meter
    if assembly is not None and meter is not None:
        found.update(_held(assembly, meter))
    return found


def position(member: Member) -> dict[str, int | None]:
    """Where its loop is. It asks ahead, and so may have begun an epoch before the last is over."""
    epochs = [name.epoch for name in (*member.untaken, *member.wants)]
    epoch, batches = min([member.epoch, *epochs]), member.length
    batch: int | None = member.done
    if epoch < member.epoch:
        # All that is left of the epoch before has been asked for.
        batch = None if batches is None else max(0, batches - epochs.count(epoch))
    return {"epoch": epoch, "batch": batch, "batches": batches}


def _held(assembly: Assembly, meter: Meter) -> dict[str, Any]:
    held = assembly.keepers.stats(meter.answered())
    found: dict[str, Any] = {
        "workers": str(assembly.choice),
        "caches": [
            {
                "hits": one.hits,
                "misses": one.misses,
                "samples": one.admitted,
                "bytes": one.used,
                "budget": one.budget,
                "full": one.full,
            }
            for one in held.caches
        ],
        "refurbish": None,
    }
    if held.refurbish is not None:
        one = held.refurbish
        found["refurbish"] = {
            "fresh": one.fresh,
            "reused": one.reused,
            "kept": one.kept,
            "bytes": one.used,
        }
    return found


def cpu_seconds() -> float:
    """Seconds of CPU that this process and its workers have used, living or dead."""
    # The system adds up those of children that have ended.
    own = os.times()
    used = own.user + own.system + own.children_user + own.children_system
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                used += _used_by(child)
    return used


def _used_by(pid: str) -> float:
    words = stat_of(pid)
    return 0.0 if words is None else sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
