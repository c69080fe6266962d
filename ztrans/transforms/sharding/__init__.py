"""The walks over a program that put equations on shards, the axes of leaves, and the layouts of values."""
