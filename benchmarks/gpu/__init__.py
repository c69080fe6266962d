"""Kernels, collectives and training steps on one GPU. See __main__.py."""
