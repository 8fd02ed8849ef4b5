"""Chooses split and reuse for refurbish("auto"): pure arithmetic on measured costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.diversity.outcomes import PipelinePart, known_outcomes
from penstock.diversity.theorem import WEAK, share, strength

MOST_REUSE = 5
"""Every further reuse saves less: from 5 to 6 it would be a thirtieth of the work above the
split."""

LEAST_SHARE = 0.9
"""The share of standard training's different samples that must remain. Losing less than a tenth
is what training for a tenth fewer epochs would lose."""

LEAST_GAIN = 1.1
"""A smaller gain may be noise of the measurement, and the memory is better used otherwise."""


@dataclass(frozen=True, slots=True)
class KeepingCost:
    """The cost of keeping a sample at a split: seconds to ``store`` and to ``fetch`` it, and its
    size."""

    store: float
    fetch: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SplitCandidate:
    """One split with one reuse.

    ``split``: the number of parts above it. ``gain``: predicted samples per second, relative to
    standard training. ``refusal``: why it may not be chosen; empty if it may.
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
    """The proposed split and reuse, and why. No reuse is ``split=None`` and ``reuse=1``.

    ``runner_up`` is, of the candidates that would be faster but are refused, the one with the
    highest strength. (The fastest of them says little: it keeps completely prepared samples.)
    """

    split: int | None
    reuse: int
    gain: float
    share: float
    strength: float
    seconds: float
    standard_seconds: float
    below: str = ""
    runner_up: SplitCandidate | None = None

    def __str__(self) -> str:
        standard = f"the {_rate(self.standard_seconds)} samples/s of standard training on one core"
        if self.split is None:
            lines = [
                f"No reuse: no allowed split and reuse gains {LEAST_GAIN - 1:.0%} over {standard}."
            ]
        else:
            lines = [
                f"refurbish(reuse={self.reuse}) below {self.below}: predicted "
                f"{self.gain:.2f} times {standard}.",
                f"It leaves {math.floor(self.share * 1000) / 10:.1f}% of the different samples; "
                f"{self.strength:.2f} of the variety comes from below it (at least {WEAK:g}).",
            ]
        other = self.runner_up
        if other is not None:
            lines.append(
                f"{other.place} would be {other.gain:.2f} times as fast, but {other.refusal}."
            )
        return "\n".join(lines)


def propose(
    parts: Sequence[PipelinePart],
    keeping: Sequence[KeepingCost],
    epochs: int,
    *,
    splits: Collection[int] | None = None,
    room: float = math.inf,
    standard: float | None = None,
) -> Proposal:
    """The fastest split and reuse that leave enough different samples.

    ``parts`` are the source and all maps in order, with the cost of each; ``keeping[i]`` is the
    cost of keeping the output of ``parts[i]``. A split of ``i`` is below ``parts[i - 1]``; if
    ``splits`` is given, only these are considered. ``room`` is the number of bytes available per
    sample; samples that do not fit are always fresh. ``standard`` is the cost of a sample without
    refurbish, for a pipeline that is faster than the sum of its parts because several run fused.
    """
    if len(parts) != len(keeping):
        raise ValueError(f"{len(parts)} parts, but {len(keeping)} costs of keeping their output")
    standard = math.fsum(part.seconds for part in parts) if standard is None else standard
    candidates = [
        _candidate(parts, keeping[split - 1], split, reuse, epochs, room, standard)
        for split in range(1, len(parts) + 1)
        if splits is None or split in splits
        for reuse in range(2, MOST_REUSE + 1)
    ]
    # Of equal gains the smaller reuse is better, and then the split with fewer parts above it.
    ranking = sorted(candidates, key=lambda c: (-c.gain, c.reuse, c.split))
    best = next((c for c in ranking if not c.refusal and c.gain >= LEAST_GAIN), None)
    to_beat = LEAST_GAIN if best is None else best.gain
    refused = [c for c in ranking if c.refusal and c.gain > to_beat]
    runner_up = max(refused, key=lambda c: c.strength, default=None)
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
    parts: Sequence[PipelinePart],
    keeping: KeepingCost,
    split: int,
    reuse: int,
    epochs: int,
    room: float,
    standard: float,
) -> SplitCandidate:
    above, below = parts[:split], parts[split:]
    making = math.fsum(part.seconds for part in above)
    kept_share = min(1.0, room / keeping.nbytes) if keeping.nbytes > 0 else 1.0
    reused = (making + keeping.store) / reuse + keeping.fetch * (1.0 - 1.0 / reuse)
    rest = math.fsum(part.seconds for part in below)
    seconds = kept_share * reused + (1.0 - kept_share) * making + rest
    gain = standard / seconds if seconds > 0.0 else 1.0
    partial, final = known_outcomes(above), known_outcomes(below)
    # Unknown outcomes count as the worst case: infinitely many above the split, one below it. The
    # share is smallest with infinitely many outcomes above, whatever is below.
    strong = strength(partial, final) if _all_known(above) else 0.0
    most = math.prod(partial) if _all_known(parts) else math.inf
    left = share(most, math.prod(final), reuse, epochs)
    return SplitCandidate(
        split,
        parts[split - 1].name,
        reuse,
        gain,
        left,
        strong,
        _refusal(above, strong, left),
    )


def _all_known(parts: Sequence[PipelinePart]) -> bool:
    return all(part.outcomes is not None for part in parts)


def _refusal(above: Sequence[PipelinePart], strong: float, left: float) -> str:
    if not any(part.random for part in above):
        return "nothing above it is random, so there is nothing to renew: put cache() there"
    unknown = [part.name for part in above if part.outcomes is None]
    if unknown:
        return f"the number of outcomes of {unknown[0]} is unknown: give it an attribute outcomes"
    if strong < WEAK:
        return f"only {strong:.2f} of the variety would come from below it (at least {WEAK:g})"
    if left < LEAST_SHARE:
        return f"it would leave {left:.0%} of the different samples (at least {LEAST_SHARE:.0%})"
    return ""


def _rate(seconds: float) -> str:
    if seconds <= 0.0:
        return "very many"
    return f"{1.0 / seconds:,.0f}" if seconds < 0.1 else f"{1.0 / seconds:.2g}"
