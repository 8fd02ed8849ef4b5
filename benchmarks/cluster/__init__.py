"""The benchmark ``cluster``: the partitioned cache on several hosts, and faults of hosts."""
