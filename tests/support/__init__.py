"""Support for tests: train steps, many ranks in one process, a simulated GPU."""
