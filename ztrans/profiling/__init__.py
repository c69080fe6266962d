"""Measure a step as it runs, and fit the costs that planning uses to the measurements."""
