"""What `fuse_cast_gather` does to parameters that are scaled by a number of the whole tensor, and then cast."""
