"""The walks over a program that put equations on shards: axes of leaves, layouts of values, sharding rules."""
