"""The benchmark ``simulate``: the decisions of a cluster, with as many machines as one likes."""
