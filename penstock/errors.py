"""Every exception Penstock raises on purpose.

::

    PenstockError
    ├── PipelineError (ValueError)      the pipeline or an argument is wrong, found when built
    │   └── FingerprintError            a callable or object has no stable fingerprint
    ├── SourceError                     the data is missing or cannot be read
    ├── SampleError                     one sample failed; has its name, the stage and the cause
    │   ├── ShapeError                  it does not have the shape of the others of its batch
    │   └── DeadlySampleError           it killed, or hung, its worker twice
    ├── WorkerError                     a worker could not start, died or hangs
    ├── SlotError                       the loop keeps more batches than the memory budget allows
    ├── StoreError                      a store cannot be opened
    ├── ClusterError                    machines cannot work together: secrets, versions
    ├── ReportError (ValueError)        an analysis is impossible, or its report cannot be read
    ├── StateError (ValueError)         a checkpoint does not belong to this loader
    └── MissingExtraError (ImportError) an optional package is not installed
"""

from __future__ import annotations

from typing import Literal


class PenstockError(Exception):
    """The root of all errors that Penstock raises on purpose."""


ErrorCode = Literal[
    "random-above-cache",
    "echo-with-sampler",
    "nothing-random-below-refurbish",
    "no-transforms",
    "iterable-dataset",
]
"""Identifies errors that callers react to; messages may be reworded at any time."""


class PipelineError(PenstockError, ValueError):
    """The pipeline or an argument is wrong. Raised when the pipeline or loader is made.

    ``code`` identifies the errors that other code reacts to; ``None`` for all others.
    """

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_pipeline_error, (type(self), str(self), self.code)


def _rebuild_pipeline_error(
    cls: type[PipelineError], message: str, code: ErrorCode | None
) -> PipelineError:
    return cls(message, code=code)


class FingerprintError(PipelineError):
    """A callable or object that has no fingerprint that is the same in every process."""


class SourceError(PenstockError):
    """The data is missing or cannot be read."""


class SampleError(PenstockError):
    """A sample failed.

    - ``index``: its position in the source; -1 if unknown.
    - ``name``: its name for users, such as a path or a row of a file.
    - ``stage``: the stage that failed.
    - ``details``: the traceback in the worker.
    """

    def __init__(
        self, message: str, *, index: int = -1, name: str = "", stage: str = "", details: str = ""
    ) -> None:
        super().__init__(message)
        self.index = index
        self.name = name
        self.stage = stage
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle as cls(*args), which keyword-only arguments do not survive.
        return _rebuild_sample_error, (
            type(self),
            str(self),
            self.index,
            self.name,
            self.stage,
            self.details,
        )


def _rebuild_sample_error(
    cls: type[SampleError], message: str, index: int, name: str, stage: str, details: str
) -> SampleError:
    return cls(message, index=index, name=name, stage=stage, details=details)


class ShapeError(SampleError):
    """A sample does not have the shape of the others of its batch."""


class DeadlySampleError(SampleError, RuntimeError):
    """A sample killed, or hung, the worker that prepared it, twice.

    It is a ``RuntimeError`` too, as torch raises for a worker that was killed or timed out.
    """


class WorkerError(PenstockError, RuntimeError):
    """A worker could not start, died or hangs."""


class SlotError(PenstockError):
    """The training loop keeps more batches than the memory budget allows."""


class StoreError(PenstockError):
    """A store cannot be opened."""


class ClusterError(PenstockError):
    """Machines cannot work together: their secrets, certificates or versions do not fit."""


class ReportError(PenstockError, ValueError):
    """An analysis is impossible, or its report cannot be read."""


class StateError(PenstockError, ValueError):
    """A checkpoint does not belong to this loader."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""

    @classmethod
    def of(cls, what: str, needs: str, extra: str) -> MissingExtraError:
        """The error for a feature (``what``) that needs a package from an extra."""
        return cls(f'{what} needs {needs}: pip install "penstock[{extra}]"')
