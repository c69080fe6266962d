"""A program runs: on the devices of one rank, beside the other ranks."""
