"""The error of a sample that failed, as an exception of both kinds: Penstock's and the dataset's.

torch raises the type that the dataset raised, and scripts catch that type around their loops.
"""

from __future__ import annotations

import contextlib
from typing import Any

from penstock.errors import PenstockError, SampleError


def of_both_kinds(error: SampleError) -> SampleError:
    """The error as a subclass of its own class and of its cause's; itself if there can be none."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, (PenstockError, StopIteration)):
        return error
    both = _new(type(error), cause)
    if both is None:
        return error
    for name, value in cause.__dict__.items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(both, name, value)
    for name in ("errno", "strerror", "filename", "filename2"):  # not in __dict__ of an OSError
        if isinstance(cause, OSError):
            setattr(both, name, getattr(cause, name))
    both.__dict__.update(error.__dict__)
    both.args = error.args
    return both.with_traceback(error.__traceback__)


def _new(own: Any, cause: Exception) -> SampleError | None:
    """An instance of a class that is both, without attributes; ``None`` if there can be none."""
    other = type(cause)
    if issubclass(own, other):
        return None
    # A MemoryError can only be made of a class that has it first.
    for bases in ((own, other), (other, own)):
        kind: Any = _both(own, bases)
        if kind is None:
            continue
        # An exception group, or a class of the user, may take arguments.
        for args in ((), cause.args):
            with contextlib.suppress(Exception):
                made: SampleError = kind.__new__(kind, *args)
                return made
    return None


def _both(own: Any, bases: tuple[Any, Any]) -> Any:
    """A class with these bases; ``None`` if their layouts cannot be joined."""

    def text(self: Any) -> str:
        return str(self.args[0]) if self.args else ""

    def plain(self: SampleError) -> Any:
        return own.__reduce__(_as(self, own))

    members = {"__module__": own.__module__, "__str__": text, "__reduce__": plain}
    try:
        return type(own.__name__, bases, members)
    except TypeError:
        return None


def _as(error: SampleError, own: type[SampleError]) -> SampleError:
    """The same error as an instance of Penstock's class alone, which can be pickled."""
    plain = own.__new__(own)
    plain.__dict__.update(error.__dict__)
    plain.args = error.args
    return plain
