"""Finding out why training waits: the analyser, the profiler, the doctor, and their plots."""
