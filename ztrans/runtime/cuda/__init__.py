"""Run programs on GPUs: streams, collectives by NCCL or symmetric memory, and whole steps as CUDA graphs."""
