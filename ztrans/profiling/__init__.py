"""Measure steps and machines, and fit the costs of planning to the measurements."""
