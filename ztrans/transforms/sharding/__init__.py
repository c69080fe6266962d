"""What `shard_params` does to each equation of a plain program: axes of leaves, layouts of values, sharding rules."""
