"""Keyed randomness: every random choice is a function of its key, never of when it is made.

The random numbers of a stage for one sample come from a counter-based generator (Philox). Its key
is (seed, stage), and its counter starts at (index, epoch, replica). They do not depend on the order
of calls, the number of workers, or a crash.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random as _python_random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np


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


def _seed_torch(generator: np.random.Generator) -> None:
    """Seed torch as ``seed_globals`` does, and leave ``random`` and NumPy as they are."""
    draw = generator.bit_generator.random_raw
    draw()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(draw() >> 32)


class SeededCalls:
    """Calls a function for key after key, each with global generators that are seeded by the key.

    Seeding takes 9 us, as long as reading a small sample. Most functions draw from no global
    generator, or only from torch's. So ``random`` and NumPy are seeded once for several calls. If
    their states have changed or were asked for after these calls, the calls are made again, each
    with its own seeds, and from then on every call is seeded. Results are those of seeding every
    call. So are the states that are left, which a collate function may draw from.

    torch is seeded for every call: ``torch.initial_seed`` tells its seed without a change of state.
    """

    def __init__(self, keyed: Keyed) -> None:
        self._at = keyed.at
        self._states = GlobalPeek.available()
        self._quiet = 0
        """Calls that have drawn nothing."""

    def __call__(self, keys: Sequence[Key], call: Callable[[Key], Any]) -> list[Any]:
        """The results for these keys, in their order."""
        results: list[Any] = []
        while self._states is not None and len(results) < len(keys):
            # Never more than were made before: no more than these may have to be made again.
            some = keys[len(results) : len(results) + max(1, self._quiet)]
            results += self._unseeded(self._states, some, keys[-1], call) or ()
        for key in keys[len(results) :]:
            seed_globals(self._at(key))
            results.append(call(key))
        return results

    def _unseeded(
        self, states: GlobalPeek, keys: Sequence[Key], last: Key, call: Callable[[Key], Any]
    ) -> list[Any] | None:
        """The results for keys whose calls draw nothing; ``None`` if one has drawn."""
        # The first call has its own seeds, so that it need not be made again.
        alone = len(keys) == 1
        seed_globals(self._at(keys[0] if alone else last))
        before = states.look()
        results = []
        try:
            for key in keys:
                if not alone:
                    _seed_torch(self._at(key))
                results.append(call(key))
        except BaseException:
            # With its own seeds, a call that draws may not fail.
            if alone or states.look() == before:
                raise
        if states.look() == before:
            self._quiet += len(keys)
            return results
        self._states = None
        return results if alone else None


class GlobalPeek:
    """Looks at the states of ``random`` and NumPy where they are in memory: their own functions
    take 80 us. ``available`` returns ``None`` where that is not possible."""

    SIZE = 4 * 625
    """Bytes of a Mersenne Twister: 624 words and a position."""

    reads = 0
    """How often the functions that return these states were called."""
    _watched = False

    def __init__(self) -> None:
        self._bits = _numpy_bits()
        self._python = id(_python_generator) + object.__basicsize__
        self._numpy = self._bits.ctypes.state_address

    def look(self) -> tuple[Any, ...]:
        """Equal to what it was before if nothing was drawn or asked for since."""
        if _numpy_bits() is not self._bits:
            return (object(),)
        at, size = ctypes.string_at, self.SIZE
        return at(self._python, size), at(self._numpy, size), GlobalPeek.reads

    @classmethod
    def watch(cls) -> None:
        """Count calls of ``random.getstate`` and ``np.random.get_state`` from now on.

        Called in worker processes: the functions of the user's own process stay as they are.
        """
        if not cls._watched:
            cls._watched = True
            _python_random.getstate = cls._counted(_python_random.getstate)
            np.random.get_state = cls._counted(np.random.get_state)

    @classmethod
    def _counted(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            cls.reads += 1
            return function(*args, **options)

        return counted

    @classmethod
    def available(cls) -> GlobalPeek | None:
        """``None`` if calls are not counted, or the states are not where they should be."""
        if not cls._watched or sys.implementation.name != "cpython":
            return None
        *words, position = _python_random.getstate()[1]
        kind, keys, place, *_ = np.random.get_state()
        if kind != "MT19937":
            return None
        peek = cls()
        python, numpy, _ = peek.look()
        known = np.array([position, *words], np.uint32), np.array([*keys, place], np.uint32)
        return peek if (python, numpy) == tuple(state.tobytes() for state in known) else None


def _numpy_bits() -> Any:
    return np.random.mtrand._rand._bit_generator


class GlobalStates:
    """The states that the global generators have now; ``restore`` puts them back."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._python = _python_random.getstate()
        self._numpy = np.random.get_state()
        torch = sys.modules.get("torch")
        self._torch = None if torch is None else torch.get_rng_state()

    def restore(self) -> None:
        _python_random.setstate(self._python)
        np.random.set_state(self._numpy)
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


class _Stand:
    """Stands in for a bit generator while only the rest of a ``RandomState`` is read or set.

    Reading or setting the state of NumPy's Mersenne Twister takes 70 us. The rest of it is a second
    normally distributed number, which has been computed with the first and is returned next.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"bit_generator": "MT19937", "state": {}}


def _kept_normal(generator: Any) -> dict[str, Any]:
    """The state of a ``RandomState`` without that of its bit generator."""
    bits, stand = generator._bit_generator, _Stand()
    generator._bit_generator = stand
    try:
        kept: dict[str, Any] = generator.get_state(legacy=False)
    finally:
        generator._bit_generator = bits
    return kept


def _keep_normal(generator: Any, kept: dict[str, Any]) -> None:
    """Set what ``_kept_normal`` has returned."""
    bits = generator._bit_generator
    generator._bit_generator = _Stand()
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
