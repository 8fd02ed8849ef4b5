"""The benchmark ``analyze``: predictions of an analysis compared with real runs."""
