"""Benchmarks of reusing prepared samples: ``refurbish``, ``encode`` and ``accuracy``."""
