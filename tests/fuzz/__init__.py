"""Random train steps against the plain step: programs, optimizers and options that nobody chose by hand.

A whole number is a seed, and a seed is a case: the same on every machine.

    python -m tests.fuzz --runs 5000      # seeds 0 to 4999
    python -m tests.fuzz --only 123       # one of them, with all that is known of it
"""
