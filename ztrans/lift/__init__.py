"""An ordinary training loop as a pure train step and its state."""
