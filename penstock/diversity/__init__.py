"""How many different samples reuse leaves, and the choice of ``refurbish("auto")``."""

from __future__ import annotations

from penstock.diversity.report import Diversity, DiversityRow

__all__ = ["Diversity", "DiversityRow"]
