"""Collectives on GPUs: streams, NCCL, symmetric memory, and whole steps as CUDA graphs."""
