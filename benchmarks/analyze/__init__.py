"""The benchmark ``analyze``: predictions of ``penstock analyze`` compared with real runs."""
