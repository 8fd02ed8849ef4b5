"""What reusing partly augmented samples costs in different ones, and which split and reuse pay."""

from __future__ import annotations

from penstock.diversity.report import Diversity, Row

__all__ = ["Diversity", "Row"]
