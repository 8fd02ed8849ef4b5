"""Every exception Penstock raises on purpose.

::

    PenstockError
    ├── PipelineError (ValueError)      the pipeline or an argument is wrong, found when built
    │   └── FingerprintError            something cannot be identified stably
    ├── SourceError                     the data is not there, or cannot be read
    ├── SampleError                     one sample failed: names it, the stage and the cause
    │   ├── ShapeError                  it does not fit beside the others of its batch
    │   └── DeadlySampleError           it killed, or hung, its worker twice
    ├── WorkerError                     a worker could not be started or kept alive
    ├── SlotError                       the loop keeps more batches than the memory budget allows
    ├── StoreError                      a store cannot be opened
    ├── ReportError (ValueError)        an analysis cannot be made, or its report not read
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
"""Errors that callers tell apart by code; messages may be reworded at any time."""


class PipelineError(PenstockError, ValueError):
    """A pipeline, or an argument of one, that cannot work. Raised when it is built.

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
    """A callable or object that cannot be identified in the same way in every process."""


class SourceError(PenstockError):
    """Data that is not there or cannot be read."""


class SampleError(PenstockError):
    """A sample that failed.

    ``index`` is its place in the source, ``name`` what a person would call it (a path, a row),
    ``stage`` the stop that failed and ``details`` the traceback from wherever it ran.
    """

    def __init__(
        self, message: str, *, index: int, name: str = "", stage: str = "", details: str = ""
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
    """A sample that does not fit beside the others of its batch."""


class DeadlySampleError(SampleError):
    """A sample that killed, or hung, the worker that prepared it, twice."""


class WorkerError(PenstockError):
    """A worker that could not be started or kept alive."""


class SlotError(PenstockError):
    """The loop keeps more batches than the memory budget allows."""


class StoreError(PenstockError):
    """A store that cannot be opened."""


class ReportError(PenstockError, ValueError):
    """An analysis that cannot be made, or a report of one that cannot be read."""


class StateError(PenstockError, ValueError):
    """A checkpoint that does not belong to this loader."""


class MissingExtraError(PenstockError, ImportError):
    """An optional package that is not installed; the message has the command that installs it."""

    @classmethod
    def of(cls, what: str, needs: str, extra: str) -> MissingExtraError:
        return cls(f'{what} needs {needs}: pip install "penstock[{extra}]"')
