"""Which split and which reuse pay: arithmetic over what was measured, within fixed bounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.diversity.part import Part, known
from penstock.diversity.theorem import WEAK, share, strength

MOST_REUSE = 5
"""Each step further saves less: the one from 5 to 6 would save a thirtieth of the work above the
split."""

LEAST_SHARE = 0.9
"""Of standard training's different samples, what must be left. Less than a tenth lost is what
training for a tenth fewer epochs would lose."""

LEAST_GAIN = 1.1
"""Below that, what was measured may be noise, and the memory is better left to others."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What it costs to keep a sample at a split: seconds to ``store`` and to ``fetch`` it, and its
    size."""

    store: float
    fetch: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One split with one reuse: what it gains and what it leaves.

    ``split`` is how many parts stand above it, ``gain`` the predicted samples per second over those
    of standard training, and ``refusal`` why it may not be chosen: empty if it may.
    """

    split: int
    below: str
    reuse: int
    gain: float
    share: float
    strength: float
    refusal: str = ""

    @property
    def place(self) -> str:
        return f"refurbish(reuse={self.reuse}) below {self.below}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to do, and why. ``reuse`` 1 is standard training; ``split`` is ``None`` then.

    ``runner_up`` is the strongest that would have been faster and was refused. (The fastest says
    little: it is to keep samples when all is done to them.)
    """

    split: int | None
    reuse: int
    gain: float
    share: float
    strength: float
    seconds: float
    standard_seconds: float
    below: str = ""
    runner_up: Candidate | None = None

    def __str__(self) -> str:
        rates = f"{_rate(self.standard_seconds)} samples/s on one core"
        if self.split is None:
            out = [
                f"No reuse: nothing that is allowed gains {LEAST_GAIN - 1:.0%} over standard "
                f"training's {rates}."
            ]
        else:
            out = [
                f"refurbish(reuse={self.reuse}) below {self.below}: {self.gain:.2f} times standard "
                f"training's {rates}, predicted.",
                f"It leaves {math.floor(self.share * 1000) / 10:.1f}% of the different samples; "
                f"{self.strength:.2f} of the variety comes after it (at least {WEAK:g}).",
            ]
        other = self.runner_up
        if other is not None:
            out.append(f"{other.place} would be {other.gain:.2f} times, but {other.refusal}.")
        return "\n".join(out)


def propose(
    parts: Sequence[Part],
    keeping: Sequence[Keeping],
    epochs: int,
    *,
    splits: Collection[int] | None = None,
    room: float = math.inf,
    standard: float | None = None,
) -> Proposal:
    """The fastest split and reuse that leave the samples different enough.

    ``parts`` are the source and all maps in their order, with what each costs; ``keeping[i]`` is
    what it costs to keep what leaves ``parts[i]``. Only ``splits`` are considered, if given: a
    split of ``i`` stands below ``parts[i - 1]``. ``room`` is how many bytes there are for each
    sample: what does not fit is always fresh. ``standard`` is what a sample costs without
    refurbish, where that is not the sum of its parts because several run in one step.
    """
    if len(parts) != len(keeping):
        raise ValueError(f"{len(parts)} parts, and what it costs to keep {len(keeping)} of them")
    standard = math.fsum(part.seconds for part in parts) if standard is None else standard
    found = [
        _candidate(parts, keeping[split - 1], split, reuse, epochs, room, standard)
        for split in range(1, len(parts) + 1)
        if splits is None or split in splits
        for reuse in range(2, MOST_REUSE + 1)
    ]
    # Of those that gain alike, less reuse is better, and then less to keep up to date.
    order = sorted(found, key=lambda one: (-one.gain, one.reuse, one.split))
    best = next((one for one in order if not one.refusal and one.gain >= LEAST_GAIN), None)
    to_beat = LEAST_GAIN if best is None else best.gain
    refused = [one for one in order if one.refusal and one.gain > to_beat]
    runner_up = max(refused, key=lambda one: one.strength, default=None)
    if best is None:
        return Proposal(None, 1, 1.0, 1.0, 1.0, standard, standard, runner_up=runner_up)
    return Proposal(
        split=best.split,
        reuse=best.reuse,
        gain=best.gain,
        share=best.share,
        strength=best.strength,
        seconds=standard / best.gain,
        standard_seconds=standard,
        below=best.below,
        runner_up=runner_up,
    )


def _candidate(
    parts: Sequence[Part],
    keep: Keeping,
    split: int,
    reuse: int,
    epochs: int,
    room: float,
    standard: float,
) -> Candidate:
    above, below = parts[:split], parts[split:]
    making = math.fsum(part.seconds for part in above)
    kept = min(1.0, room / keep.nbytes) if keep.nbytes > 0 else 1.0
    missing = (making + keep.store) / reuse + keep.fetch * (1.0 - 1.0 / reuse)
    rest = math.fsum(part.seconds for part in below)
    seconds = kept * missing + (1.0 - kept) * making + rest
    gain = standard / seconds if seconds > 0.0 else 1.0
    partial, final = known(above), known(below)
    # What is not known counts as what would leave the least: as much as can be above the split
    # and nothing below it. A share is least with endless variety above, whatever is below.
    strong = strength(partial, final) if _known(above) else 0.0
    most = math.prod(partial) if _known(parts) else math.inf
    left = share(most, math.prod(final), reuse, epochs)
    return Candidate(
        split,
        parts[split - 1].name,
        reuse,
        gain,
        left,
        strong,
        _refusal(above, strong, left),
    )


def _known(parts: Sequence[Part]) -> bool:
    return all(part.outcomes is not None for part in parts)


def _refusal(above: Sequence[Part], strong: float, left: float) -> str:
    if not any(part.random for part in above):
        return "nothing above it is random, so there is nothing to renew: put cache() there"
    unknown = [part.name for part in above if part.outcomes is None]
    if unknown:
        return f"nobody knows how many outcomes {unknown[0]} has: give it an attribute outcomes"
    if strong < WEAK:
        return f"only {strong:.2f} of the variety would come after it (at least {WEAK:g})"
    if left < LEAST_SHARE:
        return f"it would leave {left:.0%} of the different samples (at least {LEAST_SHARE:.0%})"
    return ""


def _rate(seconds: float) -> str:
    if seconds <= 0.0:
        return "very many"
    return f"{1.0 / seconds:,.0f}" if seconds < 0.1 else f"{1.0 / seconds:.2g}"
