"""Several machines: a cache divided over their nodes, and the list of machines that are alive."""
