"""The benchmark ``jobs``: several training jobs on one machine over the same data."""
