"""A function becomes a program: the step runs once on tensors without values, and is recorded."""
