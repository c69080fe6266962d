"""Which values of forward are kept for backward, recomputed, or moved to the host, within a limit of live bytes."""
