"""The analyser: why training waits, what would help, and by how much."""
