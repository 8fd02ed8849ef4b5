"""The benchmark ``faults``: members of a group, or the node, that lag, die or restart."""
