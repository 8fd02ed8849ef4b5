"""Random erasing on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.image.erasing import Erase, Patch
from penstock.image.on_device.framing import Size, offsets_of
from penstock.image.on_device.parameters import Arrays
from penstock.keyed import Key, Keyed


@dataclass(frozen=True)
class EraseStage:
    """Random erasing."""

    operation: Erase
    keyed: Keyed
    frames: bool = field(default=False, init=False)

    def draw_one(self, key: Key, size: Size) -> Patch | None:
        return self.operation.draw(self.keyed.at(key), (*size, 3))

    def pack(self, drawn: Sequence[Patch | None], sizes: Sequence[Size]) -> dict[str, NDArray[Any]]:
        fill = self.operation._fill or (0.0,)
        levels = np.array(fill if len(fill) == 3 else fill * 3).astype(np.uint8)
        patches = [(0, 0, 0, 0) if one is None else one[:4] for one in drawn]
        noise = [one.noise for one in drawn if one is not None and one.noise is not None]
        patch = np.array(patches, np.int32).reshape(len(drawn), 4)
        out = np.array(sizes, np.int64).reshape(len(sizes), 2)
        return {
            "patch": patch,
            "fill": levels,
            "start": offsets_of(patch[:, 2:].astype(np.int64)),
            "noise": np.concatenate([n.reshape(-1) for n in noise])
            if noise
            else np.zeros(0, np.uint8),
            "out": np.concatenate([offsets_of(out)[:, None], out], axis=1),
        }

    def run(self, backend: Any, pictures: Any, arrays: Arrays, host: Arrays, final: Any) -> Any:
        return backend.erase(pictures, arrays, host, final)
