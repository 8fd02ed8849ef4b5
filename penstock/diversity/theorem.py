"""The expected number of different versions of a sample when partly augmented samples are reused.

Each version combines one of ``partial`` outcomes above the split with one of ``final`` outcomes
below it, all equally likely. The outcome above is drawn once every ``reuse`` epochs, the one below
every epoch. This is Theorem 1 of Revamper (Lee et al., USENIX ATC 2021), rearranged so that it
holds for 1 outcome and for 1e300: the formula as printed would subtract nearly equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WEAK = 0.4
"""With a ``strength`` of the final part below this, the paper found that accuracy suffers."""


def unique(partial: float, final: float, reuse: int, epochs: int) -> float:
    """The expected number of different versions of one sample in this many epochs.

    Reuse 1 is standard training. ``partial`` and ``final`` are 1 or more, and may be infinite.

    >>> unique(partial=2, final=1, reuse=1, epochs=2)
    1.5
    >>> round(unique(partial=1e300, final=2, reuse=2, epochs=100), 6)
    75.0
    """
    reuse = min(reuse, epochs)
    # The share of the final outcomes that one kept sample is combined with, and their number.
    met_share = 1.0 if final == 1.0 else -math.expm1(reuse * math.log1p(-1.0 / final))
    met = final * met_share if met_share > 0.0 else float(reuse)
    made = met_share / partial
    if made == 1.0:
        return 1.0
    # partial * final * (1 - (1 - made) ** (epochs / reuse)), without a product that may overflow.
    log_missed = -math.log1p(-made)
    renewals = epochs / reuse
    seen = -math.expm1(-renewals * log_missed)
    return renewals * met * _ratio(log_missed, made) * _ratio(seen, renewals * log_missed)


def share(partial: float, final: float, reuse: int, epochs: int) -> float:
    """The versions that remain with reuse, as a share of those of standard training: at most 1."""
    ratio = unique(partial, final, reuse, epochs) / unique(partial, final, 1, epochs)
    return min(1.0, ratio)


def strength(above: Sequence[float], below: Sequence[float]) -> float:
    """The part of the variety that comes from below the split: log |A_F| / log |A|, from 0 to 1.

    It is 1 if nothing is random, because then there is no variety to lose.

    >>> round(strength(above=[529.0], below=[1e9, 2.0]), 3)
    0.774
    """
    final = math.fsum(map(math.log, below))
    whole = math.fsum(map(math.log, above)) + final
    return final / whole if whole > 0.0 else 1.0


def _ratio(numerator: float, denominator: float) -> float:
    """The ratio of two numbers that approach zero together; 1 if both are zero."""
    return numerator / denominator if denominator > 0.0 else 1.0
