"""Turn an ordinary training loop into a pure train step and its state."""
