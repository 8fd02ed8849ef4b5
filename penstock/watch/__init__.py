"""Watching loaders while they run: what they publish, and the views of it."""
