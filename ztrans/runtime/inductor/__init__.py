"""Compile programs with Inductor: which equations run as one kernel, and the layouts of their values."""
