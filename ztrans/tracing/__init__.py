"""Tracing turns a function into a program: the function runs once, on tensors without values, and is recorded."""
