"""Lifting: the body of an ordinary training loop, with its module and optimizers, becomes a pure step and its state."""
