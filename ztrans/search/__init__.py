"""Search for the transforms with which a step is fastest on a cluster, without a GPU."""
