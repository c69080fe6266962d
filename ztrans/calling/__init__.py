"""Calling: how the Python arguments of a step become flat tensors, and which program may run on them."""
