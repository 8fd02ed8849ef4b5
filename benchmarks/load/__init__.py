"""Benchmarks of loading photographs: ``load`` and ``randaugment``."""
