"""The benchmark ``interference``: what a loader costs the training loop beside it."""
