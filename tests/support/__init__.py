"""What several tests use: train steps, worlds of many ranks in one process, doubles of a GPU."""
