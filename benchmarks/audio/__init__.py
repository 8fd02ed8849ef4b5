"""The benchmark ``audio``: recordings to log-mel batches."""
