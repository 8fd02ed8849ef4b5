"""Fingerprints of functions, methods, classes and modules.

A user's own code is identified by its bytecode, not by its text: the text of a file edited while
the process runs, or of a notebook cell seen from a worker, does not match the code. Functions that
it calls count as well, if they are the user's own. Installed code is identified by its name and the
version of its package.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath
from typing import Any

from penstock.fingerprint.values import content
from penstock.fingerprint.walk import Emitter, RefusalError, Walk, choosers, exact, once

_HEAP_TYPE = 1 << 9
_BOUND = (types.MethodType, types.BuiltinMethodType)
_C_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


def installed(module: str | None) -> bool:
    """Whether a module belongs to Python or to an installed package, which has a version."""
    top = _top(module)
    if top == "penstock" or top in sys.stdlib_module_names:
        return True
    place = getattr(sys.modules.get(module or ""), "__file__", None)
    return isinstance(place, str) and not {"site-packages", "dist-packages"}.isdisjoint(
        PurePath(place).parts
    )


def emit_name(walk: Walk, tag: str, module: str | None, qualname: str) -> None:
    """Add an installed object: its name and the version of its package."""
    top = _top(module)
    version = "" if top in sys.stdlib_module_names else _version(top)
    walk.emit(tag, module or "", qualname, version)


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


@functools.cache
def _version(package: str) -> str:
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    from importlib import metadata  # imported here, because that takes 25 ms

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def _importable(module: str | None, qualname: str, obj: object) -> bool:
    found: object = sys.modules.get(module or "")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    # Every access creates a new bound method; bound methods compare by the object they belong to.
    return found is obj or (isinstance(obj, _BOUND) and type(found) is type(obj) and found == obj)


def _code(walk: Walk, code: types.CodeType) -> None:
    walk.emit(
        "code",
        code.co_name,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_code,
        getattr(code, "co_exceptiontable", b""),
    )
    for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        walk.add(names)
    walk.add(code.co_consts)


def _global_names(code: types.CodeType) -> set[tuple[str, ...]]:
    """The globals that code reads, each with its attribute accesses: ``("np", "array")``."""
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, step.argval)
        elif step.opname != "EXTENDED_ARG":
            found.add(chain)
            chain = (step.argval,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _global_names(const)
    return found - {()}


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    scope = function.__globals__
    found: dict[str, Any] = {}
    for first, *rest in _global_names(function.__code__):
        if first not in scope:
            continue
        name, value = first, scope[first]
        # Of a module of the user only the attribute that is read counts: helpers.resize, not
        # helpers.
        while rest and isinstance(value, types.ModuleType) and not installed(value.__name__):
            name = f"{name}.{rest[0]}"
            value = getattr(value, rest.pop(0), None)
        found[name] = value
    yield from sorted(found.items(), key=lambda item: item[0])


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the cell is still empty
            yield name, NotImplemented


def _function(walk: Walk, obj: types.FunctionType) -> None:
    # Decorators copy the name and module of a function to its wrapper, but not its globals.
    home = obj.__globals__.get("__name__")
    if installed(home) and _importable(obj.__module__, obj.__qualname__, obj):
        emit_name(walk, "function", obj.__module__, obj.__qualname__)
        return
    code = obj.__code__
    place = f"{obj.__qualname__} in {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    walk.emit("function", obj.__module__ or "", obj.__qualname__)
    _code(walk, code)
    defaults = obj.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    walk.add_named(f"default of {{}} of {place}", zip(names, defaults, strict=True))
    walk.add_named(f"default of {{}} of {place}", sorted((obj.__kwdefaults__ or {}).items()))
    walk.add_named(f"closure variable {{}} of {place}", _closure(obj))
    own = {name: value for name, value in vars(obj).items() if name != "__wrapped__"}
    walk.add_named(f"attribute {{}} of {place}", sorted(own.items()))
    if not installed(home):
        walk.add_named(f"global variable {{}} of {place}", _globals(obj))


def _method(walk: Walk, obj: Any) -> None:
    owner = obj.__self__
    module = getattr(obj, "__module__", None) or type(owner).__module__
    if isinstance(owner, types.ModuleType):
        emit_name(walk, "function", owner.__name__, obj.__name__)
    elif owner is None or (installed(module) and _importable(module, obj.__name__, obj)):
        # Functions such as random.randint are methods of a hidden instance: the name is enough.
        emit_name(walk, "function", module, obj.__qualname__ if owner is None else obj.__name__)
    else:
        walk.emit("method", obj.__name__)
        if isinstance(obj, types.MethodType):
            walk.add(obj.__func__)
        try:
            walk.add(owner)
        except RefusalError as refused:
            raise refused.at(f"owner of method {obj.__qualname__}") from refused.__cause__


def _class(walk: Walk, cls: type) -> None:
    if _by_name(cls):
        emit_name(walk, "class", cls.__module__, cls.__qualname__)
        return
    walk.emit("class", cls.__module__, cls.__qualname__)
    walk.add(type(cls))
    walk.add(cls.__bases__)
    members = [(name, _member(value)) for name, value in sorted(vars(cls).items())]
    if issubclass(cls, Enum):
        members = [(name, value) for name, (code, value) in members if code]
        members += [(name, member.value) for name, member in cls.__members__.items()]
    else:
        members = [
            (name, value) for name, (code, value) in members if code or _is_data(name, value)
        ]
    walk.add_named(f"class attribute {{}} of {cls.__qualname__}", members)


def _member(value: Any) -> tuple[bool, Any]:
    """Whether a member of a class is code, and the part of it to hash."""
    if isinstance(value, (staticmethod, classmethod)):
        return True, (type(value).__name__, value.__func__)
    if isinstance(value, property):
        return True, ("property", value.fget, value.fset, value.fdel)
    if isinstance(value, functools.cached_property):
        return True, ("cached_property", value.func)
    return isinstance(value, types.FunctionType), value


def _is_data(name: str, value: object) -> bool:
    """Whether a member is data. Dunder names that are not code (``__doc__``, ``__slots__``) do not
    change what the class does."""
    dunder = name.startswith("__") and name.endswith("__")
    return not (dunder or name == "_abc_impl" or isinstance(value, _C_DESCRIPTORS))


def _by_name(cls: type) -> bool:
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    if not installed(cls.__module__) or "<" in cls.__qualname__:
        return False
    # Classes made at run time (make_dataclass, exec) may have the name of a standard module.
    stdlib = _top(cls.__module__) in sys.stdlib_module_names
    return not stdlib or _importable(cls.__module__, cls.__qualname__, cls)


def _module(walk: Walk, obj: types.ModuleType) -> None:
    emit_name(walk, "module", obj.__name__, str(getattr(obj, "__version__", "")))
    file = getattr(obj, "__file__", None)
    if file and not installed(obj.__name__):
        try:
            with open(file, "rb") as text:
                walk.emit("text", content(text.read()))
        except OSError as error:
            raise RefusalError(
                f"module {obj.__name__}, whose file cannot be read ({error})"
            ) from error


def _descriptor(walk: Walk, obj: Any) -> None:
    walk.emit("descriptor", obj.__name__)
    walk.add(obj.__objclass__)


def _partial(walk: Walk, obj: Any) -> None:
    walk.emit("partial")
    parts = [("func", obj.func), ("args", obj.args), ("keywords", obj.keywords)]
    walk.add_named("{} of a partial", parts)
    walk.add(vars(obj))


def _memoised(walk: Walk, obj: Any) -> None:
    walk.emit("lru_cache")
    walk.add(obj.__wrapped__)


def _choose(obj: Any) -> Emitter | None:
    if isinstance(obj, type):
        return _class
    return _module if isinstance(obj, types.ModuleType) else None


def register_code() -> None:
    exact.update(
        {
            types.FunctionType: _function,
            types.CodeType: _code,
            types.MethodType: _method,
            types.BuiltinMethodType: _method,
            types.MethodWrapperType: _method,
            functools.partial: _partial,
            functools._lru_cache_wrapper: _memoised,
        }
    )
    exact.update(dict.fromkeys(_C_DESCRIPTORS, _descriptor))
    choosers.append(_choose)
    once.update({_function, _class})
