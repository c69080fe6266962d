"""Compare random train steps with the plain step: random programs, optimizers and options.

A seed is a whole number. It determines one case, the same on every machine.

    python -m tests.fuzz --runs 5000      # seeds 0 to 4999
    python -m tests.fuzz --only 123       # one seed; if it fails, with its options and the whole traceback
"""
