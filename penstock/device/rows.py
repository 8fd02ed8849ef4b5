"""The rows of a batch that the device has prepared, and the delivery of such a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from penstock.device.contract import Device


class DeviceRows:
    """The memory of a batch on the device, into which it writes its rows in place.

    ``count``: the rows of the batch. ``tensor`` is allocated with the first tiny-batch that the
    device prepares.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.column = 0
        self.tensor: torch.Tensor | None = None
        self.written: dict[int, int] = {}
        """The rows of each tiny-batch on the device, by its first row."""

    def leaf(self, host: NDArray[Any], pieces: Sequence[tuple[int, int]]) -> Any:
        if self.tensor is None:
            return host
        return PartlyOnDevice(torch.from_numpy(host), self.tensor, self.written, pieces)


class PartlyOnDevice:
    """A field of a batch, some of whose rows are on the device. The delivery completes it.

    ``host``: the rows that the CPU has prepared, in their places.
    """

    def __init__(
        self,
        host: torch.Tensor,
        tensor: torch.Tensor,
        written: dict[int, int],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        self._tensor = tensor
        self._moves: list[tuple[int, int, int]] = []
        self._host: list[tuple[int, torch.Tensor]] = []
        end = 0
        for first, rows in pieces:
            if first in written:
                self._moves.append((first, end, rows))
            elif self._host and self._host[-1][0] + len(self._host[-1][1]) == end:
                start = self._host[-1][0]
                self._host[-1] = start, host[start : end + rows]
            elif rows:
                self._host.append((end, host[end : end + rows]))
            end += rows
        self._rows = end

    @property
    def nbytes(self) -> int:
        """Bytes that are to be copied to the device."""
        return sum(rows.nbytes for _, rows in self._host)

    def deliver(self, device: Device) -> torch.Tensor:
        """Begin to complete the field on the device, on the stream ``copy``.

        It is called again if another field of the batch found no memory.
        """
        tensor = self._tensor
        # Rows move up over skipped samples, before the rows of the CPU take their places.
        moves, self._moves = self._moves, []
        for first, to, rows in moves:
            if first != to:
                source, target = tensor[first : first + rows], tensor[to : to + rows]

                def move(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                    target.copy_(source.clone())

                device.run(move, "copy", reads=[source], writes=[target])
        for first, rows_of_host in self._host:
            device.copy_to(tensor[first : first + len(rows_of_host)], rows_of_host)
        return tensor[: self._rows]
