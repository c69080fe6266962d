"""Parallelism that a step contains itself: collectives of torch.distributed, and DTensors."""
