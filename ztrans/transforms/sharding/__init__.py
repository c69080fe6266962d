"""How `shard_params` rewrites each equation of a plain program: axes of leaves, layouts of values, sharding rules."""
