"""Which values of forward backward keeps, recomputes or finds on the host, within a limit of live bytes."""
