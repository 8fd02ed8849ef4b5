"""Operations: each states its output, draws the parameters of a sample, and applies them.

Drawing is separate from applying, so that the same parameters can be applied on a CPU or on a
device, by the operation alone or fused with its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.errors import PipelineError, SourceError


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and type of an array, known before it exists. ``None``: an unknown dimension."""

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
    """Encoded bytes: the content of a file."""


Spec = ArraySpec | BytesSpec | None
"""The known type of a field; ``None`` if nothing is known."""

LEVELS = 256
"""The number of outcomes that a number from a continuous range counts as, such as a factor of
brightness. Finer steps are lost in pixels of 256 levels."""

STEPS = 7
"""The number of visibly different outcomes that a range of positions or strengths counts as, at
most. So a crop, moved down and across, and a flip together have 7 x 7 x 2 = 98, the number in the
Revamper paper, whose limit of 0.4 for the strength of the final part belongs to such counts."""

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
    """One step of sample preparation. Implementations are frozen dataclasses.

    ``random``: parameters are drawn for each sample; without it they are ``None``. ``field``: the
    key that the operation works on in samples that are dicts; in tuples it works on the first
    field. ``holds_gil``: the operation runs many short Python steps, so by default a pipeline with
    it runs in processes.
    """

    random: ClassVar[bool] = False
    field: ClassVar[str] = "image"
    holds_gil: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name users write: the class name in snake case."""
        out = "".join("_" + c.lower() if c.isupper() else c for c in type(self).__name__)
        return out.lstrip("_")

    def output(self, spec: Spec) -> Spec:
        """The spec of the result for an input spec. Raises PipelineError for a wrong input."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        """Draw the parameters for one sample of this shape."""
        return None

    def outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """The number of different results for one sample of this shape.

        ``None`` if unknown: the operation does not count, or needs the shape and it is not known.
        All parameters that can be drawn count, however unlikely. A number from a continuous range
        counts as ``LEVELS``.
        """
        return None if self.random else 1.0

    def visible_outcomes(self, shape: tuple[int, ...] | None) -> float | None:
        """Like ``outcomes``, but results that hardly differ count once.

        A box that moves by a pixel is another outcome, but the same to a network. So a range of
        positions or strengths counts as ``STEPS`` at most.
        """
        return self.outcomes(shape)

    def apply(self, value: Any, params: Any) -> Any:
        """Apply the operation with these parameters. Never modifies ``value``."""
        raise NotImplementedError

    def arithmetic(self) -> str | None:
        """Part of its fingerprint where this machine computes other bits than most do."""
        return None

    def kernel_work(self, key: bytes) -> Any:
        """The operation as a ``KernelWork``; ``None`` if the compiled kernel cannot run it alone.

        ``key``: that of its random numbers; see ``Keyed.key``.
        """
        return None

    def apply_to(self, value: Any, params: Any, out: NDArray[Any] | None) -> Any:
        """Like ``apply``, but may write the result into ``out`` if its shape and type fit.

        Operations override it to save a copy. Always use the returned value.
        """
        return self.apply(value, params)


def counted(outcomes: int) -> float:
    """A number of outcomes for ``Operation.outcomes``, capped at 1e300.

    >>> counted(23**2), counted(23**1000)
    (529.0, 1e+300)
    """
    return float(min(outcomes, _MOST_OUTCOMES))


def at_most(outcomes: float | None, ranges: int, more: int = 0) -> float | None:
    """A number of outcomes, of which ``ranges`` ranges are visible in ``STEPS`` steps each.

    ``more``: outcomes beside them.

    >>> at_most(1e9, ranges=2), at_most(4.0, ranges=2), at_most(None, ranges=2)
    (49.0, 4.0, None)
    """
    return None if outcomes is None else min(outcomes, counted(STEPS**ranges + more))


def file_bytes(value: Any, kind: str) -> memoryview:
    """The bytes of a file as one contiguous memoryview, copied only if they are not contiguous.

    ``kind``: what ``decode`` reads, ``"image"`` or ``"audio"``; for error messages.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype != np.uint8:
            raise SourceError(
                f"decode got an array of shape {value.shape} and {value.dtype}; it needs the "
                f"bytes of an {kind} file. If samples are decoded already, leave it out."
            )
        value = np.ascontiguousarray(value)
    elif not isinstance(value, (bytes, bytearray, memoryview)):
        raise SourceError(
            f"decode got {type(value).__name__}; it needs the bytes of an {kind} file. Read "
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
    """Check that a spec is an array of ``ndim`` dimensions; ``None`` if nothing is known of it."""
    if isinstance(spec, BytesSpec):
        raise PipelineError(
            f"{name} got encoded bytes; it needs decoded images. Put decode() above it."
        )
    if spec is not None and len(spec.shape) != ndim:
        raise PipelineError(
            f"{name} got an array of shape {spec.shape}; it needs {ndim} dimensions (height, "
            "width, channels). Reshape it with a map above it."
        )
    return spec
