"""What an analysis found: rates, costs and how they were measured, as plain data.

A report says what was measured; what follows from it (the verdict, predictions, remedies) is worked
out of it by ``model`` and ``remedies``, so that a report of last week can be asked new questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ReportError

VERSION = 2

TORCH_AHEAD = 2
"""Batches that torch's loader has ahead for each worker, unless told otherwise."""

Curve = tuple[tuple[float, float], ...]
"""Points of a function from (0, 0) on, ascending."""

PhaseName = Literal["as it is", "replay", "cached", "cold", "prep", "storage", "cache"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples a second, and the interval in which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half of the interval, as a part of the rate."""
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else 0.0

    def times(self, factor: float) -> Rate:
        return Rate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement: so many steps in so many seconds, after a warm-up that is not counted.

    In ``replay``, ``cached`` and ``cold`` the script's own loop ran; in ``prep``, ``storage`` and
    ``cache`` nothing but the loader, or its reading, did. ``enough`` says that the interval became
    as narrow as was asked for before the time was up.
    """

    name: PhaseName
    rate: Rate
    steps: int
    seconds: float
    enough: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """The loader as the script has made it, and what it runs on.

    ``loader`` is its class. ``workers`` 0 means that the training process prepares by itself.
    ``piece`` is how many samples a worker takes at a time: a whole batch for torch's loader. Of
    those it fetches ``together`` before it prepares them.
    ``ahead`` is how many batches are prepared ahead. ``sample_bytes`` are read from storage for a
    sample, 0 where that is not known, and ``kept_bytes`` are what it takes in a cache; ``cache`` is
    the budget of a cache of what is read.
    """

    loader: str
    samples: int
    batch: int
    workers: int
    kind: Literal["processes", "threads", "none", "node"]
    ahead: int
    piece: int
    cores: int
    sample_bytes: float
    cache: int = 0
    accelerator: str = "cpu"
    rank: int = 0
    world: int = 1
    kept_bytes: float = 0.0
    together: int = 1

    @property
    def of_torch(self) -> bool:
        return self.loader.startswith("torch.")

    @property
    def to_keep_all(self) -> float:
        """Bytes of a cache that has room for all samples; 0 where that is not known."""
        return (self.kept_bytes or self.sample_bytes) * self.samples

    def ahead_with(self, workers: int) -> int:
        """How many batches so many workers prepare ahead: torch's have some each."""
        if not self.of_torch:
            return max(1, self.ahead)
        each = self.ahead // self.workers if self.workers else TORCH_AHEAD
        return max(1, each * workers)

    def held(self, budget: float) -> float:
        """The share of samples that a cache of so many bytes has room for."""
        return min(1.0, budget / self.to_keep_all) if self.to_keep_all else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What the model is fed with: seconds a sample unless said otherwise.

    ``compute`` is that of a step (1/G), with ``copy`` of it for moving the batch to the device.
    ``prep`` is what one worker takes for a sample that it need not fetch; ``sizes`` are how large
    samples are, as parts of the mean, and with that what they take; none where all are alike.
    ``scaling`` is how much faster so many workers are than one. ``storage``
    and ``cache`` are bytes a second of all workers together, ``latency`` is what one worker waits
    for one sample from storage where nobody else reads, without ``reading``, what fetching it costs
    a core beside ``prep``. ``after_wait`` is what a worker loses on a sample after it
    has waited for it so long: pairs of the two, ascending. ``shuttle`` is what it takes the loop to
    receive a sample. ``reuse_miss`` and ``reuse_hit`` are ``prep`` where refurbish stands at its
    best place, for a sample that is fresh and one that is kept; ``None`` where it cannot stand.
    ``penstock`` is ``prep`` where Penstock's loader takes the place of torch's; ``None`` where it
    is there already, or cannot.
    """

    compute: float
    prep: float
    scaling: Mapping[int, float]
    storage: float
    cache: float
    latency: float
    copy: float = 0.0
    sizes: tuple[float, ...] = ()
    shuttle: float = 0.0
    reading: float = 0.0
    after_wait: Curve = ()
    reuse_miss: float | None = None
    reuse_hit: float | None = None
    penstock: float | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the road: its time a sample on one core, and its share of all."""

    name: str
    kind: str
    ms: float
    share: float
    random: bool = False
    nbytes: int = 0
    """Of a sample that leaves it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One step: when it began, how long the loop waited for its batch, and how long it took."""

    at: float
    phase: PhaseName
    wait: float
    step: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found on one rank; ``ranks`` has the other ranks' reports, where there are any.

    ``device_reads`` is the share of bytes in the cold phase that really came from a device, not
    from memory; ``None`` where it could not be told. ``batch_times`` are seconds that workers took
    to prepare a batch. ``notes`` say what could not be measured, and why.
    """

    setup: Setup
    costs: Costs
    phases: tuple[Phase, ...]
    operations: tuple[Operation, ...] = ()
    batch_times: tuple[float, ...] = ()
    waits: tuple[Wait, ...] = ()
    device_reads: float | None = None
    command: str = ""
    made: str = ""
    machine: str = ""
    notes: tuple[str, ...] = ()
    ranks: tuple[Report, ...] = ()
    version: int = VERSION

    def phase(self, name: PhaseName) -> Phase | None:
        return next((one for one in self.phases if one.name == name), None)

    def rate(self, name: PhaseName) -> float | None:
        found = self.phase(name)
        return None if found is None else found.rate.value

    def __str__(self) -> str:
        from penstock.diagnose.analyze.remedies import remedies
        from penstock.diagnose.analyze.text import lines_of

        return "\n".join(lines_of(self, remedies(self)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read one that was saved; refuses what is none."""
        try:
            plain = json.loads(path.read_text())
        except FileNotFoundError:
            raise ReportError(
                f"there is no {path}. `penstock analyze -- python train.py` writes a report."
            ) from None
        except (OSError, ValueError) as error:
            raise ReportError(f"{path} cannot be read as a report: {error}") from error
        try:
            return of_plain(plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"{path} is not a report of `penstock analyze`: {error}") from error


def of_plain(plain: Mapping[str, Any]) -> Report:
    """A report from what ``to_dict`` made of one."""
    if plain.get("version") != VERSION:
        raise ReportError(
            f"the report has version {plain.get('version')!r} and this release reads {VERSION}: "
            "run the analysis again."
        )
    known = {one.name for one in fields(Report)}
    given = {name: value for name, value in plain.items() if name in known}
    costs = dict(given["costs"])
    costs["scaling"] = {int(workers): value for workers, value in costs["scaling"].items()}
    costs["sizes"] = tuple(costs.get("sizes", ()))
    costs["after_wait"] = tuple((wait, lost) for wait, lost in costs.get("after_wait", ()))
    return Report(
        **{
            **given,
            "setup": Setup(**given["setup"]),
            "costs": Costs(**costs),
            "phases": tuple(
                Phase(**{**one, "rate": Rate(**one["rate"])}) for one in given["phases"]
            ),
            "operations": tuple(Operation(**one) for one in given["operations"]),
            "batch_times": tuple(given["batch_times"]),
            "waits": tuple(Wait(**one) for one in given["waits"]),
            "notes": tuple(given["notes"]),
            "ranks": tuple(of_plain(one) for one in given["ranks"]),
        }
    )
