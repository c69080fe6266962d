"""Compile programs with Inductor: which equations run as one kernel, and how values are laid out in memory."""
