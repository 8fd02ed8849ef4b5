"""Packing: the samples of a deterministic pipeline written as tar shards."""
