"""Tracing turns a function into a program: the step runs once, on tensors without values, and is recorded."""
