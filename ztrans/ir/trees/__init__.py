"""Trees: the structure of a state, and the names of its leaves."""
