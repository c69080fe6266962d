"""A real step is measured, and the costs of planning are fitted to it."""
