"""The contestants, one file each: Penstock's own loaders, and its peers.

Each function here takes a workload, imports its modules, makes the dataset, and returns a function
that makes the loader: so the time to the first batch is that of the loader alone. To add a peer,
add a file here and an entry in the benchmark's list of contestants.
"""
