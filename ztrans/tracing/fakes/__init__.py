"""The fake tensors of a trace, which have types and no elements."""
