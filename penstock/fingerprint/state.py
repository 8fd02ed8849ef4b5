"""Fingerprints of instances: their class and their state, as pickle would save it."""

from __future__ import annotations

import copyreg
import dataclasses
import io
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import FingerprintError
from penstock.fingerprint.code import emit_name, installed
from penstock.fingerprint.values import of_torch
from penstock.fingerprint.walk import Emitter, RefusalError, Walk, a, choosers, once

_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)


def _declared(walk: Walk, obj: Any) -> None:
    cls = type(obj)
    declared = obj.__fingerprint__()
    if not isinstance(declared, str):
        raise FingerprintError(
            f"{cls.__qualname__}.__fingerprint__() returned {declared!r}; it must return a str."
        )
    walk.emit("declared", cls.__module__, cls.__qualname__, declared)


def _instance(walk: Walk, obj: Any) -> None:
    cls = type(obj)
    _refuse_unstable(obj)
    try:
        reduce = copyreg.dispatch_table.get(cls)
        reduced = reduce(obj) if reduce is not None else obj.__reduce_ex__(4)
    except Exception as error:
        raise RefusalError(f"{a(cls.__name__)}, whose state cannot be read ({error})") from error
    if isinstance(reduced, str):
        emit_name(walk, "global", getattr(obj, "__module__", None) or cls.__module__, reduced)
        return
    parts: tuple[Any, ...] = tuple(reduced) + (None,) * 4  # the last ones are optional
    make, args, state, items, pairs = parts[:5]
    walk.emit("instance")
    walk.add(cls)
    if make in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
        args = args[1:]
    else:
        walk.add(make)
    walk.add(args)
    walk.add(None if items is None else list(items))
    pairs = None if pairs is None else list(pairs)
    walk.add(pairs if pairs is None or isinstance(obj, OrderedDict) else dict(pairs))
    _state(walk, cls, state)


def _state(walk: Walk, cls: type, state: Any) -> None:
    if isinstance(state, list) and dataclasses.is_dataclass(cls):
        # A frozen dataclass with slots saves its values only. With the names of its attributes an
        # error can say which one it is about.
        names = [field.name for field in dataclasses.fields(cls)]
        state = dict(zip(names, state, strict=False)) if len(names) == len(state) else state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    walk.emit("state", len(parts))
    for part in parts:
        if type(part) is dict and all(type(name) is str for name in part):
            walk.emit("attributes", len(part))
            walk.add_named(f"attribute {{}} of {a(cls.__qualname__)}", sorted(part.items()))
        else:
            walk.add(part)


def _refuse_unstable(obj: object) -> None:
    name = type(obj).__name__
    if isinstance(obj, io.IOBase):
        raise RefusalError(f"an open file ({name}), which exists in this process only")
    if isinstance(obj, Iterator) and installed(type(obj).__module__):
        raise RefusalError(f"{a(name)}, an iterator, which is used up as it is read")
    generators = (*_GENERATORS, *filter(None, [of_torch("Generator")]))
    if isinstance(obj, generators):
        raise RefusalError(f"a random generator ({name}), whose state changes with every use")


def _choose(obj: Any) -> Emitter | None:
    return _declared if hasattr(type(obj), "__fingerprint__") else _instance


def register_state() -> None:
    choosers.append(_choose)
    once.add(_instance)
