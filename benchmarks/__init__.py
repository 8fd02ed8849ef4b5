"""Benchmarks of Penstock and its peers: ``python -m benchmarks NAME``."""
