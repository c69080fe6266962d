"""Measuring a real step, and fitting the costs that planning uses to the measurements."""
