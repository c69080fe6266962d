"""The Python values around a step: those that it reads besides its arguments, and those that its trace changes."""
