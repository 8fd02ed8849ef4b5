"""How a sample is kept: as it is, or smaller."""

from __future__ import annotations

from typing import Any

from penstock.errors import PipelineError
from penstock.packing import pack, unpack
from penstock.store.value import Buffer, Value

DEFAULT = "raw"


class Encoding:
    """Turns samples into bytes and back."""

    def __init__(self, name: str) -> None:
        if name != "raw":
            raise PipelineError(f'encode is {name!r}; give "raw".')
        self.name = name

    def encode(self, sample: Any) -> Value:
        return pack(sample).tobytes()

    def decode(self, data: Buffer) -> Any:
        return unpack(bytearray(data))
