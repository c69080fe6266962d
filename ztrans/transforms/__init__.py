"""The transforms, one file each. `base` has their class; `shard_params` uses the pass `reduce_once`."""
