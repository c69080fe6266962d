"""Functions that a step calls in a region of its own: checkpoints, and the sub-programs of higher-order operators."""
