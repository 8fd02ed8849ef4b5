"""Pools: who does the work. All share one contract, in ``pool``."""
