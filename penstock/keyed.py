"""Keyed randomness: every random choice is a function of its key, never of when it is made.

The random numbers of a stage for one sample come from a counter-based generator (Philox). Its key
is (seed, stage), and its counter starts at (index, epoch, replica). They do not depend on the order
of calls, the number of workers, or a crash.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import os
import random as _python_random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.native import kernel


class Key(NamedTuple):
    """A sample and one of its versions. Apart from seed and stage, randomness depends on nothing
    else."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which keys do not need
    epoch: int = 0
    replica: int = 0


class Keys:
    """The keys of several samples of one epoch. ``replicas`` is ``None`` if all are 0."""

    __slots__ = ("epoch", "indices", "replicas")

    def __init__(self, epoch: int, indices: list[int], replicas: list[int] | None = None) -> None:
        self.epoch = epoch
        self.indices = indices
        self.replicas = replicas

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Key]:
        epoch = self.epoch
        if self.replicas is None:
            return (Key(index, epoch) for index in self.indices)
        pairs = zip(self.indices, self.replicas, strict=True)
        return (Key(index, epoch, replica) for index, replica in pairs)

    def pick(self, places: Sequence[int]) -> Keys:
        """The keys at these places."""
        replicas = self.replicas
        return Keys(
            self.epoch,
            [self.indices[i] for i in places],
            None if replicas is None else [replicas[i] for i in places],
        )

    def cut(self, first: int, count: int) -> Keys:
        """``count`` keys, starting with number ``first``."""
        replicas = self.replicas
        return Keys(
            self.epoch,
            self.indices[first : first + count],
            None if replicas is None else replicas[first : first + count],
        )


class _Local(threading.local):
    """One Philox generator per thread, whose key and counter are set for each use.

    Creating a generator takes 28 us, setting one 2.5 us (measured on a 2-core EPYC, NumPy 2.4).
    """

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.state: Any = dict(self.bits.state)
        self.place: dict[str, Any] = self.state["state"]
        self.counter: list[int] = [0, 0, 0, 0]
        self.place["counter"] = self.counter


_local = _Local()


class Keyed:
    """The random generators of one stage, by key.

    >>> from penstock.keyed import Key, Keyed
    >>> flips = Keyed(seed=0, stage="flip")
    >>> a = flips.at(Key(index=7, epoch=1)).random()
    >>> b = flips.at(Key(index=8, epoch=1)).random()
    >>> flips.at(Key(index=7, epoch=1)).random() == a != b
    True
    """

    __slots__ = ("_key", "_words", "seed", "stage")

    def __init__(self, seed: int, stage: str) -> None:
        self.seed = seed
        self.stage = stage
        digest = hashlib.blake2b(f"{seed}/{stage}".encode(), digest_size=16).digest()
        self._key = np.frombuffer(digest, dtype=np.uint64)
        self._words: list[int] = self._key.tolist()

    def __reduce__(self) -> tuple[object, ...]:
        return Keyed, (self.seed, self.stage)

    @property
    def key(self) -> bytes:
        """Seed and stage as the 16 bytes that key the generator, for the compiled kernel."""
        return self._key.tobytes()

    def at(self, key: Key) -> np.random.Generator:
        """The generator for one key, valid in this thread until the next call of any ``at``."""
        local = _local
        # The word of the counter that advances comes first, so that the streams of different keys
        # are 2**64 blocks apart and never overlap.
        local.counter[1:] = key
        local.place["key"] = self._words
        local.bits.state = local.state
        return local.generator

    def torch_seeds(self, keys: Keys) -> list[int]:
        """The seeds that ``seed_globals`` gives torch for these keys."""
        compiled = kernel()
        if compiled is not None:
            drawn = compiled.second_draws(self.key, keys.indices, keys.epoch, keys.replicas)
            return [second >> 32 for second in drawn]
        seeds = []
        for key in keys:
            draw = self.at(key).bit_generator.random_raw
            draw()
            seeds.append(draw() >> 32)
        return seeds

    def fresh(self, key: Key) -> np.random.Generator:
        """A new generator for one key, for callers that keep it."""
        counter = np.array([0, key.index, key.epoch, key.replica], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._key, counter=counter))


_python_generator: Any = _python_random._inst
"""The generator behind the functions of ``random``."""
_seed_python = _random.Random.seed


def seed_globals(generator: np.random.Generator) -> None:
    """Seed the global generators of ``random``, NumPy and (if it is loaded) torch."""
    # Raw bits: integers() would take longer than all the seeding. One by one: without an array.
    draw = generator.bit_generator.random_raw
    first, second = draw(), draw()
    # What ``random.seed`` does for an int, less the look at its type: a tenth of its time.
    _seed_python(_python_generator, first)
    _python_generator.gauss_next = None
    np.random.seed(second & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(second >> 32)


class SeededCalls:
    """Calls a function for key after key, each with global generators that are seeded by the key.

    Seeding takes 9 us, many times as long as reading a small sample. Most functions draw from no
    global generator, or only from torch's. So the generators are seeded once for several calls. If
    their states have changed or were asked for after these calls, the calls are made again, each
    with its own seeds. From then on every call is seeded: if only torch has drawn, for torch alone.
    Results are those of seeding every call. So are the states that are left, which a collate
    function may draw from.

    ``torch.initial_seed`` tells the seed without a change of state, so each call has its own.
    """

    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed
        self._states = GlobalPeek.found()
        self._torch: Callable[[Any], _UnseededTorch | None] | None = _UnseededTorch.available
        """``None``: torch is seeded for every call."""
        self._quiet = 0
        """Calls that have drawn nothing."""

    def __call__(self, keys: Keys, call: Callable[[int], Any]) -> list[Any]:
        """The results for the indices of these keys, in their order."""
        results: list[Any] = []
        watched = GlobalPeek.watches()
        while watched and self._states is not None and len(results) < len(keys):
            # Never more than were made before: no more than these may have to be made again.
            some = keys.cut(len(results), max(1, self._quiet))
            results += self._together(self._states, some, keys, call) or ()
        for key in keys.cut(len(results), len(keys)):
            seed_globals(self._keyed.at(key))
            results.append(call(key.index))
        return results

    def _together(
        self, states: GlobalPeek, some: Keys, keys: Keys, call: Callable[[int], Any]
    ) -> list[Any] | None:
        """The results for some keys, seeded together; ``None`` if one of their calls has drawn."""
        # The first call has its own seeds, so that it need not be made again.
        alone = len(some) == 1
        seed_globals(self._keyed.at(next(iter(some if alone else keys.cut(len(keys) - 1, 1)))))
        torch = sys.modules.get("torch")
        unseeded = None if torch is None or self._torch is None else self._torch(torch)
        before = states.look()
        torch_before = None if unseeded is None else unseeded.marked()
        results: list[Any] = []
        try:
            if alone:
                results.append(call(some.indices[0]))
            elif torch is None:
                results += map(call, some.indices)
            else:
                seeds = self._keyed.torch_seeds(some)
                if unseeded is None:
                    set_seed = torch.default_generator.manual_seed
                    for index, seed in zip(some.indices, seeds, strict=True):
                        set_seed(seed)
                        results.append(call(index))
                else:
                    cell = unseeded.seed
                    for index, seed in zip(some.indices, seeds, strict=True):
                        cell[0] = seed
                        results.append(call(index))
        except Exception:
            # With its own seeds, a call that draws may not fail.
            if not self._drawn(states, before, unseeded, torch_before, torch) or alone:
                raise
            return None
        if self._drawn(states, before, unseeded, torch_before, torch) and not alone:
            return None
        self._quiet += len(some)
        return results

    def _drawn(
        self,
        states: GlobalPeek,
        before: tuple[Any, ...],
        unseeded: _UnseededTorch | None,
        torch_before: tuple[Any, ...] | None,
        torch: Any,
    ) -> bool:
        """Whether calls have drawn or asked for states. Later calls are then seeded each."""
        drawn = states.look() != before
        by_torch = unseeded is not None and unseeded.look() != torch_before
        if drawn:
            self._states = None
        if by_torch:
            self._torch = None
        # torch, if a call has just imported it, had no seed for the other calls.
        return drawn or by_torch or (torch is None and "torch" in sys.modules)


class _UnseededTorch:
    """torch's global generator where it is in memory, for calls that may or may not draw from it.

    ``seed[0]`` is the seed that ``torch.initial_seed`` returns. Setting it leaves the state as it
    is: computing that of a seed takes 1 us. ``look`` tells whether something was drawn.
    """

    _found: ClassVar[dict[int, _UnseededTorch | None]] = {}

    _ENGINE = np.dtype(
        [("left", "i4"), ("seeded", "?"), ("next", "u4"), ("words", "u4", 624)], True
    )
    """Beside its seed, what the Mersenne Twister has in memory."""
    _MARK, _MARKED = b"\xa5\x5a\xc3", 5
    """Bytes for the gap after ``seeded``: drawing leaves them, replacing the state does not."""
    _SEARCHED = 512
    """Bytes of the generator in which its seed is searched for; it has more than 2500."""

    def __init__(self, address: int) -> None:
        self.seed = memoryview(ctypes.c_uint64.from_address(address)).cast("B").cast("Q")
        self._engine = address + self.seed.nbytes

    def look(self) -> tuple[Any, ...]:
        """Equal to what it was before if nothing was drawn or asked for since."""
        return ctypes.string_at(self._engine, self._ENGINE.itemsize), GlobalPeek.reads

    def marked(self) -> tuple[Any, ...]:
        """``look``, after a mark that also shows whether a draw was undone: the same state was put
        back by ``torch.default_generator``, whose functions nobody can count."""
        ctypes.memmove(self._engine + self._MARKED, self._MARK, len(self._MARK))
        return self.look()

    @classmethod
    def available(cls, torch: Any) -> _UnseededTorch | None:
        """``None`` if the generator is not where it should be, or if nobody counts who asks for
        its state."""
        known = id(torch.default_generator)
        if known not in cls._found:
            cls._found[known] = cls._find(torch.default_generator)
        found = cls._found[known]
        return found if found is not None and GlobalPeek.watches_torch(torch) else None

    @classmethod
    def _find(cls, generator: Any) -> _UnseededTorch | None:
        """Find a seed in memory that no other number is likely to equal."""
        if type(generator).__basicsize__ < object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
            return None
        where = ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value
        state = generator.get_state()
        first, second = 0x5EED_0F_7E57_1234_67, 0x7E57_0F_5EED_7654_21
        try:
            generator.manual_seed(first)
            memory = b"" if where is None else ctypes.string_at(where, cls._SEARCHED)
            place = memory.find(first.to_bytes(8, sys.byteorder))
            if where is None or place < 0 or (where + place) % 8:
                return None
            found = cls(where + place)
            engine = np.frombuffer(found.look()[0], cls._ENGINE)[0]
            # The state as torch saves it: seed, left, seeded, next and the words, as 64 bits each
            # but for the second and third, which share 64.
            saved = generator.get_state()[: 8 * (3 + 624)].numpy().view(np.uint64)
            right = (engine["left"], engine["next"]) == (1, 0) and bool(engine["seeded"])
            found.seed[0] = second
            if right and (engine["words"] == saved[3:]).all() and saved[0] == first:
                return found if generator.initial_seed() == second else None
            return None
        finally:
            generator.set_state(state)


class GlobalPeek:
    """Looks at the states of ``random`` and NumPy where they are in memory: their own functions
    take 80 us. ``available`` returns ``None`` where that is not possible."""

    SIZE = 4 * 625
    """Bytes of a Mersenne Twister: 624 words and a position."""

    reads = 0
    """How often the functions that return these states were called."""
    _watched = False
    """They are counted for ever."""
    _scopes = 0
    """Scopes in which they are counted."""
    _counts_torch: Any = None
    """The module of torch whose functions are counted."""
    _known: ClassVar[tuple[Any, GlobalPeek | None] | None] = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.bits = _numpy_bits()
        self.python = id(_python_generator) + object.__basicsize__
        self.numpy = self.bits.ctypes.state_address

    def look(self) -> tuple[Any, ...]:
        """Equal to what it was before if nothing was drawn or asked for since."""
        if _numpy_bits() is not self.bits:
            return (object(),)
        at, size = ctypes.string_at, self.SIZE
        return at(self.python, size), at(self.numpy, size), GlobalPeek.reads

    @classmethod
    def watch(cls) -> None:
        """Count calls of ``random.getstate`` and ``np.random.get_state`` from now on.

        Called in worker processes. In the user's own process ``watching`` counts for a while.
        """
        if not cls._watched:
            cls._watched = True
            for module, name, function in _state_functions(None):
                setattr(module, name, cls.counted(function))

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[None]:
        """Count these calls, and those of torch's, inside a ``with`` block."""
        if cls._watched:
            yield
            return
        with cls._lock:
            cls._scopes += 1
            if cls._scopes == 1:
                cls._counts_torch = sys.modules.get("torch")
                cls._replaced = _state_functions(cls._counts_torch)
                for module, name, function in cls._replaced:
                    setattr(module, name, cls.counted(function))
        try:
            yield
        finally:
            with cls._lock:
                cls._scopes -= 1
                if not cls._scopes:
                    cls._counts_torch = None
                    for module, name, function in cls._replaced:
                        # Unless the user's code has replaced it meanwhile.
                        if getattr(getattr(module, name), "__wrapped__", None) == function:
                            setattr(module, name, function)

    _replaced: ClassVar[list[tuple[Any, str, Any]]] = []

    @classmethod
    def watches(cls) -> bool:
        """Whether calls are counted now."""
        return cls._watched or cls._scopes > 0

    @classmethod
    def watches_torch(cls, torch: Any) -> bool:
        """Whether calls of torch's functions are counted now."""
        if cls._watched and cls._counts_torch is not torch:
            cls._counts_torch = torch
            for module, name, function in _state_functions(torch)[2:]:
                setattr(module, name, cls.counted(function))
        return cls._counts_torch is torch

    @classmethod
    def counted(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted."""

        @wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            cls.reads += 1
            return function(*args, **options)

        return counted

    @classmethod
    def found(cls) -> GlobalPeek | None:
        """``None`` if the states are not where they should be. Searched for once."""
        bits = _numpy_bits()
        if cls._known is None or cls._known[0] is not bits:
            cls._known = bits, cls._find()
        return cls._known[1]

    @classmethod
    def _find(cls) -> GlobalPeek | None:
        without_gil = not getattr(sys, "_is_gil_enabled", lambda: True)()
        if sys.implementation.name != "cpython" or without_gil:
            return None
        *words, position = _python_random.getstate()[1]
        kind, keys, place, *_ = np.random.get_state()
        if kind != "MT19937":
            return None
        peek = cls()
        python, numpy, _ = peek.look()
        known = np.array([position, *words], np.uint32), np.array([*keys, place], np.uint32)
        return peek if (python, numpy) == tuple(state.tobytes() for state in known) else None


def _state_functions(torch: Any) -> list[tuple[Any, str, Any]]:
    """The functions that return the states of global generators: module, name and function."""
    named = [(_python_random, "getstate"), (np.random, "get_state")]
    if torch is not None:
        named += [(torch, "get_rng_state"), (torch.random, "get_rng_state")]
    return [(module, name, getattr(module, name)) for module, name in named]


def _numpy_bits() -> Any:
    return np.random.mtrand._rand._bit_generator


class GlobalStates:
    """The states that the global generators have now; ``restore`` puts them back.

    Read and written in memory where that is possible: the functions of NumPy take 150 us.
    """

    __slots__ = ("_normal", "_numpy", "_peek", "_python", "_torch")

    def __init__(self) -> None:
        self._peek = GlobalPeek.found() if _can_exchange() else None
        self._python: Any
        self._numpy: Any
        if self._peek is None:
            self._python = _python_random.getstate()
            self._numpy = np.random.get_state()
        else:
            python, self._numpy, _ = self._peek.look()
            self._python = python, _python_generator.gauss_next
            self._normal = _kept_normal(np.random.mtrand._rand)
        torch = sys.modules.get("torch")
        self._torch = None if torch is None else torch.get_rng_state()

    def restore(self) -> None:
        peek = self._peek
        if peek is None:
            _python_random.setstate(self._python)
            np.random.set_state(self._numpy)
        else:
            python, _python_generator.gauss_next = self._python
            ctypes.memmove(peek.python, python, peek.SIZE)
            if _numpy_bits() is not peek.bits:
                np.random.set_bit_generator(peek.bits)  # type: ignore[attr-defined]
            with peek.bits.lock:
                ctypes.memmove(peek.numpy, self._numpy, peek.SIZE)
            _keep_normal(np.random.mtrand._rand, self._normal)
        if self._torch is not None:
            sys.modules["torch"].set_rng_state(self._torch)


def plain_states() -> dict[str, Any]:
    """The states that the global generators have now, as plain data for a checkpoint."""
    kind, keys, *rest = np.random.get_state()
    torch = sys.modules.get("torch")
    return {
        "python": _python_random.getstate(),
        "numpy": (kind, np.asarray(keys).tobytes(), *rest),
        "torch": None if torch is None else torch.get_rng_state().numpy().tobytes(),
    }


def restore_plain_states(states: Mapping[str, Any]) -> None:
    """Give the global generators the states that ``plain_states`` returned."""
    version, internal, gauss = states["python"]
    _python_random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch = sys.modules.get("torch")
    if torch is not None and states["torch"] is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))


@contextmanager
def preserved_globals() -> Iterator[None]:
    """Restore the state of the global generators on leaving."""
    states = GlobalStates()
    try:
        yield
    finally:
        states.restore()


@contextmanager
def watched_globals() -> Iterator[None]:
    """``preserved_globals`` for calls that ``SeededCalls`` makes in the user's own process."""
    with preserved_globals(), GlobalPeek.watching():
        yield


class _Stand:
    """Stands in for a bit generator while only the rest of a ``RandomState`` is read or set.

    Reading or setting the state of NumPy's Mersenne Twister takes 70 us. The rest of it is a second
    normally distributed number, which has been computed with the first and is returned next. Other
    threads of the user meet the bit generator itself.
    """

    def __init__(self, bits: Any) -> None:
        self.__dict__.update(_bits=bits, _thread=threading.get_ident())

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._bits)  # np.random.seed looks at it

    @property
    def state(self) -> dict[str, Any]:
        if threading.get_ident() != self._thread:
            found: dict[str, Any] = self._bits.state
            return found
        return {"bit_generator": "MT19937", "state": {}}

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            self._bits.state = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bits, name)


_standing = threading.Lock()


def _renew_locks() -> None:
    """In a forked process: another thread may have held them."""
    global _standing
    _standing = GlobalPeek._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _kept_normal(generator: Any) -> dict[str, Any]:
    """The state of a ``RandomState`` without that of its bit generator."""
    with _standing:
        bits = generator._bit_generator
        generator._bit_generator = _Stand(bits)
        try:
            kept: dict[str, Any] = generator.get_state(legacy=False)
        finally:
            generator._bit_generator = bits
    return kept


def _keep_normal(generator: Any, kept: dict[str, Any]) -> None:
    """Set what ``_kept_normal`` has returned."""
    with _standing:
        bits = generator._bit_generator
        generator._bit_generator = _Stand(bits)
        try:
            generator.set_state(kept)
        finally:
            generator._bit_generator = bits


@lru_cache(maxsize=1)
def _can_exchange() -> bool:
    """Whether this NumPy can exchange the bit generator of its global generator, as needed here."""
    if not hasattr(np.random, "set_bit_generator"):
        return False
    tried = np.random.RandomState(0)
    tried.standard_normal()
    before: Any = tried.get_state()
    try:
        kept = _kept_normal(tried)
        tried.seed(1)
        _keep_normal(tried, kept)
    except Exception:  # another layout of the class
        return False
    after: Any = tried.get_state()
    return bool(before[3:] == after[3:] and after[3] == 1)


class SpareGenerators:
    """``preserved_globals`` for a worker process, in a tenth of the time, for use per sample.

    NumPy's generator is not copied. A spare bit generator takes its place meanwhile: code that
    seeds the global generators first draws the same numbers from it. Not for a process of the user,
    where another thread could draw at the same time.
    """

    def __init__(self) -> None:
        self._exchanges = _can_exchange()
        self._spare = np.random.MT19937(0)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the state of the global generators on leaving."""
        if not self._exchanges:
            with preserved_globals():
                yield
            return
        python = _python_random.getstate()
        torch = sys.modules.get("torch")
        of_torch = None if torch is None else torch.get_rng_state()
        numpy_random: Any = np.random  # its stubs lack these functions
        generator = numpy_random.mtrand._rand
        kept, bits = _kept_normal(generator), numpy_random.get_bit_generator()
        numpy_random.set_bit_generator(self._spare)
        try:
            yield
        finally:
            numpy_random.set_bit_generator(bits)
            _keep_normal(generator, kept)
            _python_random.setstate(python)
            if of_torch is not None:
                sys.modules["torch"].set_rng_state(of_torch)
