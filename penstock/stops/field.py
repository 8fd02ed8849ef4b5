"""Finds the field of a sample that a stop works on, and replaces its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from penstock.errors import PipelineError
from penstock.tree import is_namedtuple

On = str | int | None
"""A field: its name in a dict or named tuple, or its position in a tuple or list."""


def works_on(on: On, default: str, field: str | int | None) -> bool:
    """Whether a stop with these settings works on this field of a sample; ``None``: the sample.

    ``default``: the field that it works on in dicts if ``on`` is ``None``.
    """
    if isinstance(field, str):
        return (default if on is None else on) == field
    return on is None or on == 0


class Field:
    """The field that the stop ``name`` works on.

    If ``on`` is ``None``, it is the first of a tuple or list, or the one named ``field``.
    """

    def __init__(self, name: str, on: On, field: str) -> None:
        self.name = name
        self.on = on
        self.field = field

    def replace(self, sample: Any, call: Callable[[Any, Any], Any], key: Any) -> Any:
        """The sample with ``call(value, key)`` in place of the field's value."""
        on = self.on
        if type(sample) is tuple:
            if on is None or on == 0:
                return (call(sample[0], key), *sample[1:])
            if isinstance(on, int) and -len(sample) <= on < len(sample):
                on %= len(sample)
                return (*sample[:on], call(sample[on], key), *sample[on + 1 :])
            no_field(self.name, on, list(range(len(sample))))
        if isinstance(sample, Mapping):
            on = self.field if on is None else on
            if on not in sample:
                no_field(self.name, on, list(sample))
            new = dict(sample)
            new[on] = call(sample[on], key)
            return new
        if is_namedtuple(sample):
            names = sample._fields
            if on is None:
                on = self.field if self.field in names else names[0]
            on = names[on] if isinstance(on, int) else on
            if on not in names:
                no_field(self.name, on, list(names))
            return sample._replace(**{on: call(getattr(sample, on), key)})
        if isinstance(sample, list) and (on is None or isinstance(on, int)):
            new_list = list(sample)
            new_list[on or 0] = call(sample[on or 0], key)
            return new_list
        if on is not None:
            positions = list(range(len(sample))) if isinstance(sample, list) else []
            no_field(self.name, on, positions)
        return call(sample, key)


def no_field(name: str, wanted: str | int | None, fields: list[Any]) -> NoReturn:
    """Raise the error for a stop that does not find its field. ``fields``: those of the sample."""
    if fields:
        raise PipelineError(
            f"{name} looks for field {wanted!r}, and the sample has the fields {fields}. Name the "
            f"field it works on: map(..., on={fields[0]!r})."
        )
    raise PipelineError(
        f"{name} looks for field {wanted!r}, and the sample is a single value, without fields. "
        "Leave on= out."
    )
