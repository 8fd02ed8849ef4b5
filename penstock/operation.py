"""What an operation is: it states its output, chooses its parameters once, and applies them.

Choosing is apart from applying so that the same choice can be applied on a CPU or on a device,
one sample at a time or fused with its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import PipelineError, SourceError


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What is known of an array before it exists; a dimension of ``None`` is known only later."""

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, shape: tuple[int | None, ...], dtype: DTypeLike) -> ArraySpec:
        return cls(tuple(shape), np.dtype(dtype))

    @property
    def known(self) -> bool:
        return None not in self.shape


@dataclass(frozen=True, slots=True)
class BytesSpec:
    """Encoded bytes: a file's content."""


Spec = ArraySpec | BytesSpec | None
"""What is known of a field: ``None`` is nothing."""

LEVELS = 256
"""As how many different values a number is counted that may be any in a range, such as a factor of
brightness: finer steps are lost in pixels of 256 levels."""

_MOST_OUTCOMES = 1e300


def fits(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a result of this shape and type can be written into ``out``."""
    return (
        out is not None
        and out.shape == shape
        and out.dtype == dtype
        and out.flags.c_contiguous
        and out.flags.writeable
    )


class Operation:
    """One step of preparation. Implementations are frozen dataclasses.

    An operation that is not ``random`` gets ``None`` for parameters. ``field`` is what the
    operation looks for in a sample that is a dict; in a tuple it takes the first field. One that
    ``holds_gil`` spends its time in many short steps, and runs in processes if nobody says else.
    """

    random: ClassVar[bool] = False
    field: ClassVar[str] = "image"
    holds_gil: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What users call it: the name of the class, as they write it."""
        out = "".join("_" + c.lower() if c.isupper() else c for c in type(self).__name__)
        return out.lstrip("_")

    def output(self, spec: Spec) -> Spec:
        """What comes out, given what goes in. Raises PipelineError where that cannot work."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        """Choose the parameters for one sample of this shape."""
        return None

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """How many different results it may have for one sample of this shape.

        ``None`` is unknown: nobody counted, or it depends on a shape that is not known. Results are
        counted by what is drawn, each as one, however likely; a number from a range as ``LEVELS``.
        """
        return None if self.random else 1.0

    def apply(self, value: Any, params: Any) -> Any:
        """Do it. Never changes ``value``."""
        raise NotImplementedError

    def apply_to(self, value: Any, params: Any, out: NDArray[Any] | None) -> Any:
        """Do it, and put the result into ``out`` where that is one of its shape and type.

        An operation that can spare a copy this way does; what is returned holds the result.
        """
        return self.apply(value, params)


def counted(outcomes: int) -> float:
    """A number of outcomes as ``Operation.outcomes`` gives it; above 1e300 they are not told apart.

    >>> counted(23**2), counted(23**1000)
    (529.0, 1e+300)
    """
    return float(min(outcomes, _MOST_OUTCOMES))


def file_bytes(value: Any, kind: str) -> memoryview:
    """The bytes of a file in one contiguous piece, without a copy where they are that already.

    ``kind`` is what ``decode`` reads: ``"image"`` or ``"audio"``.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype != np.uint8:
            raise SourceError(
                f"decode got an array of shape {value.shape} and {value.dtype}, and works on the "
                f"bytes of an {kind} file. If samples are decoded already, leave it out."
            )
        value = np.ascontiguousarray(value)
    elif not isinstance(value, (bytes, bytearray, memoryview)):
        raise SourceError(
            f"decode got {type(value).__name__}, and works on the bytes of an {kind} file. Read "
            "the file in the source, or convert the value with a map above decode()."
        )
    data = memoryview(value)
    if not data.c_contiguous:
        data = memoryview(data.tobytes())
    if data.format != "B" or data.ndim != 1:
        data = data.cast("B")
    if not data.nbytes:
        raise SourceError(
            "decode got 0 bytes: the file is empty. Copy it again from its origin, or leave it out."
        )
    return data


def need_array(name: str, spec: Spec, *, ndim: int = 3) -> ArraySpec | None:
    """The spec of an array an operation can work on, ``None`` if nothing is known of it."""
    if isinstance(spec, BytesSpec):
        raise PipelineError(
            f"{name} got encoded bytes, and works on decoded images. Put decode() above it."
        )
    if spec is not None and len(spec.shape) != ndim:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}, and works on arrays of {ndim} dimensions "
            "(height, width, channels)."
        )
    return spec
