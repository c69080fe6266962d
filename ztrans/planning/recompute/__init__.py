"""Which values of forward are kept for backward, and which are computed again, within a limit of live bytes."""
