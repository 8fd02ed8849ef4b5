"""The benchmark ``wide``: Penstock on many simulated cores."""
