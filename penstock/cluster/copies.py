"""Copies of samples that other machines keep. Decides which stay here: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class SampleCopies:
    """Samples of other machines that stay on this one, within what is left of its ``budget``.

    They stay until the samples that this machine keeps for all machines need the room: ``kept``
    is the bytes of those. A copy that leaves is asked from its owner again.

    >>> copies = SampleCopies(budget=100)
    >>> copies.offer({1: 40, 2: 40, 3: 40}, kept=20)
    [1, 2]
    >>> copies.make_room(kept=30, in_use=())
    [2]
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.costs: dict[int, int] = {}
        """Bytes of each copy, oldest first."""
        self.used = 0

    def offer(self, costs: Mapping[int, int], kept: int) -> list[int]:
        """These samples have been used. Returns those that stay."""
        staying = []
        for key, cost in costs.items():
            if kept + self.used + cost <= self.budget:
                self.remove([key])
                self.costs[key] = cost
                self.used += cost
                staying.append(key)
        return staying

    def make_room(self, kept: int, in_use: Collection[int]) -> list[int]:
        """The copies that have to leave, the latest first. Those ``in_use`` stay for now."""
        leaving = []
        for key in reversed(self.costs):
            if kept + self.used <= self.budget:
                break
            if key not in in_use:
                leaving.append(key)
                self.used -= self.costs[key]
        for key in leaving:
            del self.costs[key]
        return leaving

    def remove(self, keys: Collection[int]) -> None:
        """These copies are gone."""
        for key in keys:
            self.used -= self.costs.pop(key, 0)
