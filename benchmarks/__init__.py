"""Measurements of Penstock beside its peers: ``python -m benchmarks NAME``."""
