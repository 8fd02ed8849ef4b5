"""How many different samples training sees when partly augmented ones are reused.

Of ``partial`` outcomes above the split and ``final`` ones below it, all equally likely, one of the
first is drawn every ``reuse`` epochs, and one of the second every epoch. This is Theorem 1 of
Revamper (Lee et al., USENIX ATC 2021), written so that it holds for 1 outcome and for 1e300: the
formula as it is printed there would subtract numbers that are nearly alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WEAK = 0.4
"""Below this ``strength`` of the final part the paper found that accuracy suffers."""


def unique(partial: float, final: float, reuse: int, epochs: int) -> float:
    """How many different versions of one sample are to be expected in so many epochs.

    Reuse 1 is standard training. Counts are 1 or more, and may be infinite.

    >>> unique(partial=2, final=1, reuse=1, epochs=2)
    1.5
    >>> round(unique(partial=1e300, final=2, reuse=2, epochs=100), 6)
    75.0
    """
    reuse = min(reuse, epochs)
    # Of the final outcomes, the part that one kept version meets, and how many those are.
    met = 1.0 if final == 1.0 else -math.expm1(reuse * math.log1p(-1.0 / final))
    many = final * met if met > 0.0 else float(reuse)
    made = met / partial
    if made == 1.0:
        return 1.0
    # partial * final * (1 - (1 - made) ** (epochs / reuse)), and no product that may overflow.
    never = -math.log1p(-made)
    often = epochs / reuse
    return often * many * _ratio(never, made) * _ratio(-math.expm1(-often * never), often * never)


def share(partial: float, final: float, reuse: int, epochs: int) -> float:
    """The part of standard training's different samples that reusing leaves: at most 1."""
    found = unique(partial, final, reuse, epochs) / unique(partial, final, 1, epochs)
    return min(1.0, found)


def strength(above: Sequence[float], below: Sequence[float]) -> float:
    """How much of the variety comes after the split: log |A_F| / log |A|, from 0 to 1.

    Where nothing is random there is nothing to lose, and it is 1.

    >>> round(strength(above=[529.0], below=[1e9, 2.0]), 3)
    0.774
    """
    final = math.fsum(map(math.log, below))
    whole = math.fsum(map(math.log, above)) + final
    return final / whole if whole > 0.0 else 1.0


def _ratio(above: float, below: float) -> float:
    """Of two numbers that go to zero together."""
    return above / below if below > 0.0 else 1.0
