"""Lifting: the step of an ordinary training loop, with its module and optimizers, as a pure step and its state."""
