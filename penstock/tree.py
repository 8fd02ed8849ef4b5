"""Samples as trees: nested tuples, lists and dicts, separated from their leaves.

A skeleton is a sample with each leaf replaced by its number. It can be filled with other leaves:
arrays of a whole batch, tensors, specs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a sample, and its skeleton.

    >>> flatten(("a", {"x": 1, "y": [2, 3]}))
    (['a', 1, 2, 3], (0, {'x': 1, 'y': [2, 3]}))
    """
    leaves: list[Any] = []
    return leaves, _number(value, leaves)


# A module-level function, not a recursive closure: a closure that refers to itself is a reference
# cycle, and would keep the leaves, and the shared memory behind them, until the garbage collector
# runs.


def _number(node: Any, leaves: list[Any]) -> Any:
    if isinstance(node, Mapping):
        return remake(node, {key: _number(child, leaves) for key, child in node.items()})
    if isinstance(node, (tuple, list)):
        return remake(node, [_number(child, leaves) for child in node])
    leaves.append(node)
    return len(leaves) - 1


def fill(skeleton: Any, leaves: Sequence[Any], as_tuple: Callable[[Any], Any] = tuple) -> Any:
    """A tree with this skeleton and these leaves. ``as_tuple`` makes its plain tuples.

    >>> fill((0, {"x": 1}), ["a", "b"], as_tuple=list)
    ['a', {'x': 'b'}]
    """
    if isinstance(skeleton, int):
        return leaves[skeleton]
    if type(skeleton) is tuple:
        return as_tuple([fill(child, leaves, as_tuple) for child in skeleton])
    if isinstance(skeleton, Mapping):
        children = {key: fill(child, leaves, as_tuple) for key, child in skeleton.items()}
        return remake(skeleton, children)
    return remake(skeleton, [fill(child, leaves, as_tuple) for child in skeleton])


def each_leaf(value: Any, function: Callable[[Any], Any]) -> Any:
    """The batch with ``function`` applied to each leaf. Containers keep their class if they can.

    >>> each_leaf({"x": (1, [2])}, lambda leaf: -leaf)
    {'x': (-1, [-2])}
    """
    if isinstance(value, Mapping):
        children = {key: each_leaf(child, function) for key, child in value.items()}
        return children if type(value) is dict else same_mapping(value, children)
    if isinstance(value, (tuple, list)):
        return remake(value, [each_leaf(child, function) for child in value])
    return function(value)


def same_mapping(like: Any, children: dict[Any, Any]) -> Any:
    """A mapping of the same class, or a plain dict if that cannot be made."""
    with suppress(TypeError):
        return type(like)(children)
    with suppress(TypeError):
        made = copy.copy(like)  # of a defaultdict
        made.update(children)
        return made
    return children


def leaves_like(value: Any, skeleton: Any) -> list[Any]:
    """The leaves of a sample with this skeleton; ValueError if its structure differs."""
    if isinstance(skeleton, int):
        if isinstance(value, (tuple, list, Mapping)):
            raise ValueError(f"a {type(value).__name__} instead of a single value")
        return [value]
    leaves: list[Any] = []
    if isinstance(skeleton, Mapping):
        if not isinstance(value, Mapping) or value.keys() != skeleton.keys():
            keys = f" of {sorted(map(str, value))}" if isinstance(value, Mapping) else ""
            raise ValueError(
                f"a {type(value).__name__}{keys} instead of a dict of {sorted(map(str, skeleton))}"
            )
        for key, child in skeleton.items():
            if isinstance(child, int):
                leaves.append(value[key])
            else:
                leaves.extend(leaves_like(value[key], child))
        return leaves
    if not isinstance(value, (tuple, list)) or len(value) != len(skeleton):
        size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise ValueError(
            f"a {type(value).__name__}{size} instead of a {type(skeleton).__name__} "
            f"of {len(skeleton)}"
        )
    for item, child in zip(value, skeleton, strict=True):
        if isinstance(child, int):
            leaves.append(item)
        else:
            leaves.extend(leaves_like(item, child))
    return leaves


def remake(like: Any, children: Any) -> Any:
    """A container of the same type; a plain dict or list if that type cannot be made so."""
    kind = type(like)
    if kind in (dict, list):
        return children
    if is_namedtuple(like):
        return kind(*children)
    if isinstance(like, Mapping):
        return same_mapping(like, children)
    with suppress(TypeError):
        if isinstance(like, list):
            made = copy.copy(like)  # with the attributes of a class of the user
            made[:] = children
            return made
        return kind(children)
    return children


_PLAIN_WHEN_STACKED = "torchvision.tv_tensors"
"""Classes of tensors of which torch makes plain tensors where it stacks them."""


def as_array(value: Any) -> NDArray[Any] | None:
    """An array, a number or a CPU tensor as an array, without a copy; ``None`` for other values."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value
    if isinstance(value, (int, float, complex, np.generic)):
        array = np.asarray(value)
        return None if array.dtype.hasobject else array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        kind = type(value)
        if kind is not torch.Tensor and not kind.__module__.startswith(_PLAIN_WHEN_STACKED):
            return None  # an array would lose the class
        try:
            return np.asarray(value.numpy())
        except (TypeError, RuntimeError):  # bfloat16, sparse, on a device, requires grad
            return None
    return None
