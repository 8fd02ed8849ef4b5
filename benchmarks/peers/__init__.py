"""The contestants, one file each: Penstock's own ways of loading, and its peers.

A function here is given a workload; it imports what it needs, makes the dataset, and returns what
makes the loader, so that the time to the first batch counts the loader alone. Adding a peer is
adding a file here and a line in the benchmark's list of contestants.
"""
