"""Lift: an ordinary training loop as a pure train step and its state."""
