"""Run a program: the generated code of one rank, its collectives, and what the ranks must agree on."""
