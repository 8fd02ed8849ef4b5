"""Pools of workers, which prepare samples. All share one contract, in ``pool``."""
