"""The transforms, one file each. `base` has their class; others use the passes `reduce_once` and `cast_on_shards`."""
