"""The benchmark ``soak``: random faults for an hour, against one node and many kinds of jobs."""
