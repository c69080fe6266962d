"""What the host costs: the first call, a trace, and a warm step."""
