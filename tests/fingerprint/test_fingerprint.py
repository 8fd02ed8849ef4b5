"""Fingerprints: equal for equal objects, in every process, and different for all others."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib.util
import os
import random
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FingerprintError
from penstock.fingerprint import fingerprint

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equality that also compares types, which == does not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return set(map(repr, a)) == set(map(repr, b)) and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b) if not isinstance(a, set) else a == b


def load(text: str, folder: Path, name: str = "user_code") -> types.ModuleType:
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, str(file), "exec", dont_inherit=True), module.__dict__)
    return module


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Crop:
    height: int
    width: int = 3


class Noise:
    def __init__(self, level: Any) -> None:
        self.level = level


class Slotted:
    __slots__ = ("level", "unset")

    def __init__(self, level: Any) -> None:
        self.level = level


@settings(deadline=None)
@given(plain)
def test_equal_values_have_equal_fingerprints(value: Any) -> None:
    twin = cloudpickle.loads(cloudpickle.dumps(value))
    assert fingerprint(value) == fingerprint(twin)
    assert len(fingerprint(value)) == 32


@settings(deadline=None)
@given(plain, plain)
def test_different_values_have_different_fingerprints(a: Any, b: Any) -> None:
    assert (fingerprint(a) == fingerprint(b)) == same(a, b)


@pytest.mark.parametrize(
    "values",
    [
        [1, True, 1.0, 1 + 0j, "1", b"1", np.int64(1), np.float64(1), np.int32(1), [1], (1,), {1}],
        [0.0, -0.0, 0, False, None, "", b"", [], (), {}, set(), frozenset(), bytearray()],
        [["ab", "c"], ["a", "bc"], ["abc"], "abc", ("ab", "c")],
        [{"a": 1}, {"a": 2}, {"b": 1}, [("a", 1)], collections.OrderedDict(a=1)],
        [range(3), range(4), [0, 1, 2], slice(3), slice(0, 3), slice(None, None, 3)],
        [Path("a"), "a", Path("b")],
        [Colour.RED, Colour.BLUE, Colour, 1],
        [10**30, 10**30 + 1, -(10**30)],
    ],
)
def test_similar_values_have_different_fingerprints(values: list[Any]) -> None:
    assert len({fingerprint(value) for value in values}) == len(values)


def test_the_order_of_dicts_and_sets_does_not_count() -> None:
    names = [f"name {i}" for i in range(50)]
    backwards = names[::-1]
    assert fingerprint(set(names)) == fingerprint(set(backwards))
    assert fingerprint(dict.fromkeys(names)) == fingerprint(dict.fromkeys(backwards))
    assert fingerprint({frozenset("ab"), (1, 2)}) == fingerprint({(1, 2), frozenset("ba")})


@pytest.mark.parametrize("change", [0, 70, 99])
@pytest.mark.parametrize("make", [str, int, float, lambda i: (str(i), i), lambda i: i << 70])
def test_long_lists_notice_a_change_of_any_item(make: Any, change: int) -> None:
    items = [make(i) for i in range(100)]
    changed = [make(-1) if i == change else item for i, item in enumerate(items)]
    swapped = [items[1], items[0], *items[2:]]
    prints = [fingerprint(each) for each in (items, changed, swapped, tuple(items), items[:-1])]
    assert len(set(prints)) == len(prints)
    assert fingerprint(list(items)) == prints[0]


def test_long_lists_of_text_depend_on_where_each_text_ends() -> None:
    assert fingerprint(["ab", "c"] * 50) != fingerprint(["a", "bc"] * 50)


def test_objects_with_cycles_have_fingerprints() -> None:
    def ring(last: int) -> list[Any]:
        out: list[Any] = [1, {"k": [last]}]
        out[1]["k"].append(out)
        return out

    assert fingerprint(ring(2)) == fingerprint(ring(2)) != fingerprint(ring(3))
    one, two = Noise(1), Noise(1)
    one.me = two.me = None  # type: ignore[attr-defined]
    one.me = one  # type: ignore[attr-defined]
    assert fingerprint(one) == fingerprint(one) != fingerprint(two)


def test_objects_that_all_refer_to_each_other_are_hashed_once_each() -> None:
    objects = [Noise(i) for i in range(60)]
    for each in objects:
        each.level = (each.level, list(objects))
    assert fingerprint(objects) == fingerprint(objects)


def test_arrays_count_type_shape_and_content() -> None:
    base = np.arange(6, dtype=np.int32)
    others = [
        base.astype(np.int64),
        base.reshape(2, 3),
        base.reshape(3, 2),
        base[::-1],
        base.astype(object),
        base.astype(">i4"),
        base[:0],
        base.astype("M8[s]"),
    ]
    assert len({fingerprint(array) for array in [base, *others]}) == 9
    assert fingerprint(base) == fingerprint(base.copy())
    wide = np.arange(12, dtype=np.int32)[::2]
    assert fingerprint(wide) == fingerprint(wide.copy())
    assert fingerprint(np.array([1, {"a": 2}], object)) != fingerprint(
        np.array([1, {"a": 3}], object)
    )
    assert fingerprint(np.dtype("f4,i2")) != fingerprint(np.dtype("f4,i4"))


def test_tensors_count_type_shape_and_content() -> None:
    pytest.importorskip("torch.utils")  # a folder named torch has no torch.utils
    import torch

    base = torch.arange(6)
    others = [base.float(), base.bfloat16(), base.reshape(2, 3), base.flip(0), base.numpy()]
    assert len({fingerprint(tensor) for tensor in [base, *others]}) == 6
    assert fingerprint(base) == fingerprint(base.clone())
    assert fingerprint(base.reshape(2, 3).T) == fingerprint(base.reshape(2, 3).T.contiguous())
    assert fingerprint(torch.nn.Linear(2, 2)) != fingerprint(torch.nn.Linear(2, 2))


def test_instances_count_class_and_state() -> None:
    assert fingerprint(Crop(1, 2)) == fingerprint(Crop(1, 2)) != fingerprint(Crop(2, 1))
    assert fingerprint(Noise(1)) == fingerprint(Noise(1)) != fingerprint(Noise(2))
    assert fingerprint(Slotted(1)) == fingerprint(Slotted(1)) != fingerprint(Slotted(2))
    assert fingerprint(Noise(1)) != fingerprint(Slotted(1))
    deque = collections.deque([1, 2])
    assert fingerprint(deque) == fingerprint(collections.deque([1, 2])) != fingerprint([1, 2])


def test_the_state_of_an_instance_is_that_of_getstate() -> None:
    class Lazy:
        def __init__(self, path: str) -> None:
            self.path = path
            self.lock = threading.Lock()

        def __getstate__(self) -> dict[str, str]:
            return {"path": self.path}

    assert fingerprint(Lazy("a")) == fingerprint(Lazy("a")) != fingerprint(Lazy("b"))


def test_a_class_may_define_its_own_fingerprint() -> None:
    class Index(dict):  # type: ignore[type-arg]
        def __init__(self, version: Any) -> None:
            self.version = version
            self.lock = threading.Lock()

        def __fingerprint__(self) -> Any:
            return self.version

    assert fingerprint(Index("v1")) == fingerprint(Index("v1")) != fingerprint(Index("v2"))
    with pytest.raises(FingerprintError, match=r"__fingerprint__\(\) returned 3; it must return"):
        fingerprint(Index(3))


def test_two_lambdas_on_one_line_differ() -> None:
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    add, mul = (lambda x, y: x + y), (lambda x, y: x * y)
    assert len({fingerprint(f) for f in (one, two, add, mul)}) == 4


def test_running_a_function_does_not_change_it() -> None:
    def work(x: int) -> int:
        return sum(i * x for i in range(3))

    before = fingerprint(work)
    for i in range(5000):
        work(i)
    assert fingerprint(work) == before


def test_defaults_closures_and_bound_objects_count() -> None:
    def make(scale: Any, shift: Any = 0) -> Any:
        def apply(x: Any, shift: Any = shift, *, twice: Any = shift) -> Any:
            return x * scale + shift

        return apply

    assert fingerprint(make(1)) == fingerprint(make(1))
    assert len({fingerprint(make(*a)) for a in [(1,), (2,), (1, 1), ("1",)]}) == 4
    assert fingerprint(functools.partial(max, 1)) != fingerprint(functools.partial(max, 2))
    assert fingerprint(functools.partial(max, key=len)) != fingerprint(functools.partial(max))
    assert fingerprint([1].append) != fingerprint([2].append) != fingerprint([2].remove)
    assert fingerprint(Noise(1).__init__) != fingerprint(Noise(2).__init__)  # type: ignore[misc]
    assert fingerprint(functools.cache(make(1))) != fingerprint(functools.cache(make(2)))


def test_builtin_and_installed_code_is_identified_by_name() -> None:
    from random import randint

    things = [len, max, str.upper, np.mean, np.add, os.path.join, random.random, randint, dict]
    prints = [fingerprint(thing) for thing in [*things, os, np, threading.Thread]]
    assert len(set(prints)) == len(prints)


SCRIPT = """
import dataclasses, enum, functools, helper
SIZE = 4
class Kind(enum.Enum):
    A = 1
@dataclasses.dataclass
class Base:
    size: int = 1
    def grow(self): return self.size + 1
class Child(Base):
    kinds = [Kind.A]
    @property
    def double(self): return self.size * 2
    @staticmethod
    def half(x): return x / 2
def inner(x): return x + SIZE
def outer(x):
    def deep(): return inner(x)
    return deep()
def uses_helper(x): return helper.resize(x)
def decorate(f):
    @functools.wraps(f)
    def wrapper(*a): return f(*a)
    return wrapper
@decorate
def wrapped(x): return x - 1
"""

CHANGES = [
    ("SIZE = 4", "SIZE = 5", {"outer", "inner"}),
    ("return x + SIZE", "return x - SIZE", {"outer", "inner"}),
    ("return x - 1", "return x - 2", {"wrapped"}),
    ("return f(*a)", "return f(*a) or 0", {"wrapped"}),
    ("self.size + 1", "self.size + 2", {"Base", "Child"}),
    ("size: int = 1", "size: int = 2", {"Base", "Child"}),
    ("self.size * 2", "self.size * 3", {"Child"}),
    ("x / 2", "x / 4", {"Child"}),
    ("A = 1", "A = 2", {"Child"}),
    ("[Kind.A]", "[Kind.A, 2]", {"Child"}),
    ("SIZE = 4", "# a comment moves the lines\n\nSIZE = 4", set()),
]


@pytest.mark.parametrize(("old", "new", "changed"), CHANGES)
def test_a_change_of_source_changes_all_that_depends_on_it(
    old: str, new: str, changed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = load("def resize(x): return x", tmp_path, "helper")
    monkeypatch.setitem(sys.modules, "helper", helper)
    assert old in SCRIPT
    before = load(SCRIPT, tmp_path)
    after = load(SCRIPT.replace(old, new), tmp_path)
    names = ["outer", "inner", "wrapped", "Base", "Child", "uses_helper"]
    for name in names:
        differs = fingerprint(getattr(before, name)) != fingerprint(getattr(after, name))
        assert differs == (name in changed), name


def test_a_change_in_the_users_own_module_counts_only_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for body in (
        "def resize(x): return x",
        "def resize(x): return x * 2",
        "def resize(x): return x\nY = 1",
    ):
        monkeypatch.setitem(sys.modules, "helper", load(body, tmp_path, "helper"))
        found.append(fingerprint(load(SCRIPT, tmp_path).uses_helper))
    assert found[0] == found[2] != found[1]


def test_functions_sent_by_value_keep_their_fingerprint(tmp_path: Path) -> None:
    text = """
import sys, cloudpickle
from penstock.fingerprint import fingerprint
SCALE = {"a": 3, "b": 4}
class Noise:
    level = 2
    def __call__(self, x): return helper(x) + self.level
def helper(x): return x * SCALE["a"]
values = [Noise(), lambda x: helper(x), Noise]
print(fingerprint(values))
sys.stdout.flush()
open(sys.argv[1], "wb").write(cloudpickle.dumps(values))
"""
    script, pickled = tmp_path / "train.py", tmp_path / "values.pickle"
    script.write_text(text)
    sent = run([str(script), str(pickled)])
    script.unlink()  # as with a notebook, the receiving process has no source text
    got = run(
        [
            "-c",
            "import pickle, sys; from penstock.fingerprint import fingerprint; "
            "print(fingerprint(pickle.load(open(sys.argv[1], 'rb'))))",
            str(pickled),
        ]
    )
    assert sent == got


def run(args: list[str], hash_seed: str = "0") -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_process_computes_the_same_fingerprint(tmp_path: Path) -> None:
    text = """
import dataclasses, enum, functools, pathlib, re, numpy as np
from penstock.fingerprint import fingerprint
class Kind(enum.Enum):
    A = "a"
@dataclasses.dataclass(frozen=True)
class Crop:
    size: int
    names: frozenset = frozenset({"x", "y", "z"})
    def __call__(self, x): return x in {"p", "q", "r"} or self.size
class Plain:
    def __init__(self): self.items = {str(i): {str(j) for j in range(9)} for i in range(9)}
things = [
    {"a", "b", "c", ("d", 1), frozenset("ef")}, {str(i): i for i in range(20)}, np.arange(5.0),
    np.array([{"a", "b"}, None], object), Crop(3), Crop, Plain(), Kind.A, lambda x: x in {"k", "l"},
    functools.partial(Crop(1), 2), Crop(2).__call__, pathlib.Path("a"), re.compile("a"), object(),
    np.float32(2), len, np, max, [object, Plain],
]
things.append(things)
for thing in things: print(fingerprint(thing))
"""
    script = tmp_path / "train.py"
    script.write_text(text)
    found = {run([str(script)], hash_seed) for hash_seed in ("0", "1", "4711")}
    assert len(found) == 1
    lines = found.pop().splitlines()
    assert len(lines) == len(set(lines)) == 20


def unstable() -> dict[str, Any]:
    return {
        "generator": (i for i in [1]),
        "list_iterator": iter([1]),
        "map": map(str, [1]),
        "lock": threading.Lock(),
        "Generator": np.random.default_rng(0),
        "Random": random.Random(0),
        "_local": threading.local(),
    }


@pytest.mark.parametrize("kind", sorted(unstable()))
def test_an_unstable_object_is_refused_with_its_path_and_the_remedy(kind: str) -> None:
    found = unstable()[kind]

    def make(f: Any) -> Any:
        return lambda x: f

    line = make.__code__.co_firstlineno + 1
    here = rf"closure variable 'f' of .*<lambda> in test_fingerprint.py:{line}"
    with pytest.raises(FingerprintError, match=here) as caught:
        fingerprint(make(found))
    assert kind in str(caught.value)
    assert 'version="..."' in str(caught.value)


def test_open_files_and_sockets_are_refused(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log, socket.socket() as wire:
        with pytest.raises(
            FingerprintError, match="attribute 'level' of a Noise: it is an open fi"
        ):
            fingerprint(Noise(log))
        with pytest.raises(FingerprintError, match="socket"):
            fingerprint(wire)


def test_the_path_names_every_object_on_the_way() -> None:
    buried = Noise({"ops": [1, functools.partial(max, (i for i in [1]))]})
    with pytest.raises(FingerprintError) as caught:
        fingerprint((0, buried))
    assert (
        "the item 0 of a tuple, in the 'args' of a partial, in the item 1 of a list, in the "
        "value of 'ops' in a dict, in the attribute 'level' of a Noise, in the item 1 of a tuple"
    ) in str(caught.value)


def test_too_deep_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(FingerprintError, match="nested too deeply"):
        fingerprint(deep)
    while deep:  # freeing it at once would overflow the stack in some versions of Python
        deep = deep[0]
