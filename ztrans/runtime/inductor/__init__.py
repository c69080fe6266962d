"""Programs compiled by Inductor: what is fused, how it lies in memory, which kernels it calls."""
