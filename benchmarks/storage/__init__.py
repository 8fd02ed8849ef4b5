"""Loaders beside each other on slow storage: an object store with latency and slow requests."""
