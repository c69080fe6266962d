"""Published runs of others, simulated with their own schedules. See __main__.py."""
