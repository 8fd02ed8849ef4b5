"""The node: one background process that prepares batches once for every job on the machine."""
