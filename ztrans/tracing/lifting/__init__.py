"""An ordinary training loop's step, with its module and optimizers, as a pure step and its state."""
